"""The flags of all commands, in groups, and the configuration that they make.

Knows no torch. Flags whose default is None leave the choice to the configuration that they fill.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from foredraft.config import EngineConfig, SpeculativeConfig, require
from foredraft.errors import ConfigError

if TYPE_CHECKING:
    from foredraft.sampling.params import SamplingParams

Dtype = Literal["bfloat16", "float32"]
Method = Literal["block", "ngram", "draft_model", "prediction", "mixture"]
Verification = Literal["token", "block", "coupled"]

MODEL = "Model and engine"
SPECULATION = "Speculation"
SAMPLING = "Sampling"

JsonPath = Annotated[
    Path | None, typer.Option("--json", metavar="PATH", help="Write what was found as JSON; `-` is stdout.")
]
ModelTag = Annotated[str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.")]


@dataclass(frozen=True)
class EngineFlags:
    """The target and the engine around it."""

    model: Annotated[
        str,
        typer.Option(help="A directory, a hub id in the local cache, a .gguf file, or demo.", rich_help_panel=MODEL),
    ] = "demo"
    tokenizer: Annotated[
        str | None, typer.Option(help="Where the tokenizer is, if not with the model.", rich_help_panel=MODEL)
    ] = None
    dtype: Annotated[Dtype, typer.Option(help="Of weights and KV cache.", rich_help_panel=MODEL)] = "bfloat16"
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=MODEL)] = "auto"
    max_model_len: Annotated[
        int | None,
        typer.Option(min=1, help="Longest prompt plus output, in tokens; the model's own.", rich_help_panel=MODEL),
    ] = None
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests run at once.", rich_help_panel=MODEL)] = 32
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens in one target forward.", rich_help_panel=MODEL)
    ] = 2048
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a KV-cache block.", rich_help_panel=MODEL)] = 16
    kv_cache_memory: Annotated[
        int | None, typer.Option(min=1, help="Bytes for the KV cache.", rich_help_panel=MODEL)
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(help="CUDA: share of its memory for weights, forwards and KV cache.", rich_help_panel=MODEL),
    ] = None
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Share what texts that begin alike have in common.",
            rich_help_panel=MODEL,
        ),
    ] = True
    invariant: Annotated[
        bool,
        typer.Option("--invariant", help="The same bits for a token in any company.", rich_help_panel=MODEL),
    ] = False
    quantization: Annotated[
        str | None,
        typer.Option("--quantization", "-q", help="None yet; .gguf files are unpacked.", rich_help_panel=MODEL),
    ] = None
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor-parallel-size", "-tp", help="Devices; 1.", rich_help_panel=MODEL)
    ] = 1
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run code that the model brings.", rich_help_panel=MODEL),
    ] = False

    def named(self, model: str | None) -> EngineFlags:
        """With the model that was named without a flag; raises `ConfigError` when `--model` names another."""
        if model is None:
            return self
        require(self.model in (EngineFlags.model, model), f"--model {self.model} contradicts {model}")
        return replace(self, model=model)

    def config(self, speculative: SpeculativeConfig | None) -> EngineConfig:
        """The engine's configuration; raises `ConfigError`."""
        return EngineConfig(**asdict(self), speculative=speculative)


