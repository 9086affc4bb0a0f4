"""Log-probabilities of the model's own distribution, before any transform, as OpenAI and vLLM define them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability and its rank, 1 the most probable; `decoded_token` is its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


def top_logprobs(logits: Tensor, chosen: Tensor, count: int) -> list[dict[int, Logprob]]:
    """For each row, the chosen token and the `count` most probable ones, the chosen first.

    Args:
        logits: raw, [N, V].
        chosen: the token that came at each row [N].
    """
    logits = logits.float()
    normaliser = logits.logsumexp(-1, keepdim=True)
    at_chosen = logits.gather(-1, chosen[:, None])
    ranks = ((logits > at_chosen).sum(-1) + 1).tolist()
    chosen_logprobs = (at_chosen - normaliser)[:, 0].tolist()
    values, ids = logits.topk(min(count, logits.shape[-1]), dim=-1)
    rows = zip(chosen.tolist(), chosen_logprobs, ranks, ids.tolist(), (values - normaliser).tolist(), strict=True)
    result = []
    for token, logprob, rank, top_ids, top_values in rows:
        entry = {token: Logprob(logprob, rank)}
        for place, (top_id, value) in enumerate(zip(top_ids, top_values, strict=True), start=1):
            entry.setdefault(top_id, Logprob(value, place))
        result.append(entry)
    return result
