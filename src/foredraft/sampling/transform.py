"""Logits to the logits of the target distribution, with every transform of a request, row by row of its draft.

Order: allowed and bad words, grammar, logit bias, minimum tokens; repetition, then frequency and presence penalties;
temperature; min-p; top-k; top-p on what top-k left. Row j of a request is what holds if its first j draft tokens are
accepted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.sampling.state import SamplingState

NEVER = float("-inf")
FIRST_CANDIDATES = 128
"""Top-p looks at this many most probable tokens first, and at more only where their mass does not reach p."""

Drafts = Sequence[Sequence[int]]


def process_logits(
    logits: Tensor, states: Sequence[SamplingState], drafts: Drafts, parents: Drafts | None = None
) -> Tensor:
    """Logits whose softmax is each row's target distribution, and whose argmax is a greedy row's token.

    Args:
        logits: [N, V]; request b owns `len(drafts[b]) + 1` rows: after its committed text, then after each draft token.
            Never changed.
        drafts: the draft tokens of each request.
        parents: for trees, each node's parent (-1: the anchor); None for chains.

    Returns float32 [N, V], -inf where a token cannot come; greedy rows keep their logits past temperature.
    """
    rows = logits.float()
    transformed = [state.transforms_logits for state in states]
    if any(transformed):
        rows = rows.clone() if rows is logits else rows
        start = 0
        for index, (state, draft) in enumerate(zip(states, drafts, strict=True)):
            end = start + len(draft) + 1
            if transformed[index]:
                chain = range(-1, len(draft) - 1)
                rows[start:end] = _with_history(
                    rows[start:end], state, draft, parents[index] if parents is not None else chain
                )
            start = end
    return _truncated(rows, states, [len(draft) + 1 for draft in drafts])


def process_drafts(logits: Tensor, states: Sequence[SamplingState], drafts: Drafts) -> Tensor:
    """The same on a drafter's logits [B, V], one row per request: after its committed text and `drafts[b]`."""
    rows = logits.float()
    if any(state.transforms_logits for state in states):
        parts = []
        for row, state, draft in zip(rows, states, drafts, strict=True):
            wide = row.expand(len(draft) + 1, -1).clone()
            parts.append(_with_history(wide, state, draft, range(-1, len(draft) - 1))[-1])
        rows = torch.stack(parts)
    return _truncated(rows, states, [1] * len(states))


def invalid_rows(processed: Tensor) -> Tensor:
    """Rows [N] bool that are no distribution: a NaN or +inf among the logits, or nothing left that may come."""
    most = processed.amax(-1)
    return ~most.isfinite()


def _with_history(rows: Tensor, state: SamplingState, draft: Sequence[int], parents: Sequence[int]) -> Tensor:
    """The transforms that depend on the text, for one request's rows [len(draft) + 1, V]."""
    params, device = state.params, rows.device
    prefixes: list[list[int]] = [[]]
    for token, parent in zip(draft, parents, strict=True):
        prefixes.append([*prefixes[parent + 1], token])
    if state.grammar is not None:
        rows = rows.masked_fill(~state.grammar.masks(draft, parents).to(device), NEVER)
    for row, prefix in enumerate(prefixes):
        for sequence in state.bad_words:
            before = sequence[:-1]
            text = state.output + prefix
            if not before or text[-len(before) :] == before:
                rows[row, sequence[-1]] = NEVER
    if state.bias is not None:
        rows = rows + state.bias.to(device)
    if state.ending_ids:
        for row, prefix in enumerate(prefixes):
            if len(state.output) + len(prefix) < params.min_tokens:
                rows[row, state.ending_ids] = NEVER
    return _penalised(rows, state, prefixes) if state.penalises else rows


def _penalised(rows: Tensor, state: SamplingState, prefixes: Sequence[Sequence[int]]) -> Tensor:
    assert state.output_counts is not None
    assert state.in_prompt is not None
    params, device = state.params, rows.device
    counts = state.output_counts.to(device).repeat(len(prefixes), 1)  # [rows, V], output tokens and draft prefix
    for row, prefix in enumerate(prefixes):
        if prefix:
            ids = torch.tensor(prefix, device=device)
            counts[row].index_add_(0, ids, torch.ones(len(prefix), device=device))
    in_output = counts > 0
    if params.repetition_penalty != 1.0:
        penalty = params.repetition_penalty
        seen = in_output | state.in_prompt.to(device)
        rows = torch.where(seen, torch.where(rows > 0, rows / penalty, rows * penalty), rows)
    return rows - params.frequency_penalty * counts - params.presence_penalty * in_output


