"""Log-probabilities of prompt and output tokens, from the rows of the step that computed them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.engine.scheduler import Scheduled
from foredraft.engine.verifying import Decision, first_rows
from foredraft.sampling.logprobs import Logprob, top_logprobs


def record_prompt_logprobs(plan: Sequence[Scheduled], drafts: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
    """Takes the rows of prompts whose log-probabilities are asked for; returns the rows left, for sampling.

    Args:
        plan, drafts: all scheduled requests.
        logits: [N, V], each request's `Scheduled.num_logits` rows in turn.
    """
    if not any(part.request.wants_prompt_logprobs for part in plan):
        return logits
    kept: list[int] = []
    row = 0
    for part, draft in zip(plan, drafts, strict=True):
        count = part.num_logits(len(draft))
        sampling = 1 + len(draft) if part.samples else 0
        kept += range(row + count - sampling, row + count)
        if part.request.wants_prompt_logprobs:
            _record(part, logits[row : row + part.num_tokens])
        row += count
    return logits[torch.tensor(kept, dtype=torch.int64, device=logits.device)]


def _record(part: Scheduled, logits: Tensor) -> None:
    """Row i tells of the token after the i-th one scheduled; the first prompt token has nothing before it."""
    request = part.request
    if not request.prompt_logprobs:
        request.prompt_logprobs.append(None)
    known = len(request.prompt_logprobs)  # a preempted prompt is computed again: keep what was recorded
    first = known - 1 - request.num_computed_tokens
    last = min(part.num_tokens, request.num_prompt_tokens - 1 - request.num_computed_tokens)
    if first < last:
        start = request.num_computed_tokens + 1
        following = request.token_ids[start + first : start + last]
        chosen = torch.tensor(following, device=logits.device)
        assert request.params.prompt_logprobs is not None
        request.prompt_logprobs += top_logprobs(logits[first:last], chosen, request.params.prompt_logprobs)


def logprobs_of(
    sampling: Sequence[Scheduled], drafts: Sequence[Sequence[int]], decisions: Sequence[Decision], logits: Tensor
) -> list[list[dict[int, Logprob]]]:
    """For each request the entries of the tokens that it emits; empty where none are asked for."""
    entries: list[list[dict[int, Logprob]]] = []
    starts = first_rows(drafts)
    for part, start, decision in zip(sampling, starts, decisions, strict=True):
        count = part.request.num_logprobs
        if count is None or decision.invalid:
            entries.append([])
            continue
        rows = torch.tensor([start, *(start + 1 + node for node in decision.path)], device=logits.device)
        chosen = torch.tensor(decision.token_ids, device=logits.device)
        entries.append(top_logprobs(logits[rows], chosen, count))
    return entries
