"""Plans that cannot be followed are refused by flag and number, before the target has answered anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import save_byte_tokenizer
from tests.models.tiny import save_tiny

import foredraft.train.run
from foredraft.errors import ConfigError
from foredraft.train.features import read_texts
from foredraft.train.plan import TrainPlan, check_held_out
from foredraft.train.regenerate import Response
from foredraft.train.run import train


@pytest.fixture
def answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreached(*_: object, **__: object) -> None:
        raise AssertionError("the target was asked for answers")

    monkeypatch.setattr(foredraft.train.run, "regenerate", unreached)


def start(target: Path, prompts: Path, out: Path, **changes: Any) -> None:
    flags: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_num_seqs": 4, "num_feature_layers": 2, **changes}
    train(TrainPlan(str(target), [prompts], out, **flags), lambda _: None, lambda _: None)


@pytest.mark.usefixtures("answers_nothing")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 4}, "--num-layers: 4 is above the 3 layers"),
        ({"num_feature_layers": 5}, "--num-feature-layers: 5 is above the 3 layers"),
        ({"draft_vocab_size": 15}, "--draft-vocab-size: 15 is below the 16 candidates"),
        ({"conv_taps": 8}, "--conv-taps: 8 is above the 7 slots of a block"),
        ({"corrector": "magic"}, "--corrector: unknown value 'magic'; allowed: none, markov"),
    ],
)
def test_sizes_that_the_target_does_not_have_are_refused(
    changes: dict[str, Any], message: str, tiny_target: Path, prompt_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        start(tiny_target, prompt_file, tmp_path, **changes)
    assert list(tmp_path.iterdir()) == []  # another plan may begin here


@pytest.mark.usefixtures("answers_nothing")
def test_a_target_that_transformers_runs_is_refused(prompt_file: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    save_tiny(target, "gpt2", n_embd=36, n_layer=3, n_head=6, n_positions=96)
    save_byte_tokenizer(target)
    with pytest.raises(ConfigError, match="it runs through transformers; drafters need one that runs natively"):
        start(target, prompt_file, tmp_path / "out")


@pytest.mark.usefixtures("answers_nothing")
def test_too_few_prompts_to_hold_two_out_are_refused(tiny_target: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"question {number}\n" for number in range(63)))
    with pytest.raises(ConfigError, match="--prompts: 63 are too few, since one in 32 is held out.*at least 64"):
        start(tiny_target, prompts, tmp_path / "out")
    prompts.write_text(prompts.read_text() + "question 63\n")
    with pytest.raises(AssertionError, match="asked for answers"):
        start(tiny_target, prompts, tmp_path / "out")


def test_held_out_answers_without_a_whole_block_are_refused() -> None:
    answers = [Response(31, [1, 2], [3] * 5, 0.0), Response(95, [1, 2, 3, 4], [5] * 7, 0.0)]
    check_held_out("calibration", answers, 6)
    with pytest.raises(ConfigError, match="--num-speculative-tokens: 7, but the longest answer.* calibration has 7"):
        check_held_out("calibration", answers, 7)


def test_texts_are_trained_on_calibrated_on_or_measured_on(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at a time: no text of a run is in two of its folders, and each purpose gets the files of its own."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"question {number}\n" for number in range(130)))
    used: dict[str, list[Path]] = {}
    for name in ("calibrate_confidence", "slot_figures"):
        original = getattr(foredraft.train.run, name)

        def noted(network: Any, files: list[Path], name: str = name, original: Any = original) -> Any:
            used[name] = files
            return original(network, files)

        monkeypatch.setattr(foredraft.train.run, name, noted)
    sizes = {"num_layers": 1, "draft_vocab_size": 32, "num_speculative_tokens": 2, "max_tokens": 8, "anchors": 4}
    start(tiny_target, prompts, tmp_path / "out", epochs=(1, 0, 0), **sizes)
    work = tmp_path / "out" / "work"
    texts = {folder: texts_of(work / folder) for folder in ("features", "calibration", "evaluation")}
    assert [len(each) for each in texts.values()] == [126, 2, 2]
    assert len(set().union(*texts.values())) == 130
    assert used == {
        "calibrate_confidence": sorted((work / "calibration").iterdir()),
        "slot_figures": sorted((work / "evaluation").iterdir()),
    }


def texts_of(folder: Path) -> set[tuple[int, ...]]:
    found = set()
    for file in folder.iterdir():
        texts = read_texts(file)
        bounds = texts.starts.tolist()
        for start, end in zip(bounds[:-1], bounds[1:], strict=True):
            found.add(tuple(texts.token_ids[start:end].tolist()))
    return found
