"""How likely a draft is to be accepted, and calibration of that on held-out data.

Source: DSpark (DeepSeek 2026): c_k = σ(w · [h_k; W1[x_{k-1}]]), calibrated left to right.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

NUM_BINS = 15


class ConfidenceHead(nn.Module):
    """Predicts P(accepted at k | accepted before k) from what came before the token at k.

    Args:
        hidden_size: of the backbone's hidden states.
        predecessor_size: of the corrector's view of the token before; 0 for none.
        num_slots: γ.
        with_distribution: also look at the draft distribution's log-maximum and entropy. They are functions
            of the prefix, so the rule that nothing may look at the drawn token holds.
    """

    temperatures: Tensor

    def __init__(
        self, hidden_size: int, predecessor_size: int, num_slots: int, *, with_distribution: bool = True
    ) -> None:
        super().__init__()
        self.predecessor_size = predecessor_size
        self.with_distribution = with_distribution
        self.proj = nn.Linear(hidden_size + predecessor_size + 2 * with_distribution, 1)
        self.register_buffer("temperatures", torch.ones(num_slots))

    def forward(self, hidden: Tensor, predecessor: Tensor | None, scores: Tensor) -> Tensor:
        """Logits [N, γ], before calibration.

        Args:
            hidden: [N, γ, d].
            predecessor: [N, γ, predecessor_size].
            scores: [N, γ, C], the corrected scores given the tokens before.
        """
        parts = [hidden]
        if self.predecessor_size:
            assert predecessor is not None
            parts.append(predecessor.to(hidden.dtype))
        if self.with_distribution:
            log_probs = scores.float().log_softmax(-1)
            finite = log_probs.masked_fill(log_probs == float("-inf"), 0.0)  # also for the gradient
            entropy = -(log_probs.exp() * finite).sum(-1)
            parts.append(torch.stack([log_probs.amax(-1), entropy], -1).to(hidden.dtype))
        return self.proj(torch.cat(parts, -1))[..., 0]

    def calibrated(self, logits: Tensor) -> Tensor:
        """Logits [N, γ] to probabilities, each slot's divided by its temperature."""
        return torch.sigmoid(logits.float() / self.temperatures[: logits.shape[1]])


def calibration_error(predicted: Tensor, observed: Tensor, num_bins: int = NUM_BINS) -> float:
    """Expected calibration error: |mean predicted − mean observed| by bins of equal width, weighted by their
    size.

    Args:
        predicted: [N] in [0, 1].
        observed: [N], outcomes or probabilities.
    """
    bins = (predicted.double() * num_bins).long().clamp(0, num_bins - 1)
    difference = (predicted.double() - observed.double()).to(predicted.device)
    sums = torch.zeros(num_bins, dtype=torch.float64, device=predicted.device).index_add_(0, bins, difference)
    return float(sums.abs().sum()) / max(len(predicted), 1)


def calibrate(logits: Tensor, acceptance: Tensor) -> Tensor:
    """One temperature a slot [γ], from left to right: each minimises the calibration error of the running
    product of confidences up to its slot, given the temperatures before it.

    Args:
        logits: [N, γ], the head's, on held-out blocks.
        acceptance: [N, γ], whether (or how probably: 1 − TV) each draft is accepted, given that those before
            it are.
    """
    product = torch.ones(len(logits), dtype=torch.float64, device=logits.device)
    truth = acceptance.double().cumprod(-1)
    chosen = []
    for slot in range(logits.shape[1]):
        column = logits[:, slot].double()

        def error(temperature: float, column: Tensor = column, product: Tensor = product, slot: int = slot) -> float:
            return calibration_error(product * torch.sigmoid(column / temperature), truth[:, slot])

        best = _minimum(error)
        chosen.append(best)
        product = product * torch.sigmoid(column / best)
    return torch.tensor(chosen, dtype=torch.float32, device=logits.device)


def _minimum(error: object, low: float = 0.05, high: float = 20.0, steps: int = 41) -> float:
    """The temperature with the least error on a logarithmic grid, refined once around the best."""
    assert callable(error)
    best = 1.0
    for _ in range(2):
        grid = torch.logspace(torch.log10(torch.tensor(low)), torch.log10(torch.tensor(high)), steps).tolist()
        best = min([best, *grid], key=error)
        step = (high / low) ** (1 / (steps - 1))
        low, high = best / step, best * step
    return best
