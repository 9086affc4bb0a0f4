"""The result of verification, shared by every rule."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Verification:
    """What each request emits in this step.

    Args:
        token_ids: [B, γ+1] int64: the accepted draft tokens, then one token of the target's own: *recovered* (from the
            residual) after a rejection, *bonus* when all drafts were accepted. Entries past `num_accepted + 1` are
            padding.
        num_accepted: [B] int64, accepted draft tokens.
        path: [B, γ] int64, only for trees: the accepted nodes' indices, root first, padded with -1.
    """

    token_ids: Tensor
    num_accepted: Tensor
    path: Tensor | None = None
