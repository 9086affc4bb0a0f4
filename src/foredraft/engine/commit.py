"""Appends a step's tokens to a request, one at a time, so that a stop inside an accepted block ends it there."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.engine.request import Request


def commit_tokens(request: Request, token_ids: Sequence[int], num_accepted: int, num_draft: int) -> int:
    """Appends `token_ids` until one of them ends the request; returns how many were kept.

    What follows a stop is dropped and never shown, although it was verified. The first `num_accepted` of `token_ids`
    are accepted drafts out of `num_draft`; the one after them is recovered (after a rejection), bonus, or, in a step
    without drafts, the target's.
    """
    last_origin = "t" if num_draft == 0 else "b" if num_accepted == num_draft else "r"
    kept = 0
    for token in token_ids:
        request.token_ids.append(token)
        request.origins += "a" if kept < num_accepted else last_origin
        kept += 1
        _finish_if_over(request, token)
        if request.finished:
            break
    request.state.commit(request.token_ids[len(request.token_ids) - kept :])
    return kept


def _finish_if_over(request: Request, token: int) -> None:
    found = request.detokenizer.append(token) if request.detokenizer else None
    if token in request.eos_token_ids and not request.params.ignore_eos:
        request.finish("stop")
    elif token in request.stop_token_ids:
        request.finish("stop", token)
    elif found is not None:
        request.finish("stop", found)
    elif request.num_remaining_tokens == 0:
        request.finish("length")
    if request.finished and request.detokenizer and found is None:
        found = request.detokenizer.finish()
        if found is not None:
            request.finish("stop", found)
