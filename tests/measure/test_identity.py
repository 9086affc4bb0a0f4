"""The first difference of two outputs, and the target's gap there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tests.models.tiny import save_tiny

from foredraft.config import EngineConfig
from foredraft.measure.forward import forward_cost, next_logits
from foredraft.measure.identity import Difference, first_difference, logit_margin
from foredraft.models.load import load_model


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([[1, 2], [3]], [[1, 2], [3]], None),
        ([[1, 2], [3, 4]], [[1, 2], [3, 5]], Difference(1, 1, 4, 5)),
        ([[1, 2]], [[1]], Difference(0, 1, 2, None)),
        ([[1, 9], [3]], [[1, 2], [4]], Difference(0, 1, 9, 2)),
    ],
)
def test_first_difference(left, right, expected) -> None:
    assert first_difference(left, right) == expected


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    """Ours and transformers', with the same weights."""
    directory = tmp_path_factory.mktemp("model")
    reference = save_tiny(directory, "llama")
    config = EngineConfig(model=str(directory), dtype="float32", device="cpu", skip_tokenizer_init=True)
    return SimpleNamespace(ours=load_model(config).model, reference=reference)


def test_the_margin_is_the_gap_of_transformers_logits(models) -> None:
    import torch

    prompt, output = [5, 6, 7, 8] * 5, [9, 10, 11]
    with torch.no_grad():
        logits = models.reference(torch.tensor([[*prompt, 9, 10]])).logits[0, -1]
    difference = Difference(0, 2, 40, 50)
    margin = logit_margin(models.ours, prompt, output, difference)
    assert margin == pytest.approx(abs(float(logits[40] - logits[50])), abs=1e-4)
    assert next_logits(models.ours, [*prompt, 9, 10]).shape == logits.shape
    assert logit_margin(models.ours, prompt, output, Difference(0, 2, 11, None)) is None


def test_forward_cost_fits_the_context(models) -> None:
    cost = forward_cost(models.ours, repeats=3, warmup=1)
    assert (cost.context, cost.num_tokens) == (96 - 8, 8)
    assert cost.ratio.low <= cost.ratio.median <= cost.ratio.high
    assert cost.one_token_s > 0
