"""Request bodies: OpenAI's fields and the extensions that the field uses. What they mean is `params`' business.

Null means absent. Unknown fields are kept aside, to be counted. Types are strict, as with OpenAI: `"5"` is no number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from foredraft.serve.settings import (
    MAX_JSON_DEPTH,
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_PROMPTS,
    MAX_STOP,
    MAX_TOOLS,
)

TokenIds = list[int]
Stop = str | Annotated[list[str], Field(max_length=MAX_STOP)]


class Body(BaseModel):
    """A JSON object from a client."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {name: field for name, field in value.items() if field is not None}

    @property
    def unknown_fields(self) -> list[str]:
        """Fields that mean nothing here."""
        return list(self.model_extra or ())


class StreamOptions(Body):
    include_usage: bool = False


class Speculation(Body):
    """Our own switch.

    `origins` asks for how each token of a stream came about, as the web page shows.
    """

    enabled: bool = True
    num_speculative_tokens: Annotated[int, Field(ge=0)] | None = None
    origins: bool = False


class GenerationBody(Body):
    """What completions and chat have in common."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Stop | None = None
    seed: int | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    user: str | None = None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    priority: int = 0
    speculation: Speculation = Speculation()

    @model_validator(mode="before")
    @classmethod
    def _not_too_deep(cls, value: Any) -> Any:
        check_depth(value)
        return value

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream")
        return self


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS)]
    )
    logprobs: int | None = None
    echo: bool = False
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    suffix: str | None = None


class ContentPart(Body):
    type: str
    text: str | None = None


class Message(Body):
    """One message of a conversation; what a template reads beyond these fields is passed on."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class Function(Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"] = "function"
    function: NamedFunction


class JsonSchema(Body):
    name: str = "schema"
    description: str | None = None
    json_schema: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Prediction(Body):
    type: Literal["content"] = "content"
    content: str | list[ContentPart]


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    prediction: Prediction | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class EmbeddingBody(Body):
    """`POST /v1/embeddings`."""

    model: str | None = None
    input: (
        str
        | TokenIds
        | Annotated[list[str], Field(max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS)]
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None


class TokenizeBody(Body):
    """`POST /tokenize`: a prompt, or messages to render by the template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds


def check_depth(value: Any) -> None:
    """Raises `ValueError` where JSON is nested more than `MAX_JSON_DEPTH` deep: schemas and templates would recurse."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        below: list[Any] = []
        for each in level:
            if isinstance(each, Mapping):
                below += each.values()
            elif isinstance(each, list):
                below += each
        level = [each for each in below if isinstance(each, (Mapping, list))]
        if not level:
            return
    raise ValueError(f"the body is nested more than {MAX_JSON_DEPTH} levels deep")
