"""From a request body to what the engine takes: sampling parameters, draft length, rendered conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from foredraft.errors import RequestError
from foredraft.sampling.params import MAX_LOGPROBS, SamplingParams, StructuredOutputs
from foredraft.serve.errors import ApiError
from foredraft.serve.protocol import (
    ChatBody,
    CompletionBody,
    ContentPart,
    GenerationBody,
    Message,
    ResponseFormat,
)

DEFAULT_COMPLETION_TOKENS = 16


def draft_length(body: GenerationBody) -> int | None:
    """γ that the request asks for: None leaves it to the server, 0 is plain decoding."""
    return body.speculation.num_speculative_tokens if body.speculation.enabled else 0


def completion_params(body: CompletionBody, seed: int | None) -> SamplingParams:
    """Parameters of a completion. A prompt that is only to be scored (`echo` with no tokens) still takes a step.

    `seed` is the server's, for requests that give none.
    """
    if body.suffix:
        raise ApiError(400, "suffix: this model cannot fill in the middle; leave it out", param="suffix")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens: 0 is of use with echo only; give at least 1", param="max_tokens")
    if body.best_of is not None:
        if body.best_of < body.n:
            raise ApiError(400, f"best_of: {body.best_of} is below n {body.n}", param="best_of")
        if body.stream and body.best_of > body.n:
            raise ApiError(400, "best_of: completions cannot be ranked while they stream", param="best_of")
    _check_logprobs(body.logprobs, "logprobs")
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
    return _params(
        body,
        seed=seed if body.seed is None else body.seed,
        max_tokens=max_tokens,
        best_of=body.best_of,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )


def chat_params(body: ChatBody, constraint: StructuredOutputs | None, seed: int | None) -> SamplingParams:
    """Parameters of a chat answer, which goes on to the end of the context unless a limit is given.

    `seed` is the server's, for requests that give none.
    """
    if body.max_tokens == 0:
        raise ApiError(400, "max_tokens: 0 leaves no room for an answer; give at least 1", param="max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs: only with logprobs true", param="top_logprobs")
    _check_logprobs(body.top_logprobs, "top_logprobs")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return _params(
        body,
        seed=seed if body.seed is None else body.seed,
        max_tokens=limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structured_outputs=constraint,
    )


def _params(body: GenerationBody, **more: Any) -> SamplingParams:
    try:
        return SamplingParams(
            n=body.n,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            frequency_penalty=body.frequency_penalty,
            presence_penalty=body.presence_penalty,
            logit_bias=_biases(body.logit_bias),
            stop=body.stop or None,
            stop_token_ids=body.stop_token_ids,
            ignore_eos=body.ignore_eos,
            min_tokens=body.min_tokens,
            skip_special_tokens=body.skip_special_tokens,
            include_stop_str_in_output=body.include_stop_str_in_output,
            **more,
        )
    except RequestError as error:
        raise ApiError(400, str(error), param=str(error).partition(":")[0]) from None


def _check_logprobs(count: int | None, field: str) -> None:
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        raise ApiError(400, f"{field}: {count} is not from 0 to {MAX_LOGPROBS}", param=field)


def _biases(given: Mapping[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    for token in given:
        if not (token.isascii() and token.isdecimal()) or len(token) > 9:
            raise ApiError(400, f"logit_bias: {token[:20]!r} is not a token id", param="logit_bias")
    return {int(token): bias for token, bias in given.items()}


def response_constraint(wanted: ResponseFormat | None) -> StructuredOutputs | None:
    """The grammar of a `response_format`."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return StructuredOutputs(json_object=True)
    if wanted.json_schema is None:
        raise ApiError(400, "response_format: json_schema is missing", param="response_format")
    return StructuredOutputs(json=wanted.json_schema.json_schema)


def text_of(content: str | Sequence[ContentPart] | None, param: str) -> str:
    """A message's text; parts are put together."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in ("text", "refusal") or not isinstance(part.text, str):
            raise ApiError(400, f"{param}: a part of type {part.type!r}; this model reads text only", param=param)
    return "\n".join(part.text or "" for part in content)


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates read them: text content, `developer` as `system`, tool arguments as objects."""
    rendered = []
    for index, message in enumerate(messages):
        fields = message.model_dump(exclude_none=True)
        fields["role"] = "system" if message.role == "developer" else message.role
        fields["content"] = text_of(message.content, f"messages.{index}.content")
        if message.tool_calls is not None:
            fields["tool_calls"] = [_template_call(call, index) for call in message.tool_calls]
        rendered.append(fields)
    return rendered


def _template_call(call: Mapping[str, Any], index: int) -> dict[str, Any]:
    param = f"messages.{index}.tool_calls"
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{param}: a call without a function name", param=param)
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise ApiError(400, f"{param}: the arguments are not JSON", param=param) from None
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def template_options(body: ChatBody) -> dict[str, Any]:
    """What the template is told beside messages and tools."""
    goes_on = body.continue_final_message
    prompting = body.add_generation_prompt
    if goes_on and prompting:
        raise ApiError(
            400,
            "continue_final_message: contradicts add_generation_prompt, which opens a new message",
            param="continue_final_message",
        )
    if goes_on and body.messages[-1].role != "assistant":
        raise ApiError(
            400, "continue_final_message: the last message is not the assistant's", param="continue_final_message"
        )
    reserved = {"messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template"}
    given = body.chat_template_kwargs or {}
    for name in given:
        if name in reserved or not name.isidentifier():
            raise ApiError(400, f"chat_template_kwargs: {name!r} cannot be set here", param="chat_template_kwargs")
    opening = not goes_on if prompting is None else prompting
    return {**given, "add_generation_prompt": opening, **({"continue_final_message": True} if goes_on else {})}
