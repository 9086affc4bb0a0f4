"""From the target's logits to each request's next tokens: transforms, then the verification rule of each request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.draft.proposal import DenseProbs, DraftProposal, DraftTree, SparseProbs
from foredraft.draft.trees import depths_of
from foredraft.sampling.choose import target_tokens, verification_uniforms
from foredraft.sampling.state import SamplingState
from foredraft.sampling.transform import invalid_rows, process_logits
from foredraft.verify.block import verify_block
from foredraft.verify.match import verify_match
from foredraft.verify.token import verify_token
from foredraft.verify.tree import verify_tree_match, verify_tree_token
from foredraft.verify.verification import Verification

RatioRule = Callable[[DraftProposal, Tensor, Tensor, Tensor], Verification]

RATIO_RULES: Mapping[str, RatioRule] = {"token": verify_token, "block": verify_block}
"""Rules that weigh p against q. Trees are verified by recursive rejection under either."""


@dataclass(frozen=True)
class Decision:
    """What one request emits.

    Args:
        token_ids: accepted drafts, then one token of the target's.
        path: indices of the accepted draft tokens (or tree nodes).
        invalid: the target's logits were no distribution somewhere on the way, so nothing may be emitted.
    """

    token_ids: list[int]
    path: list[int]
    invalid: bool

    @property
    def num_accepted(self) -> int:
        return len(self.path)


def decide(
    logits: Tensor,
    states: Sequence[SamplingState],
    proposal: DraftProposal,
    drafts: Sequence[Sequence[int]],
    trees: Sequence[Sequence[int]] | None = None,
    rules: Mapping[str, RatioRule] = RATIO_RULES,
) -> list[Decision]:
    """Verifies the drafts of a step.

    Args:
        logits: [N, V], raw; request b owns `len(drafts[b]) + 1` rows, its anchor's first.
        states: each request's transforms and noise.
        proposal: where `drafts` came from.
        drafts, trees: what was in the forward, as lists: tokens, and for trees their parents.
        rules: the ratio rules by name.
    """
    processed = process_logits(logits, states, drafts, trees)
    invalid = invalid_rows(processed)
    starts = first_rows(drafts)
    rows = padded_rows(starts, drafts, logits.device)  # [B, γ+1]
    groups = _by_rule(states)
    tokens = None
    if "match" in groups:
        depths = None if trees is None else [depths_of(parents) for parents in trees]
        tokens = target_tokens(processed, states, drafts, depths)

    decisions: list[Decision] = [Decision([], [], True)] * len(drafts)
    bad = invalid.tolist() if bool(invalid.any()) else None
    for rule, members in groups.items():
        part = _picked(proposal, members, rows.shape[1] - 1)
        index = rows[torch.tensor(members, device=rows.device)]
        if tokens is not None and rule == "match":
            verification = _match(part, tokens[index])
        else:
            verification = _ratio(rules[rule], part, processed, index, [states[member] for member in members])
        for member, decision in zip(members, _decisions(verification), strict=True):
            looked_at = [0, *(node + 1 for node in decision.path)]
            failed = bad is not None and any(bad[starts[member] + row] for row in looked_at)
            decisions[member] = Decision(decision.token_ids, decision.path, failed)
    return decisions


def first_rows(drafts: Sequence[Sequence[int]]) -> list[int]:
    """The logits row that belongs to each request's anchor; its drafts' rows follow."""
    rows, row = [], 0
    for draft in drafts:
        rows.append(row)
        row += len(draft) + 1
    return rows


def padded_rows(starts: Sequence[int], drafts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Each request's rows [B, γ+1], its last one repeated as padding."""
    last = torch.tensor([len(draft) for draft in drafts], device=device)[:, None]
    steps = torch.arange(max(map(len, drafts)) + 1, device=device).expand(len(drafts), -1)
    return torch.tensor(starts, device=device)[:, None] + torch.minimum(steps, last)


def _match(part: DraftProposal, tokens: Tensor) -> Verification:
    if part.tree is not None:
        return verify_tree_match(part, tokens)
    return verify_match(part.token_ids, part.lengths, tokens)


def _ratio(
    rule: RatioRule, part: DraftProposal, processed: Tensor, rows: Tensor, states: Sequence[SamplingState]
) -> Verification:
    accept, final = verification_uniforms(states, rows.shape[1] - 1, rows.device)
    target_probs = processed[rows].softmax(-1)  # [B, γ+1, V]
    return (rule if part.tree is None else verify_tree_token)(part, target_probs, accept, final)


def _by_rule(states: Sequence[SamplingState]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for index, state in enumerate(states):
        groups.setdefault("match" if state.matches_target else state.verification, []).append(index)
    return groups


def _picked(proposal: DraftProposal, members: Sequence[int], gamma: int) -> DraftProposal:
    """The members' part of a proposal, no wider than what was verified."""
    index = torch.tensor(members, device=proposal.token_ids.device)
    probs, tree = proposal.probs, proposal.tree
    picked: DenseProbs | SparseProbs
    if isinstance(probs, DenseProbs):
        picked = DenseProbs(probs.probs[index, :gamma])
    else:
        picked = SparseProbs(probs.candidates[index, :gamma], probs.probs[index, :gamma])
    if tree is not None:
        tree = DraftTree(tree.parents[index, :gamma], tree.depths[index, :gamma])
    return DraftProposal(proposal.token_ids[index, :gamma], proposal.lengths[index], picked, tree=tree)


def _decisions(verification: Verification) -> list[Decision]:
    counts = verification.num_accepted.tolist()
    tokens = [ids[: count + 1] for ids, count in zip(verification.token_ids.tolist(), counts, strict=True)]
    if verification.path is None:
        return [Decision(ids, list(range(count)), False) for ids, count in zip(tokens, counts, strict=True)]
    paths = verification.path.tolist()
    return [Decision(ids, path[:count], False) for ids, path, count in zip(tokens, paths, counts, strict=True)]
