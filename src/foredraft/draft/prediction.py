"""Draft from the text that a client expects, as OpenAI's `prediction` field sends it (an edited file, say).

A cursor follows the prediction while the output agrees with it. After a difference the output's last tokens are looked
up again, from the cursor on first, so that an insertion or a deletion costs a few tokens and not the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from foredraft.draft.drafter import DraftRequest, Observation
from foredraft.draft.proposal import DraftProposal

LONGEST_ALIGNMENT = 4


@dataclass
class _Cursor:
    """Where in the prediction the output stands."""

    prediction: tuple[int, ...]
    num_seen: int
    position: int | None = 0
    last_position: int = 0
    output: list[int] = field(default_factory=list)

    def follow(self, tokens: Sequence[int]) -> None:
        """Moves on over the tokens committed since the last call."""
        for token in tokens[self.num_seen :]:
            self.output.append(token)
            position = self.position
            if position is not None and position < len(self.prediction) and self.prediction[position] == token:
                self.position = self.last_position = position + 1
            else:
                self.position = self._realigned()
        self.num_seen = len(tokens)

    def _realigned(self) -> int | None:
        """The position after the longest ending of the output found in the prediction, ahead of the cursor first."""
        for size in range(min(LONGEST_ALIGNMENT, len(self.output)), 0, -1):
            ending = tuple(self.output[-size:])
            ends = [end for end in range(size, len(self.prediction) + 1) if self.prediction[end - size : end] == ending]
            if ends:
                return next((end for end in ends if end > self.last_position), ends[-1])
        return None


class PredictionDrafter:
    """Drafts from each request's `prediction`; a request without one gets no draft."""

    method = "prediction"
    corrector: str | None = None
    feature_layers: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._cursors: dict[str, _Cursor] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        return DraftProposal.deterministic([self._draft(request) for request in requests])

    def _draft(self, request: DraftRequest) -> list[int]:
        if not request.prediction:
            return []
        cursor = self._cursors.get(request.request_id)
        if cursor is None:
            cursor = _Cursor(tuple(request.prediction), num_seen=request.state.num_prompt_tokens)
            self._cursors[request.request_id] = cursor
        cursor.follow(request.token_ids)
        if cursor.position is None:
            return []
        return list(cursor.prediction[cursor.position : cursor.position + request.max_draft_tokens])

    def observe(self, observations: Sequence[Observation], features: Sequence[Tensor]) -> None:
        pass

    def release(self, request_id: str) -> None:
        self._cursors.pop(request_id, None)

    def num_reusable(self, block_table: Sequence[int], block_hashes: Sequence[bytes]) -> int:
        return len(block_hashes)