def _truncated(rows: Tensor, states: Sequence[SamplingState], counts: Sequence[int]) -> Tensor:
    """Temperature, min-p, top-k and top-p, for the rows of requests that sample."""
    if all(state.params.is_greedy for state in states):
        return rows
    spread = [state.params for state, count in zip(states, counts, strict=True) for _ in range(count)]
    sampled = [row for row, params in enumerate(spread) if not params.is_greedy]
    everything = len(sampled) == len(spread)
    chosen = [spread[row] for row in sampled]
    device = rows.device
    part = rows if everything else rows[torch.tensor(sampled, device=device)]
    part = part / torch.tensor([[params.temperature] for params in chosen], device=device)
    if any(params.min_p > 0 for params in chosen):
        share = torch.tensor([[params.min_p] for params in chosen], device=device)
        part = part.masked_fill(part < part.amax(-1, keepdim=True) + share.log(), NEVER)
    part = _top_k(part, [params.top_k for params in chosen])
    part = _top_p(part, [params.top_p for params in chosen])
    if everything:
        return part
    result = rows.clone()
    result[torch.tensor(sampled, device=device)] = part
    return result


def _top_k(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Keeps each row's k largest, and what ties with the k-th; 0, -1 and sizes past V keep all."""
    vocab_size = rows.shape[-1]
    limited = [size if 0 < size < vocab_size else 0 for size in sizes]
    if not any(limited):
        return rows
    device = rows.device
    largest = rows.topk(max(limited), dim=-1).values
    last = torch.tensor([[max(size - 1, 0)] for size in limited], device=device)
    threshold = largest.gather(-1, last)
    everything = torch.tensor([[size == 0] for size in limited], device=device)
    return rows.masked_fill((rows < threshold) & ~everything, NEVER)


def _top_p(rows: Tensor, masses: Sequence[float]) -> Tensor:
    """Keeps, of each row, the fewest largest whose probability reaches p; equal logits count by lower id first."""
    if all(mass >= 1.0 for mass in masses):
        return rows
    mass = torch.tensor(masses, dtype=torch.float64, device=rows.device)[:, None]
    total = rows.double().logsumexp(-1, keepdim=True)
    num_candidates = min(FIRST_CANDIDATES, rows.shape[-1])
    while True:
        values = rows.topk(num_candidates, dim=-1).values  # [N, K], largest first
        probs = (values.double() - total).exp()
        before = probs.cumsum(-1) - probs
        kept = (before < mass) | (mass >= 1.0)
        kept[:, 0] = True
        complete = num_candidates == rows.shape[-1] or bool((~kept[:, -1:] | (mass >= 1.0)).all())
        if complete:
            break
        num_candidates = min(num_candidates * 8, rows.shape[-1])
    num_kept = kept.sum(-1, keepdim=True)  # [N, 1]
    cutoff = values.gather(-1, num_kept - 1).masked_fill(mass >= 1.0, NEVER)
    result = rows.masked_fill(rows < cutoff, NEVER)
    return _without_surplus_ties(result, cutoff, num_kept, mass)


def _without_surplus_ties(rows: Tensor, cutoff: Tensor, num_kept: Tensor, mass: Tensor) -> Tensor:
    """Drops tokens that equal the cutoff beyond the number that top-p keeps, highest ids first."""
    surplus = ((rows > NEVER).sum(-1, keepdim=True) > num_kept) & (mass < 1.0)
    for row in surplus[:, 0].nonzero()[:, 0].tolist():
        tied = (rows[row] == cutoff[row]).nonzero()[:, 0]
        num_larger = int((rows[row] > cutoff[row]).sum())
        rows[row, tied[int(num_kept[row]) - num_larger :]] = NEVER
    return rows