@dataclass(frozen=True)
class SpeculativeFlags:
    """How drafts are made and verified: single flags, or all of it as vLLM's JSON."""

    method: Annotated[
        Method | None, typer.Option(help="Who drafts; ngram, for demo mixed with block.", rich_help_panel=SPECULATION)
    ] = None
    speculative_model: Annotated[
        str | None,
        typer.Option(help="The draft model or block drafter; its config tells which.", rich_help_panel=SPECULATION),
    ] = None
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-speculative-tokens",
            "--speculative-draft-length",
            min=1,
            help="Draft tokens per step (γ); also as --speculative-draft-length.",
            rich_help_panel=SPECULATION,
        ),
    ] = None
    verification: Annotated[
        Verification | None, typer.Option(help="How drafts are verified.", rich_help_panel=SPECULATION)
    ] = None
    prompt_lookup_max: Annotated[
        int | None, typer.Option(min=1, help="ngram: longest suffix looked up.", rich_help_panel=SPECULATION)
    ] = None
    prompt_lookup_min: Annotated[
        int | None, typer.Option(min=1, help="ngram: shortest suffix looked up.", rich_help_panel=SPECULATION)
    ] = None
    tree_width: Annotated[
        int | None,
        typer.Option(min=1, help="Drafts for each position; above 1 drafts are trees.", rich_help_panel=SPECULATION),
    ] = None
    corrector: Annotated[
        str | None,
        typer.Option(help="block: none drafts without correction; the drafter's own.", rich_help_panel=SPECULATION),
    ] = None
    adaptive: Annotated[
        bool | None,
        typer.Option(
            "--adaptive/--no-adaptive",
            help="Draft as much as pays, up to γ, or always γ; adaptive.",
            rich_help_panel=SPECULATION,
        ),
    ] = None
    explain_lengths: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="A line a step on draft lengths; `-` is stderr.", rich_help_panel=SPECULATION
        ),
    ] = None
    speculative_config: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="All of the above as vLLM's JSON.", rich_help_panel=SPECULATION),
    ] = None

    def config(self) -> SpeculativeConfig:
        """The speculative configuration; raises `ConfigError` when JSON and single flags are mixed."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        text = given.pop("speculative_config", None)
        if text is None:
            if "speculative_model" in given:
                given["model"] = given.pop("speculative_model")
            return SpeculativeConfig(**given)
        config = parse_speculative_config(text)
        for name, value in given.items():
            agrees = name == "method" and value == json.loads(text).get("method")
            require(agrees, f"--speculative-config and {_flag(name)} both say how to draft; give one of them")
        return config

    def given(self) -> list[str]:
        """The flags that the user typed."""
        return [_flag(name) for name, value in asdict(self).items() if value is not None]


@dataclass(frozen=True)
class SpeculationSwitch:
    """Speculation on or off."""

    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="Plain decoding.", rich_help_panel=SPECULATION)
    ] = False

    def config(self, flags: SpeculativeFlags) -> SpeculativeConfig | None:
        """The configuration, None for plain decoding; raises `ConfigError` when the two contradict."""
        if not self.no_speculation:
            return flags.config()
        for flag in flags.given():
            raise ConfigError(f"--no-speculation and {flag} contradict each other; give one of them")
        return None


@dataclass(frozen=True)
class SamplingFlags:
    """How tokens are chosen and where a text ends, by the names of `SamplingParams`."""

    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of output; 16.", rich_help_panel=SAMPLING)] = None
    min_tokens: Annotated[int | None, typer.Option(help="No end before so many; 0.", rich_help_panel=SAMPLING)] = None
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; 1.", rich_help_panel=SAMPLING)] = None
    top_p: Annotated[float | None, typer.Option(help="Nucleus; 1.", rich_help_panel=SAMPLING)] = None
    top_k: Annotated[
        int | None, typer.Option(help="Most likely tokens kept; 0 keeps all.", rich_help_panel=SAMPLING)
    ] = None
    min_p: Annotated[
        float | None, typer.Option(help="Least share of the top token's probability; 0.", rich_help_panel=SAMPLING)
    ] = None
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1 avoids tokens of prompt and output; 1.", rich_help_panel=SAMPLING)
    ] = None
    frequency_penalty: Annotated[
        float | None, typer.Option(help="Per occurrence in the output; 0.", rich_help_panel=SAMPLING)
    ] = None
    presence_penalty: Annotated[
        float | None, typer.Option(help="For any occurrence in the output; 0.", rich_help_panel=SAMPLING)
    ] = None
    logit_bias: Annotated[
        str | None, typer.Option(metavar="JSON", help='Added to logits, as {"id": bias}.', rich_help_panel=SAMPLING)
    ] = None
    allowed_token_ids: Annotated[
        list[int] | None, typer.Option(help="Only these ids may come; repeatable.", rich_help_panel=SAMPLING)
    ] = None
    bad_words: Annotated[
        list[str] | None, typer.Option(help="Text that may not come; repeatable.", rich_help_panel=SAMPLING)
    ] = None
    structured_outputs: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="One of json, json_object, regex, choice and grammar, by name.",
            rich_help_panel=SAMPLING,
        ),
    ] = None
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.", rich_help_panel=SAMPLING)] = None
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the output; repeatable.", rich_help_panel=SAMPLING)
    ] = None
    stop_token_ids: Annotated[
        list[int] | None, typer.Option(help="Ids that end the output; repeatable.", rich_help_panel=SAMPLING)
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None,
        typer.Option(
            "--include-stop-str-in-output", help="Show the text that ended the output.", rich_help_panel=SAMPLING
        ),
    ] = None
    ignore_eos: Annotated[
        bool | None, typer.Option("--ignore-eos", help="Go on to --max-tokens.", rich_help_panel=SAMPLING)
    ] = None
    skip_special_tokens: Annotated[
        bool | None,
        typer.Option(
            "--skip-special-tokens/--keep-special-tokens",
            help="Leave special tokens out of the text; they are.",
            rich_help_panel=SAMPLING,
        ),
    ] = None

    def params(self, **more: Any) -> SamplingParams:
        """The sampling parameters, with `more` of them; raises a `ForedraftError` naming what is out of range."""
        given = given_fields(self)
        if "logit_bias" in given:
            biases = _json_object("--logit-bias", given["logit_bias"])
            given["logit_bias"] = {_token_id(token): bias for token, bias in biases.items()}
        structured = given.pop("structured_outputs", None)
        constraint = None if structured is None else _json_object("--structured-outputs", structured)

        from foredraft.sampling.params import SamplingParams, StructuredOutputs

        if constraint is not None:
            known = [field.name for field in fields(StructuredOutputs)]
            for key in constraint:
                require(key in known, f"--structured-outputs: unknown key {key!r}; known keys: {', '.join(known)}")
            given["structured_outputs"] = StructuredOutputs(**constraint)
        return SamplingParams(**given, **more)


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """The configuration that vLLM's JSON describes; raises `ConfigError` naming the key at fault.

    A mixture's drafters are objects of the same keys; those that set no draft length have the mixture's.
    """
    return _speculative_config(_json_object("--speculative-config", text), "--speculative-config")


def _speculative_config(found: dict[str, Any], where: str) -> SpeculativeConfig:
    known = [field.name for field in fields(SpeculativeConfig)]
    for key in found:
        require(key in known, f"{where}: unknown key {key!r}; known keys: {', '.join(known)}")
    for key in ("method", "model", "verification", "explain_lengths"):
        value = found.get(key)
        require(value is None or isinstance(value, str), f"{where}: {key}: {value!r} is not a string")
    if "drafters" in found:
        drafters = found["drafters"]
        whole = isinstance(drafters, list) and all(isinstance(each, dict) for each in drafters)
        require(whole, f"{where}: drafters: expected a list of objects, got {drafters!r}")
        length = {key: found[key] for key in ("num_speculative_tokens",) if key in found}
        parts = [_speculative_config({**length, **each}, f"{where}: drafters") for each in drafters]
        found = {**found, "drafters": tuple(parts)}
    try:
        return SpeculativeConfig(**found)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _json_object(flag: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{flag}: not JSON: {error}") from None
    require(isinstance(found, dict), f"{flag}: expected a JSON object, got {text!r}")
    return dict(found)


def _token_id(text: str) -> int:
    require(text.isdecimal(), f"--logit-bias: {text!r} is not a token id")
    return int(text)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def given_fields(group: Any) -> dict[str, Any]:
    """The fields of a flag group that the user set."""
    return {name: value for name, value in asdict(group).items() if value is not None}
