"""What one request's transforms remember of its text.

Rows of a step look ahead along the draft ("if these tokens are accepted"), but only `commit` changes the state, so
after any rejection it equals one rebuilt from the emitted tokens.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from foredraft.sampling.params import SamplingParams

SEED_MASK = 2**64 - 1


class Grammar(Protocol):
    """A request's place in its grammar."""

    def masks(self, draft: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Allowed tokens [len(draft) + 1, V] bool: after the committed text, and after each draft node's path."""
        ...

    def commit(self, token_ids: Sequence[int]) -> None:
        """Moves on over emitted tokens."""
        ...


class SamplingState:
    """Parameters and history of one request.

    Args:
        vocab_size: of the target.
        eos_token_ids: end-of-text ids, barred until `min_tokens` output tokens.
        bad_words_token_ids: token sequences that may not come.
        grammar: the constraint on the output, at its start.
        verification: `token`, `block` or `coupled`; greedy requests need none of their own.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        bad_words_token_ids: Sequence[Sequence[int]] = (),
        grammar: Grammar | None = None,
        verification: str = "block",
    ) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self.verification = verification
        self.matches_target = params.is_greedy or verification == "coupled"
        """Whether drafts are accepted while they equal the target's own choice, so that q plays no part."""
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(8), "little")
        self.seed = seed & SEED_MASK
        self.num_prompt_tokens = len(prompt_token_ids)
        self.output: list[int] = []
        self.grammar = grammar
        self.bad_words = [list(sequence) for sequence in bad_words_token_ids]
        self.ending_ids = sorted({*eos_token_ids, *(params.stop_token_ids or ())})
        self.penalises = (
            params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        )
        self.bias = _bias(params, vocab_size)
        self.in_prompt: Tensor | None = None
        self.output_counts: Tensor | None = None
        if self.penalises:
            self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool)
            self.in_prompt[torch.tensor(list(prompt_token_ids), dtype=torch.int64)] = True
            self.output_counts = torch.zeros(vocab_size, dtype=torch.float32)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far: the absolute position of the next one, which keys its noise."""
        return self.num_prompt_tokens + len(self.output)

    @property
    def transforms_logits(self) -> bool:
        """Whether anything but temperature, top-k, top-p and min-p changes this request's logits now."""
        return (
            self.bias is not None
            or self.penalises
            or self.grammar is not None
            or bool(self.bad_words)
            or len(self.output) < self.params.min_tokens
        )

    def commit(self, token_ids: Sequence[int]) -> None:
        """Takes the tokens that a step emitted."""
        self.output += token_ids
        if self.output_counts is not None and token_ids:
            ids = torch.tensor(token_ids, dtype=torch.int64)
            self.output_counts.index_add_(0, ids, torch.ones(len(token_ids)))
        if self.grammar is not None:
            self.grammar.commit(token_ids)


def _bias(params: SamplingParams, vocab_size: int) -> Tensor | None:
    """`allowed_token_ids` and `logit_bias` as one vector to add [V]; ids outside the vocabulary have no logit."""
    if params.allowed_token_ids is None and not params.logit_bias:
        return None
    bias = torch.zeros(vocab_size)
    if params.allowed_token_ids is not None:
        bias.fill_(float("-inf"))
        bias[[token for token in params.allowed_token_ids if token < vocab_size]] = 0.0
    for token, value in (params.logit_bias or {}).items():
        if token < vocab_size:
            bias[token] += value
    return bias
