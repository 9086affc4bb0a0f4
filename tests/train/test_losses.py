"""Losses and weights against what the papers' words say, worked out anew here."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from foredraft.train.head import head_scores
from foredraft.train.losses import (
    LOSSES,
    acceptance,
    cross_entropy,
    dpace_weights,
    expected_accepted,
    exponential_weights,
)


def distributions(*shape: int, seed: int = 0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2).double().softmax(-1)


def test_acceptance_is_one_minus_total_variation() -> None:
    p, q = distributions(20, 9), distributions(20, 9, seed=1)
    expected = 1 - 0.5 * (p - q).abs().sum(-1)
    torch.testing.assert_close(acceptance(p, q.log()), expected)
    torch.testing.assert_close(LOSSES["tv"](p, q.log()), 1 - expected)
    torch.testing.assert_close(LOSSES["nla"](p, q.log()), -expected.log())
    torch.testing.assert_close(LOSSES["dspark"](p, q.log()), 0.1 * -(p * q.log()).sum(-1) + 0.9 * (p - q).abs().sum(-1))


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_least_where_the_draft_is_the_target(name: str) -> None:
    p = distributions(1, 6)
    logits = torch.randn(1, 6, generator=torch.Generator().manual_seed(3)).double().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.05)
    for _ in range(800):
        loss = LOSSES[name](p, logits.log_softmax(-1)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (logits.softmax(-1) - p).abs().max() < 0.03


def test_tokens_that_cannot_be_drafted_are_left_out() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2]])
    log_q = torch.tensor([[0.25, 0.75, 0.0]]).log()
    assert cross_entropy(p, log_q).item() == pytest.approx(
        -(0.5 * torch.tensor(0.25).log() + 0.3 * torch.tensor(0.75).log())
    )
    assert acceptance(p, log_q).item() == pytest.approx(0.55)


def test_dpace_weights_are_the_gradient_of_the_expected_length() -> None:
    log_q = distributions(5, 4, 3)[..., 0].log().requires_grad_()
    valid = torch.ones(5, 4, dtype=torch.bool)
    length = log_q.exp().cumprod(-1).sum()
    (gradient,) = torch.autograd.grad(length, log_q)
    weights = dpace_weights(log_q, valid)
    floor = 0.05
    torch.testing.assert_close(weights, (gradient + floor) / (gradient + floor).mean())
    assert exponential_weights(3).tolist() == pytest.approx([1.0, 2.718281828**-0.25, 2.718281828**-0.5])


def test_expected_accepted_is_what_token_verification_accepts_on_average() -> None:
    """Summed over all texts y of a chain p, weighted by p(y), it is the enumerated expectation."""
    size, slots = 3, 3
    first_p, first_q = distributions(size), distributions(size, seed=1)
    step_p, step_q = distributions(slots, size, size, seed=2), distributions(slots, size, size, seed=3)

    def p_of(prefix: tuple[int, ...]) -> Tensor:
        return first_p if not prefix else step_p[len(prefix), prefix[-1]]

    def q_of(prefix: tuple[int, ...]) -> Tensor:
        return first_q if not prefix else step_q[len(prefix), prefix[-1]]

    # What verification accepts: drafts x ~ q, each kept with min(1, p/q) given those before it.
    truth = 0.0
    for x in itertools.product(range(size), repeat=slots):
        drawn = kept = 1.0
        expected = 0.0
        for k in range(slots):
            q, p = q_of(x[:k])[x[k]], p_of(x[:k])[x[k]]
            drawn *= q
            kept *= min(1.0, p / q)
            expected += kept
        truth += drawn * expected
    found = 0.0
    for y in itertools.product(range(size), repeat=slots):
        p_true = torch.stack([p_of(y[:k])[y[k]] for k in range(slots)])
        log_q = torch.stack([q_of(y[:k])[y[k]] for k in range(slots)]).log()
        alpha = torch.stack([torch.minimum(p_of(y[:k]), q_of(y[:k])).sum() for k in range(slots)])
        valid = torch.ones(slots, dtype=torch.bool)
        found += p_true.prod() * expected_accepted(p_true, log_q, alpha, valid)
    assert float(found) == pytest.approx(float(truth), abs=1e-9)


@pytest.mark.parametrize("num_top", [0, 4])
def test_the_heads_scores_and_gradients_equal_automatic_differentiation(num_top: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 8, generator=generator, requires_grad=True)
    head = torch.randn(50, 8, generator=generator)
    columns = torch.randint(50, (300, 5), generator=generator)
    found = head_scores(hidden, head, columns, num_top)
    logits = hidden @ head.T
    torch.testing.assert_close(found.totals, logits.logsumexp(-1))
    torch.testing.assert_close(found.at, logits.gather(-1, columns))
    assert torch.equal(found.top_columns, logits.topk(num_top).indices)

    def loss(totals: Tensor, at: Tensor, top: Tensor) -> Tensor:
        return (totals.sin() * 2).sum() + at.cos().sum() + (top**2).sum()

    (ours,) = torch.autograd.grad(loss(found.totals, found.at, found.top), hidden)
    expected = loss(logits.logsumexp(-1), logits.gather(-1, columns), logits.topk(num_top).values)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, hidden)[0], rtol=1e-4, atol=1e-4)
