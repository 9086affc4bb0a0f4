"""Which draft tokens are worth their place in a batch: pure functions of probabilities and seconds.

A step's worth is the tokens that it is expected to emit over the seconds that it takes. Two decisions maximise it.
`best_lengths` is made before anything is drafted, from rates of the past, so it may compare every plan. `cut_lengths`
is made after drafting, from confidences, and must not let a token decide about itself:

    The confidence at j depends on the tokens before j. A rule that compares *all* prefixes of a draft therefore knows,
    when it cuts at j, the confidences after j, which depend on the token at j, and biases the output; it is easy to
    write, and the distribution test rejects it. So the cut is a walk. Each of its decisions sees the confidences of
    what was admitted and of each request's next token, and beyond those only what the past predicts.

The walk takes the likeliest next token of all requests, as DSpark's algorithm 1 does (DeepSeek 2026). That one stops at
the first fall, which is wrong for costs with steps, where a token may start a new kernel row block that the tokens
after it fill for nothing. This walk stops at a fall unless the predicted continuation makes up for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def best_lengths(reach: Floats, draft_seconds: Sequence[Floats], step_seconds: Floats) -> list[int]:
    """The draft lengths with the most expected tokens per second, from what is known before drafting.

    For every depth the likeliest tokens of all requests are taken first, and every number of them is compared. That is
    the best plan where drafting costs depend on the depth alone; where they grow with the requests that draft, the
    plan is the best of the nested ones.

    Args:
        reach: [B, γ], the probability that position j and all before it are accepted; 0 where there is no room.
        draft_seconds: by depth 0 to γ, seconds of drafting so deep [B+1] by the number of requests that draft.
        step_seconds: [B·γ+1], seconds of a step without drafting, by draft tokens in the batch.
    """
    batch, width = reach.shape
    best, lengths = batch / float(step_seconds[0]), [0] * batch
    for depth in range(1, width + 1):
        part = reach[:, :depth].ravel()
        order = np.argsort(-part, kind="stable")  # of a request's equal ones the earlier first
        order = order[: np.count_nonzero(part > 0)]
        if not len(order):
            break
        tokens = batch + part[order].cumsum()
        drafting = (order % depth == 0).cumsum()
        seconds = step_seconds[1 : len(order) + 1] + draft_seconds[depth][drafting]
        place = int((tokens / seconds).argmax())
        if tokens[place] / seconds[place] > best * (1 + 1e-12):
            best = float(tokens[place] / seconds[place])
            lengths = np.bincount(order[: place + 1] // depth, minlength=batch).tolist()
    return lengths


def cut_lengths(
    confidence: Floats,
    lengths: Sequence[int],
    predicted: Floats,
    foreseen: Sequence[bool],
    drafted_seconds: float,
    step_seconds: Floats,
) -> list[int]:
    """How much of each draft to verify; never looks at a token to decide about it.

    Args:
        confidence: [B, γ], that position j is accepted given those before it: known once those before it are.
        lengths: drafted tokens of each request.
        predicted: [B, γ], the same by rates of the past alone.
        foreseen: requests whose confidences may all be looked at, because nothing in their draft was drawn, or because
            their output does not depend on drafts.
        drafted_seconds: what drafting took.
        step_seconds: [n+1], seconds of a step without drafting, by draft tokens in the batch.
    """
    ahead = [(confidence if seen else predicted)[row, : lengths[row]].tolist() for row, seen in enumerate(foreseen)]
    own = [confidence[row, : lengths[row]].tolist() for row in range(len(lengths))]
    seconds = (step_seconds + drafted_seconds).tolist()
    tokens, count = float(len(lengths)), 0
    admitted = [0] * len(lengths)
    frontier = [(-values[0], row) for row, values in enumerate(own) if values]
    heapq.heapify(frontier)
    while frontier:
        value, row = frontier[0]
        if value == 0.0:
            break  # no token that cannot be accepted is worth its place, even where the curve is flat
        grows = (tokens - value) * seconds[count] > tokens * seconds[count + 1]
        if not grows and not _recovers(frontier, admitted, ahead, tokens, seconds[count:]):
            break
        tokens, count = tokens - value, count + 1
        admitted[row] += 1
        if admitted[row] < len(own[row]):
            heapq.heapreplace(frontier, (value * own[row][admitted[row]], row))
        else:
            heapq.heappop(frontier)
    return admitted


def _recovers(
    frontier: Sequence[tuple[float, int]],
    admitted: Sequence[int],
    ahead: Sequence[Sequence[float]],
    tokens: float,
    seconds: Sequence[float],
) -> bool:
    """Whether going on past the next token is expected to end above the worth of stopping here.

    Args:
        frontier: each request's next token, as minus the probability that it is accepted.
        ahead: what may be known of each request's conditional rates; used past its next token only.
        seconds: of a step with 0, 1, … further tokens.
    """
    values: list[float] = []
    for value, row in frontier:
        reach = -value
        values.append(reach)
        for rate in ahead[row][admitted[row] + 1 :]:
            reach *= rate
            values.append(reach)
    ordered = np.sort(np.array(values))[::-1]
    worth = (tokens + ordered.cumsum()) / np.asarray(seconds[1 : len(ordered) + 1])
    return bool(worth.max() > tokens / seconds[0])
