"""From a prompt and its parameters to requests that the engine can run; everything wrong is refused here."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from foredraft.config import VERIFICATIONS, EngineConfig, require_at_least, require_choice, require_integer
from foredraft.engine.build import Built
from foredraft.engine.detokenizer import Detokenizer
from foredraft.engine.request import Request
from foredraft.engine.results import Assembled
from foredraft.errors import ContextLengthError, RequestError
from foredraft.kv.pool import blocks_for
from foredraft.sampling.grammar import GrammarState, Vocabulary
from foredraft.sampling.params import SamplingParams
from foredraft.sampling.state import SamplingState

Prompt = str | Mapping[str, Any]
PROMPT_FIELDS = ("prompt", "prompt_token_ids", "prediction")


class RequestFactory:
    """Makes requests for one engine."""

    def __init__(self, config: EngineConfig, built: Built) -> None:
        self._config = config
        self._built = built
        self._ids = itertools.count()
        self._vocabulary: Vocabulary | None = None

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one KV-cache block, the draft model's part included."""
        return self._built.bytes_per_block

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """Ids that end an output."""
        return self._built.eos_token_ids

    def rendered(self, messages: Sequence[Mapping[str, Any]], **template_options: Any) -> dict[str, Any]:
        """A conversation as a prompt with its token ids, by the model's chat template."""
        options = {"add_generation_prompt": True, **template_options}
        text = self._tokenizer("chat").apply_chat_template(list(messages), **options)
        ids = self._tokenizer("chat").encode(text, add_special_tokens=False)
        return {"prompt": text, "prompt_token_ids": ids}

    def assemble(
        self,
        prompt: Prompt,
        params: SamplingParams,
        gamma: int | None,
        verification: str | None = None,
        priority: int = 0,
    ) -> Assembled:
        """The requests (`n` or `best_of` of them) of one prompt.

        Args:
            gamma: draft tokens per step for these requests; None for the configured number.
            verification: the rule for these requests; None for the configured one.
            priority: lower is served first.
        """
        require_integer("priority", priority)
        if gamma is not None:
            require_at_least("num_speculative_tokens", gamma, 0)
        if verification is not None:
            require_choice("verification", verification, VERIFICATIONS)
        text, ids, prediction = self._parsed(prompt)
        max_tokens = self._fitting(ids, params)
        count = max(params.n, params.best_of or 0)
        seeds = [None if params.seed is None else params.seed + index for index in range(count)]
        requests = [self._request(ids, replace(params, seed=seed), max_tokens, verification) for seed in seeds]
        for request in requests:
            request.prediction = prediction
            request.max_draft_tokens = gamma
            request.priority = priority
            # Ranking completions takes their tokens' log-probabilities, shown or not.
            request.num_logprobs = 0 if count > params.n and params.logprobs is None else params.logprobs
        return Assembled(text, params, requests, self._built.tokenizer)

    def _request(
        self, ids: Sequence[int], params: SamplingParams, max_tokens: int, verification: str | None
    ) -> Request:
        tokenizer = self._built.tokenizer
        eos = self._built.eos_token_ids
        state = SamplingState(
            params,
            ids,
            vocab_size=self._built.vocab_size,
            eos_token_ids=tuple(eos),
            bad_words_token_ids=self._bad_words(params),
            grammar=self._grammar(params),
            verification=verification or self._verification(params),
        )
        detokenizer = None
        if tokenizer is not None and params.detokenize:
            detokenizer = Detokenizer(
                tokenizer,
                ids,
                params.stop_strings,
                skip_special_tokens=params.skip_special_tokens,
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        return Request(
            request_id=f"req-{next(self._ids)}",
            token_ids=list(ids),
            num_prompt_tokens=len(ids),
            params=params,
            state=state,
            max_tokens=max_tokens,
            detokenizer=detokenizer,
            stop_token_ids=frozenset(params.stop_token_ids or ()),
            eos_token_ids=frozenset(eos),
        )

    def _verification(self, params: SamplingParams) -> str:
        speculative = self._config.speculative
        if speculative is not None and speculative.verification is not None:
            return speculative.verification
        return "block" if params.seed is None else "coupled"

    def _parsed(self, prompt: Prompt) -> tuple[str | None, list[int], list[int]]:
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        unknown = [key for key in prompt if key not in PROMPT_FIELDS]
        if unknown:
            raise RequestError(f"prompt: unknown field {unknown[0]!r}; allowed: {', '.join(PROMPT_FIELDS)}")
        text = prompt.get("prompt")
        ids = prompt.get("prompt_token_ids")
        if ids is None:
            if not isinstance(text, str):
                raise RequestError("prompt: give text as `prompt` or ids as `prompt_token_ids`")
            ids = self._tokenizer("a text prompt").encode(text)
        ids = self._checked_ids(ids)
        prediction = prompt.get("prediction")
        if prediction is None:
            return text, ids, []
        if isinstance(prediction, str):
            prediction = self._tokenizer("a text prediction").encode(prediction, add_special_tokens=False)
        return text, ids, self._checked_ids(prediction)

    def _checked_ids(self, ids: Sequence[int]) -> list[int]:
        for position, token in enumerate(ids):
            if not isinstance(token, int) or not 0 <= token < self._built.vocab_size:
                raise RequestError(
                    f"prompt_token_ids: {token!r} at index {position} is not an id of this model's vocabulary "
                    f"(0 to {self._built.vocab_size - 1})"
                )
        return list(ids)

    def _fitting(self, ids: Sequence[int], params: SamplingParams) -> int:
        """`max_tokens`, checked against context and cache; the rest of the context when it is None."""
        longest = self._built.max_model_len
        if not ids:
            raise RequestError("prompt: it has no tokens; give at least one")
        if len(ids) >= longest:
            raise ContextLengthError(
                f"prompt: {len(ids)} tokens leave no room for output in a context of {longest} tokens; shorten the "
                "prompt or raise max_model_len"
            )
        max_tokens = longest - len(ids) if params.max_tokens is None else params.max_tokens
        if len(ids) + max_tokens > longest:
            raise ContextLengthError(
                f"max_tokens: {max_tokens} and a prompt of {len(ids)} tokens exceed the context of {longest} tokens; "
                f"lower max_tokens to {longest - len(ids)}"
            )
        pool = self._built.engine.scheduler.pool
        needed = blocks_for(len(ids) + max_tokens, pool.block_size)
        if needed > pool.num_blocks:
            raise RequestError(
                f"prompt of {len(ids)} tokens and max_tokens {max_tokens} need {needed} KV-cache blocks of "
                f"{pool.block_size} tokens, but the cache has {pool.num_blocks}; raise kv_cache_memory"
            )
        return max_tokens

    def _grammar(self, params: SamplingParams) -> GrammarState | None:
        if params.structured_outputs is None:
            return None
        if self._vocabulary is None:
            tokenizer, size = self._tokenizer("structured_outputs"), self._built.vocab_size
            if not self._built.eos_token_ids:
                raise RequestError("structured_outputs: this model has no end-of-text token to end an output with")
            token_bytes = [tokenizer.id_to_bytes(token) for token in range(size)]
            self._vocabulary = Vocabulary(token_bytes, sorted(tokenizer.special_ids), self._built.eos_token_ids)
        return GrammarState(params.structured_outputs, self._vocabulary)

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Token sequences of the bad words, each as a word of its own and as the start of a text."""
        sequences: list[list[int]] = []
        for word in params.bad_words or ():
            encode = self._tokenizer("bad_words").encode
            for form in (word.lstrip(), " " + word.lstrip()):
                ids = encode(form, add_special_tokens=False)
                if ids and ids not in sequences:
                    sequences.append(ids)
        return sequences

    def _tokenizer(self, wanted_for: str) -> Any:
        if self._built.tokenizer is None:
            raise RequestError(
                f"this model was loaded without a tokenizer, which {wanted_for} needs; give prompt_token_ids, or drop "
                "skip_tokenizer_init"
            )
        return self._built.tokenizer
