"""What training minimises, as functions of the draft's and the target's probabilities at each slot.

The target's distribution is known on its 64 most probable tokens; α, the probability that a draft from q is accepted,
is Σ min(p, q) over them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TINY = 1e-8


def cross_entropy(p: Tensor, log_q: Tensor) -> Tensor:
    """−Σ p log q [...] of p, log q [..., M]; tokens that q cannot propose (−inf) are left out."""
    possible = log_q > float("-inf")
    return -(p * torch.where(possible, log_q, 0.0)).sum(-1)


def acceptance(p: Tensor, log_q: Tensor) -> Tensor:
    """α = Σ min(p, q) [...]: 1 − the total variation distance."""
    return torch.minimum(p, log_q.exp()).sum(-1)


def total_variation(p: Tensor, log_q: Tensor) -> Tensor:
    """1 − α: acceptance itself, with little to follow where the overlap is small."""
    return 1 - acceptance(p, log_q)


def negative_log_acceptance(p: Tensor, log_q: Tensor) -> Tensor:
    """−log α: total variation's goal with 1/α times its gradient, so that it trains from a cold start.

    Source: LK losses (2602.23881).
    """
    return -acceptance(p, log_q).clamp(min=TINY).log()


def lk_hybrid(p: Tensor, log_q: Tensor, sharpness: float = 3.0) -> Tensor:
    """λ·CE + (1 − λ)·TV with λ = exp(−sharpness·α): cross-entropy where the draft is far off, acceptance near.

    Source: LK losses (2602.23881).
    """
    alpha = acceptance(p, log_q)
    share = (-sharpness * alpha.detach()).exp()
    return share * cross_entropy(p, log_q) + (1 - share) * (1 - alpha)


def dspark(p: Tensor, log_q: Tensor) -> Tensor:
    """0.1·CE + 0.9·‖q − p‖₁ (DSpark, DeepSeek 2026)."""
    return 0.1 * cross_entropy(p, log_q) + 1.8 * total_variation(p, log_q)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ce": cross_entropy,
    "tv": total_variation,
    "nla": negative_log_acceptance,
    "lk": lk_hybrid,
    "dspark": dspark,
}
"""By the name that `--loss` takes."""


def exponential_weights(num_slots: int, decay: float = 4.0) -> Tensor:
    """exp(−(k − 1) / decay) [γ]: a slot counts only when those before it were right."""
    return torch.exp(-torch.arange(num_slots) / decay)


def dpace_weights(log_q_true: Tensor, valid: Tensor) -> Tensor:
    """Each slot's share in the expected accepted length, as it stands now [..., γ], detached.

    The expected length of a block is Σ_m Π_{j ≤ m} q_j(y_j); its gradient by log q_k is the tail sum from k on. Scaled
    to a mean of 1 over the valid slots. Source: D-PACE (2605.18810).

    Args:
        log_q_true: [..., γ], of the true tokens.
        valid: [..., γ].
    """
    reached = torch.where(valid, log_q_true.detach(), float("-inf")).cumsum(-1).exp()
    tail = reached.flip(-1).cumsum(-1).flip(-1) + 0.05  # a floor, so that no slot is ever without a lesson
    return tail / (tail * valid).sum().clamp(min=TINY) * valid.sum()


def expected_accepted(p_true: Tensor, log_q_true: Tensor, alpha: Tensor, valid: Tensor) -> Tensor:
    """Σ_k Π_{j<k} min(1, q_j(y_j) / p_j(y_j)) · α_k [...]: accepted tokens of a block expected by samples y of p.

    Source: foredraft, algorithms.md; exact in expectation when y was sampled at temperature 1.

    Args:
        p_true, log_q_true: [..., γ], of the true tokens.
        alpha: [..., γ], the acceptance given the true tokens before.
        valid: [..., γ].
    """
    ratio = (log_q_true - p_true.clamp(min=TINY).log()).clamp(max=0.0)
    before = torch.cat([torch.zeros_like(ratio[..., :1]), ratio[..., :-1].cumsum(-1)], -1).exp()
    return (before * alpha * valid).sum(-1)
