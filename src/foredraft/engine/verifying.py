"""From the target's logits to each request's next tokens: transforms, then the verification rule of each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.draft.proposal import DenseProbs, DraftProposal, SparseProbs
from foredraft.sampling.choose import target_tokens
from foredraft.sampling.noise import Stream, uniforms
from foredraft.sampling.state import SamplingState
from foredraft.sampling.transform import invalid_rows, process_logits
from foredraft.verify import RATIO_RULES
from foredraft.verify.match import verify_match
from foredraft.verify.verification import Verification


@dataclass(frozen=True)
class Decision:
    """What one request emits: `token_ids`, the first `num_accepted` of them accepted drafts.

    `invalid` says that the target's logits were not numbers somewhere on the way, so nothing may be emitted.
    """

    token_ids: list[int]
    num_accepted: int
    invalid: bool


def first_rows(drafts: Sequence[Sequence[int]]) -> list[int]:
    """The logits row that belongs to each request's anchor; its drafts' rows follow."""
    rows, row = [], 0
    for draft in drafts:
        rows.append(row)
        row += len(draft) + 1
    return rows


def decide(
    logits: Tensor, states: Sequence[SamplingState], proposal: DraftProposal, drafts: Sequence[Sequence[int]]
) -> list[Decision]:
    """Verifies the drafts of a step.

    Args:
        logits: [N, V], raw; request b owns `len(drafts[b]) + 1` rows, its anchor's first.
        states: each request's transforms and noise.
        proposal: where `drafts` came from.
        drafts: draft tokens that were in the forward, as lists.
    """
    processed = process_logits(logits, states, drafts)
    invalid = invalid_rows(processed)
    starts = first_rows(drafts)
    gamma = max(map(len, drafts))
    lengths = torch.tensor([len(draft) for draft in drafts], device=logits.device)
    row_starts = torch.tensor(starts, device=logits.device)
    # [B, γ+1]: each request's rows, its last one repeated as padding.
    rows = row_starts[:, None] + torch.arange(gamma + 1, device=logits.device).clamp(max=lengths[:, None])
    draft_ids = proposal.token_ids[:, :gamma]

    tokens: list[list[int]] = [[] for _ in drafts]
    accepted = [0] * len(drafts)
    for rule, members in _by_rule(states).items():
        index = torch.tensor(members, device=logits.device)
        picked = DraftProposal(draft_ids[index], lengths[index], _picked(proposal.probs, index, gamma))
        if rule == "match":
            verification = _match(processed, states, rows, index, members, picked)
        else:
            verification = _ratio(rule, processed, states, rows, index, members, picked)
        counts = verification.num_accepted.tolist()
        for member, ids, count in zip(members, verification.token_ids.tolist(), counts, strict=True):
            tokens[member], accepted[member] = ids[: count + 1], count

    bad = invalid.tolist() if bool(invalid.any()) else [False] * len(logits)
    return [
        Decision(ids, count, any(bad[start : start + count + 1]))
        for ids, count, start in zip(tokens, accepted, starts, strict=True)
    ]


def _by_rule(states: Sequence[SamplingState]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for index, state in enumerate(states):
        groups.setdefault("match" if state.matches_target else state.verification, []).append(index)
    return groups


def _picked(probs: DenseProbs | SparseProbs, index: Tensor, gamma: int) -> DenseProbs | SparseProbs:
    if isinstance(probs, DenseProbs):
        return DenseProbs(probs.probs[index, :gamma])
    return SparseProbs(probs.candidates[index, :gamma], probs.probs[index, :gamma])
