"""Start-up costs: what is measured, with which tokens, and that a second start reads what the first one kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.models.tiny import save_tiny

from foredraft import LLM, SamplingParams, SpeculativeConfig
from foredraft.engine import calibration, start_costs
from foredraft.engine.calibration import measure_costs
from foredraft.engine.cost_file import cache_directory
from foredraft.engine.explain import explanation
from foredraft.errors import ConfigError

PROMPTS = [{"prompt_token_ids": [1, 2, 3, 4, 1, 2, 3]}, {"prompt_token_ids": [5, 9, 5, 9, 5]}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("measured")
    save_tiny(path, "llama", vocab_size=64)
    return path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def llm_of(directory: Path, **options) -> LLM:
    speculative = SpeculativeConfig(model=str(directory), num_speculative_tokens=4, **options)
    return LLM(str(directory), dtype="float32", skip_tokenizer_init=True, max_model_len=64, speculative=speculative)


def test_a_target_is_measured_over_varied_tokens_and_sizes(directory: Path) -> None:
    llm = llm_of(directory, adaptive=False)
    engine = llm.engine
    seen: list[torch.Tensor] = []
    forward = engine.model.forward

    class Watched:
        def __getattr__(self, name: str):
            return getattr(engine.model, name)

        def forward(self, batch, *arguments):
            seen.append(batch.input_ids)
            return forward(batch, *arguments)

    assert engine.drafter is not None
    costs = measure_costs(Watched(), engine.cache, engine.drafter, gamma=4, max_num_seqs=8, budget=20.0)
    assert costs.target.sizes[:4] == [1, 2, 3, 4]
    assert costs.target.sizes[-1] == 40
    assert set(costs.drafts) == {1, 2, 4}
    assert len(torch.cat(seen).unique()) > 40  # of 64: experts would be chosen as widely as at work
    table = costs.step_table(60)
    assert (table[1:] > 0).all()
    assert engine.drafter._written == {}


def test_a_short_budget_still_gives_a_curve(directory: Path) -> None:
    engine = llm_of(directory, adaptive=False).engine
    assert engine.drafter is not None
    costs = measure_costs(engine.model, engine.cache, engine.drafter, gamma=4, max_num_seqs=8, budget=0.0)
    assert costs.target.sizes == [1]
    assert costs.step_table(50)[50] > 0
    assert costs.draft_seconds(4, 8) > 0


@pytest.mark.parametrize(("kept_seconds", "measured_again"), [(0.5, False), (1.0, False), (20.0, True)])
def test_kept_costs_are_believed_unless_a_forward_is_much_faster(
    directory: Path, monkeypatch: pytest.MonkeyPatch, kept_seconds: float, measured_again: bool
) -> None:
    llm_of(directory)
    (path,) = cache_directory().iterdir()
    kept = json.loads(path.read_text())
    kept["target"] = {"sizes": [1, 5], "seconds": [kept_seconds, kept_seconds]}
    path.write_text(json.dumps(kept))
    # Every forward takes a second.
    monkeypatch.setattr(calibration, "_timed", lambda cases, budget: {case: 1.0 for case, _ in cases})
    costs = llm_of(directory).engine.lengths.costs
    assert (costs.target.sizes != [1, 5]) == measured_again


def test_the_second_start_measures_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm_of(directory)
    assert len(list(cache_directory().iterdir())) == 1

    def refuse(*arguments, **options):
        raise AssertionError("measured again")

    monkeypatch.setattr(start_costs, "measure_costs", refuse)
    monkeypatch.setattr(start_costs, "are_too_high", lambda *arguments, **options: False)
    llm = llm_of(directory)
    with pytest.raises(AssertionError, match="measured again"):
        llm_of(directory, tree_width=2)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    plain = llm.generate(PROMPTS, params, num_speculative_tokens=0)
    adaptive = llm.generate(PROMPTS, params)
    assert [each.outputs[0].token_ids for each in plain] == [each.outputs[0].token_ids for each in adaptive]


def test_every_step_is_explained(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    llm = llm_of(directory, explain_lengths=str(path))
    llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    lines = path.read_text().splitlines()
    assert len(lines) == llm.times.num_steps
    assert all(
        word in lines[-1] for word in ("step", "chosen=", "drafted=", "verified=", "accepted=", "expected", "came")
    )


def test_a_file_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(ConfigError, match="--explain-lengths /no/such"):
        explanation("/no/such/directory/file")
