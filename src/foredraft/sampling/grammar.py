"""Structured output by llguidance: which tokens may come next, along a draft, without moving on.

llguidance rather than another library because its matcher rolls back, so a draft's prefix can be looked ahead along and
taken back, and because it needs nothing but the tokens' bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import llguidance
import numpy as np
import torch
from torch import Tensor

from foredraft.errors import RequestError
from foredraft.sampling.params import StructuredOutputs

MAX_GRAMMAR_BYTES = 64 * 1024
"""Longest schema, regular expression or grammar that is compiled."""


class Vocabulary:
    """The tokens as a grammar sees them; made once per model.

    Args:
        token_bytes: each id's bytes, [V]; empty for ids that add no text.
        special_ids: ids that are no text, whatever their bytes.
        eos_token_ids: ids that end an output.
    """

    def __init__(self, token_bytes: Sequence[bytes], special_ids: Sequence[int], eos_token_ids: Sequence[int]) -> None:
        self.tokens = list(token_bytes)
        self.special_token_ids = sorted({*special_ids, *eos_token_ids})
        self.eos_token_ids = list(eos_token_ids)
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None
        self._by_bytes = {token: index for index, token in enumerate(self.tokens) if token}
        self.tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(self), n_vocab=len(self.tokens), eos_token=list(eos_token_ids)
        )

    def __call__(self, text: bytes) -> list[int]:
        """The library asks for a tokenization when it forces text; bytes one by one are as good as any."""
        return [self._by_bytes[bytes([byte])] for byte in text if bytes([byte]) in self._by_bytes]


class GrammarState:
    """One request's place in its grammar.

    Raises `RequestError` when the grammar is too large or wrong.
    """

    def __init__(self, spec: StructuredOutputs, vocabulary: Vocabulary) -> None:
        self._vocab_size = len(vocabulary.tokens)
        self._ending = np.zeros(self._vocab_size, dtype=np.bool_)
        self._ending[vocabulary.eos_token_ids] = True
        source = _source(spec)
        if len(source) > MAX_GRAMMAR_BYTES:
            raise RequestError(
                f"structured_outputs: the grammar has {len(source)} bytes, more than {MAX_GRAMMAR_BYTES}; simplify it"
            )
        problem = llguidance.LLMatcher.validate_grammar(source, vocabulary.tokenizer)
        self._matcher = llguidance.LLMatcher(vocabulary.tokenizer, source, log_level=0)
        if self._matcher.is_error():
            raise RequestError(f"structured_outputs: {problem or self._matcher.get_error()}")

    def masks(self, draft: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Allowed tokens [len(draft) + 1, V] bool: after the committed text, and after each draft node's path.

        After a token that the grammar forbids everything is allowed: such a row is never reached, since the token
        before it has target probability 0, but it must be a distribution.
        """
        rows = [self._mask()]
        allowed = [False] * len(draft)  # whether the grammar allows a node after the path to it
        entered: list[int] = []  # the path that the matcher has moved along
        for node, parent in enumerate(parents):
            rows.append(np.ones(self._vocab_size, dtype=np.bool_))
            if parent >= 0 and not allowed[parent]:
                continue
            entered = self._moved(entered, _path(parent, parents), draft)
            if self._accepts(draft[node]):
                allowed[node] = True
                entered = self._moved(entered, [*entered, node], draft)
                rows[-1] = self._mask()
        self._moved(entered, [], draft)
        return torch.from_numpy(np.stack(rows))

    def _moved(self, entered: list[int], path: list[int], draft: Sequence[int]) -> list[int]:
        """Moves the matcher from the end of one path of nodes to the end of another; returns the new one."""
        shared = 0
        while shared < min(len(entered), len(path)) and entered[shared] == path[shared]:
            shared += 1
        if len(entered) > shared:
            self._matcher.rollback(len(entered) - shared)
        if len(path) > shared:
            self._matcher.consume_tokens([draft[node] for node in path[shared:]])
        return path

    def commit(self, token_ids: Sequence[int]) -> None:
        """Moves on over emitted tokens."""
        if token_ids and not self._matcher.is_stopped():
            self._matcher.consume_tokens(list(token_ids))

    def _accepts(self, token: int) -> bool:
        return (
            0 <= token < self._vocab_size
            and not self._matcher.is_stopped()
            and self._matcher.validate_tokens([token]) == 1
        )

    def _mask(self) -> np.ndarray:
        if self._matcher.is_stopped():  # the output is complete: it can only end
            return self._ending
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(np.bool_)


def _path(node: int, parents: Sequence[int]) -> list[int]:
    """The nodes from the anchor's child down to `node`; none for the anchor itself."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def _source(spec: StructuredOutputs) -> str:
    """The specification in the library's own notation."""
    matcher = llguidance.LLMatcher
    try:
        if spec.json is not None:
            schema = spec.json if isinstance(spec.json, str) else json.dumps(spec.json)
            return matcher.grammar_from_json_schema(schema)
        if spec.json_object:
            return matcher.grammar_from_json_schema('{"type": "object"}')
        if spec.regex is not None:
            return matcher.grammar_from_regex(spec.regex)
        if spec.choice is not None:
            if not spec.choice:
                raise RequestError("structured_outputs: choice is empty")
            options = " | ".join(json.dumps(option) for option in spec.choice)
            return matcher.grammar_from_lark(f"start: {options}")
        assert spec.grammar is not None
        return matcher.grammar_from_lark(spec.grammar)
    except (ValueError, TypeError) as error:
        raise RequestError(f"structured_outputs: {error}") from error
