"""What a request asks for, with the field names, defaults and meanings that users of vLLM know."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.errors import RequestError

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM: dividing by them would overflow."""
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16


@dataclass(frozen=True)
class StructuredOutputs:
    """A constraint on the output's form; exactly one of the fields is set.

    Args:
        json: a JSON schema, as text or as a mapping.
        json_object: any JSON object.
        regex: a regular expression that the whole output matches.
        choice: strings of which the output is one.
        grammar: a context-free grammar in Lark's notation.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        values = (self.json, self.json_object or None, self.regex, self.choice, self.grammar)
        if sum(value is not None for value in values) != 1:
            raise RequestError("structured_outputs: give exactly one of json, json_object, regex, choice and grammar")


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    Args:
        n, best_of: completions returned, and completions generated of which the `n` most probable are returned.
        temperature: 0 (or below 1e-5) is greedy, and then top_p, top_k and min_p play no part.
        top_k: keeps the k most probable tokens, ties with the k-th included; 0 or -1 keeps all.
        top_p: keeps the fewest most probable tokens that hold this much probability; ties by lower id.
        min_p: keeps tokens with at least this share of the most probable one's probability.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output.
        frequency_penalty, presence_penalty: subtracted from logits of tokens in the output, each time and once.
        logit_bias: added to the logits, by token id.
        allowed_token_ids: only these may come.
        bad_words: strings that may not come.
        seed: makes the tokens reproducible, with any drafter, in any batch.
        stop: strings that end the text; they are cut from it unless `include_stop_str_in_output`.
        stop_token_ids: ids that end the output.
        ignore_eos: goes on after the end-of-text token.
        max_tokens: most output tokens; None means until the context is full.
        min_tokens: end-of-text and `stop_token_ids` cannot come before this many tokens.
        logprobs: log-probabilities of this many most probable tokens beside the chosen one's, at each position.
        prompt_logprobs: the same for the prompt's tokens.
        structured_outputs: a grammar that the output obeys.

    Raises `RequestError` naming the field, its value and what is allowed.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputs | None = None
    typical_p: float | None = None

    def __post_init__(self) -> None:
        _integer("n", self.n, 1)
        if self.best_of is not None:
            _integer("best_of", self.best_of, self.n)
        _number("temperature", self.temperature, 0.0, math.inf)
        _number("top_p", self.top_p, 0.0, 1.0)
        _integer("top_k", self.top_k, -1)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf)
        _require(self.repetition_penalty > 0, "repetition_penalty: 0 would erase the logits; give more than 0")
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        for token, bias in (self.logit_bias or {}).items():
            _integer("logit_bias", token, 0)
            _number(f"logit_bias[{token}]", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None:
            _require(len(self.allowed_token_ids) > 0, "allowed_token_ids: it is empty; leave it out to allow all")
        for field in ("allowed_token_ids", "stop_token_ids"):
            for token in getattr(self, field) or ():
                _integer(field, token, 0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        for field in ("stop", "bad_words"):
            value = getattr(self, field)
            for string in [value] if isinstance(value, str) else value or ():
                _require(isinstance(string, str) and string != "", f"{field}: {string!r} is not a non-empty string")
        limit = f"stop: {len(self.stop_strings)} strings given; at most {MAX_STOP_STRINGS}"
        _require(len(self.stop_strings) <= MAX_STOP_STRINGS, limit)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens: {self.min_tokens} is above max_tokens {self.max_tokens}")
        for field in ("logprobs", "prompt_logprobs"):
            if getattr(self, field) is not None:
                _integer(field, getattr(self, field), 0, MAX_LOGPROBS)
        _require(
            self.typical_p in (None, 1.0),
            "typical_p: not supported, since it has no place among the transforms that vLLM and OpenAI define; "
            "use min_p or top_p",
        )
        _require(
            self.structured_outputs is None or not self.ignore_eos,
            "ignore_eos: a structured output ends when its grammar does; leave one of the two out",
        )
        _require(self.detokenize or not self.stop_strings, "stop: stop strings need detokenize=True")

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RequestError(message)


def _integer(field: str, value: Any, least: int, most: int | None = None) -> None:
    good = isinstance(value, int) and not isinstance(value, bool)
    allowed = f"at least {least}" if most is None else f"from {least} to {most}"
    if not good or value < least or (most is not None and value > most):
        raise RequestError(f"{field}: {value!r} is not an integer {allowed}")


def _number(field: str, value: Any, least: float, most: float) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not math.isfinite(value) or not least <= value <= most:
        allowed = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise RequestError(f"{field}: {value!r} is not a number {allowed}")
