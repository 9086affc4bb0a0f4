"""Calibration of confidences, against samples whose true probabilities are known."""

from __future__ import annotations

import pytest
import torch

from foredraft.draft.correctors.confidence import ConfidenceHead, calibrate, calibration_error


def test_error_by_the_definition() -> None:
    predicted = torch.tensor([0.1, 0.15, 0.9, 0.95])
    observed = torch.tensor([0.0, 1.0, 1.0, 1.0])
    # Bins of width 1/2: |0.25 - 1| / 4 + |1.85 - 2| / 4.
    assert calibration_error(predicted, observed, num_bins=2) == pytest.approx((0.75 + 0.15) / 4)
    assert calibration_error(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0])) == 0.0


def test_temperatures_are_found_from_left_to_right() -> None:
    """Heads that are too sure by known factors get those factors back, and the running product becomes
    calibrated."""
    generator = torch.Generator().manual_seed(5)
    factors = torch.tensor([1.0, 2.0, 0.5, 3.0])
    honest = torch.randn(60000, 4, generator=generator) * 1.5 + 1.0
    acceptance = (torch.rand(honest.shape, generator=generator) < honest.sigmoid()).double()
    logits = honest * factors
    temperatures = calibrate(logits, acceptance)
    assert temperatures.tolist() == pytest.approx(factors.tolist(), rel=0.1)
    head = ConfidenceHead(3, 0, 4)
    head.temperatures.copy_(temperatures)
    product = head.calibrated(logits).cumprod(-1)
    truth = acceptance.cumprod(-1)
    for slot in range(4):
        assert calibration_error(product[:, slot], truth[:, slot]) < 0.01
    raw = logits.sigmoid().cumprod(-1)
    assert calibration_error(raw[:, 3], truth[:, 3]) > 0.035, "there was nothing to calibrate"


def test_a_later_slot_makes_up_for_an_earlier_ones_bias() -> None:
    """What is calibrated is the product: a slot's temperature is chosen given those before it."""
    generator = torch.Generator().manual_seed(6)
    honest = torch.randn(40000, 2, generator=generator)
    acceptance = (torch.rand(honest.shape, generator=generator) < honest.sigmoid()).double()
    biased = honest.clone()
    biased[:, 0] += 1.0  # no temperature mends this
    product = (biased / calibrate(biased, acceptance)).sigmoid().cumprod(-1)[:, 1]
    apart = torch.tensor([float(calibrate(biased[:, :1], acceptance[:, :1])), 1.0])
    alone = (biased / apart).sigmoid().cumprod(-1)[:, 1]
    truth = acceptance.prod(-1)
    assert calibration_error(product, truth) <= calibration_error(alone, truth)


def test_the_head_looks_at_the_distribution_only_when_asked() -> None:
    hidden, scores = torch.randn(2, 3, 4), torch.randn(2, 3, 7)
    plain = ConfidenceHead(4, 0, 3, with_distribution=False)
    assert plain.proj.in_features == 4
    assert torch.equal(plain(hidden, None, scores), plain(hidden, None, scores * 5))
    looking = ConfidenceHead(4, 0, 3)
    assert not torch.equal(looking(hidden, None, scores), looking(hidden, None, scores * 5))
    scores[..., 0] = float("-inf")  # a masked column
    assert bool(looking(hidden, None, scores).isfinite().all())
