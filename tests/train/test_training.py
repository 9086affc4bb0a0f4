"""Training itself: it learns, it resumes to the very same weights, and what it writes drafts in the engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.conftest import Result

from foredraft import LLM, SamplingParams, SpeculativeConfig
from foredraft.cli.command import run
from foredraft.cli.main import app
from foredraft.draft.block_model import load_block_model
from foredraft.errors import ConfigError
from foredraft.train.objective import Objective
from foredraft.train.plan import TrainPlan
from foredraft.train.run import train
from foredraft.train.trainer import Trainer, TrainingProgress


def plan(target: Path, prompts: Path, out: Path, **changes) -> TrainPlan:
    base = TrainPlan(
        target=str(target),
        prompts=[prompts],
        out=out,
        num_speculative_tokens=3,
        num_layers=1,
        num_feature_layers=2,
        draft_vocab_size=64,
        corrector_options={"num_candidates": 8},
        max_tokens=12,
        epochs=(3, 1, 1),
        learning_rate=3e-3,
        texts=4,
        anchors=8,
        dtype="float32",
        device="cpu",
        max_num_seqs=8,
    )
    return replace(base, **changes)


def quiet(*_: object) -> None:
    pass


@pytest.mark.parametrize("corrector", ["chain", "markov", "gru", "lattice", "none"])
def test_a_trained_drafter_is_better_than_chance_and_exact_in_the_engine(
    corrector: str, tiny_target: Path, prompt_file: Path, tmp_path: Path
) -> None:
    options = {} if corrector == "none" else {"num_candidates": 8}
    # No carry: what comes before the last token says nothing of what this target says next.
    sizes: dict[str, Any] = {"corrector": corrector, "corrector_options": options, "epochs": (2, 8, 1)}
    chosen = plan(tiny_target, prompt_file, tmp_path, carry=False, **sizes)
    result = train(chosen, quiet, quiet)
    assert result.slots.num_slots > 50
    assert result.slots.alpha_base[0] > 0.25  # chance would be a few hundredths
    if corrector != "none":  # the token before a slot is all that there is to know
        assert result.slots.expected_length > result.slots.expected_length_base + 0.1
    metrics = [json.loads(line) for line in (tmp_path / "work" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["step"] > 50
    for name in ("config.json", "model.safetensors", "figures.json", "training.svg", "training.png"):
        assert (tmp_path / name).stat().st_size > 0
    llm = LLM(
        str(tiny_target),
        dtype="float32",
        speculative=SpeculativeConfig(model=str(tmp_path), num_speculative_tokens=3, adaptive=False),
    )
    assert llm.config.speculative is not None
    assert llm.config.speculative.method == "block"  # its own configuration says so
    prompts = ["number 400", "what else?"]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    drafted = llm.generate(prompts, params)
    plain = llm.generate(prompts, params, num_speculative_tokens=0)
    assert [each.outputs[0].token_ids for each in drafted] == [each.outputs[0].token_ids for each in plain]
    assert sum(each.stats.num_draft_tokens for each in drafted) > 0


class Killed(Exception):
    pass


def test_a_killed_run_resumes_to_the_same_weights(
    tiny_target: Path, prompt_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foredraft.train.trainer.CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr("foredraft.train.trainer.LOG_EVERY", 5)
    whole = train(plan(tiny_target, prompt_file, tmp_path / "whole"), quiet, quiet)
    told: list[TrainingProgress] = []

    original = Trainer.run

    def killed_run(self: Trainer, report) -> None:
        def die(progress: TrainingProgress) -> None:
            told.append(progress)
            if len(told) in (4, 9):
                raise Killed

        original(self, die)

    monkeypatch.setattr(Trainer, "run", killed_run)
    pieces = plan(tiny_target, prompt_file, tmp_path / "pieces")
    for _ in range(2):
        with pytest.raises(Killed):
            train(pieces, quiet, quiet)
    resumed = train(pieces, quiet, quiet)
    assert resumed.slots == whole.slots
    ours, theirs = load_block_model(tmp_path / "pieces").tensors(), load_block_model(tmp_path / "whole").tensors()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    steps = [json.loads(line)["step"] for line in (tmp_path / "pieces/work/metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))


def test_a_drafter_goes_on_from_another(tiny_target: Path, prompt_file: Path, tmp_path: Path) -> None:
    first = plan(tiny_target, prompt_file, tmp_path / "first", carry=False)
    before = train(first, quiet, quiet)
    second = replace(first, out=tmp_path / "second", start=first.out, carry=True, epochs=(0, 0, 1), learning_rate=1e-9)
    after = train(second, quiet, quiet)
    assert after.slots.alpha == pytest.approx(before.slots.alpha, abs=0.02)  # bfloat16 on disk, and hardly a step since
    old, new = load_block_model(first.out), load_block_model(second.out)
    assert new.draft_ids is not None
    assert old.draft_ids is not None
    assert torch.equal(new.draft_ids, old.draft_ids)
    assert new.backbone.carry is not None
    assert old.backbone.carry is None
    other = replace(first, out=tmp_path / "third", corrector="markov", start=first.out, epochs=(0, 1, 0))
    assert train(other, quiet, quiet).slots.alpha_base == pytest.approx(before.slots.alpha_base, abs=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 2}, "--num-layers: 2, but the drafter of --start .* has 1"),
        ({"num_speculative_tokens": 2}, "--num-speculative-tokens: 2, but the drafter of --start .* has 3"),
        ({"draft_vocab_size": 32}, "--draft-vocab-size: 32, but the drafter of --start .* has 64"),
        ({"num_feature_layers": 1}, "--num-feature-layers: .*, but the drafter of --start"),
        ({"carry": False}, "--carry: False, but the drafter of --start .* has True"),
        ({"epochs": (0, 0, 0)}, "--epochs, --corrector-epochs and --joint-epochs: all are 0"),
    ],
)
def test_starts_of_another_shape_are_refused(
    changes: dict[str, Any], message: str, tiny_target: Path, prompt_file: Path, tmp_path: Path
) -> None:
    first = plan(tiny_target, prompt_file, tmp_path / "first", epochs=(1, 0, 0))
    train(first, quiet, quiet)
    with pytest.raises(ConfigError, match=message):
        train(replace(first, out=tmp_path / "second", start=first.out, **changes), quiet, quiet)


def test_another_plan_in_the_same_directory_is_refused(tiny_target: Path, prompt_file: Path, tmp_path: Path) -> None:
    train(plan(tiny_target, prompt_file, tmp_path, epochs=(1, 0, 0)), quiet, quiet)
    with pytest.raises(ConfigError, match="begun with another plan .epochs, seed differ"):
        train(plan(tiny_target, prompt_file, tmp_path, epochs=(2, 0, 0), seed=3), quiet, quiet)


@pytest.mark.parametrize(
    "objective",
    [Objective("ce"), Objective("tv"), Objective("nla", "dpace"), Objective("dspark"), Objective("lk", survival=0.5)],
)
def test_every_objective_trains(objective: Objective, tiny_target: Path, prompt_file: Path, tmp_path: Path) -> None:
    chosen = plan(tiny_target, prompt_file, tmp_path, epochs=(2, 1, 1), objective=objective)
    result = train(chosen, quiet, quiet)
    assert all(0 <= each <= 1 for each in result.slots.alpha)
    assert all(torch.isfinite(value).all() for value in load_block_model(tmp_path).tensors().values())


def test_the_command_line_trains_and_says_what_came_out(
    tiny_target: Path, prompt_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = f"train --target {tiny_target} --prompts {prompt_file} --out {tmp_path / 'out'} --dtype float32"
    arguments += " --num-speculative-tokens 3 --num-layers 1 --num-feature-layers 1 --draft-vocab-size 64 --epochs 1"
    arguments += f" --corrector-epochs 1 --joint-epochs 1 --max-tokens 8 --anchors 8 --json {tmp_path / 'figures.json'}"
    status = run(app, arguments.split())
    result = Result(status, *capsys.readouterr())
    assert result.status == 0, result.err
    assert "140 prompts; refused 0" in result.err
    assert "expected tokens per step" in result.out
    assert "engine, greedy" in result.out
    assert set(json.loads((tmp_path / "figures.json").read_text())["engine"]) == {"greedy", "sampled", "greedy tree"}
    status = run(app, ["train", "--target", str(tiny_target), "--out", str(tmp_path / "none")])
    assert status == 2
    assert "--prompts: give at least one file" in capsys.readouterr().err
