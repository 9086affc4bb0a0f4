"""`foredraft bench`: its figures, and what it does when outputs differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foredraft.engine.llm import LLM
from foredraft.models.decoder import Decoder

KEYS = [
    "model",
    "drafter",
    "method",
    "corrector",
    "verification",
    "dtype",
    "device",
    "threads",
    "gamma",
    "batch",
    "prompts",
    "new_tokens",
    "baseline",
    "speculative",
    "speedup",
    "throughput_gain",
    "mean_acceptance_length",
    "acceptance_rate",
    "acceptance_rate_per_position",
    "draft_time_fraction",
    "outputs_identical",
    "first_difference",
]
MODE_KEYS = [
    "tokens_per_second",
    "latency_s",
    "ttft_s",
    "tpot_s",
    "requests_per_second",
    "peak_memory_bytes",
    "steps",
]
TEXTS = ["abcabcabcabc", "the cat sat on the mat and the cat sat on the ", "something else"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": text, "name": f"p{index}", "kind": "test"}) for index, text in enumerate(TEXTS)]
    path.write_text("\n".join(lines) + "\n")
    return path


def flags(model: Path, prompts: Path, *more: object) -> list[object]:
    return [
        "bench",
        "--model",
        model,
        "--prompts",
        prompts,
        "--max-tokens",
        20,
        "--rounds",
        2,
        "--ignore-eos",
        "--no-chat-template",
        *more,
    ]


def test_every_figure_is_there(foredraft, tiny_model: Path, prompts: Path, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    result = foredraft(*flags(tiny_model, prompts, "--dtype", "float32", "--json", path))
    assert result.status == 0, result.err
    figures = json.loads(path.read_text())
    assert [key for key in KEYS if key not in figures] == []
    for mode in ("baseline", "speculative"):
        assert [key for key in MODE_KEYS if key not in figures[mode]] == []
        assert set(figures[mode]["latency_s"]) == {"mean", "p50", "p90", "p99", "stdev"}
        assert figures[mode]["peak_memory_bytes"] > 2**20
    assert figures["outputs_identical"] is True
    assert figures["first_difference"] is None
    assert figures["new_tokens"] == 20 * len(TEXTS)
    # Plain decoding: one forward for the prompt and its first token, one for each further token.
    assert figures["baseline"]["steps"] == 20 * len(TEXTS)
    decoding = figures["new_tokens"] - len(TEXTS)
    forwards = figures["speculative"]["steps"] - len(TEXTS)
    assert figures["mean_acceptance_length"] == pytest.approx(decoding / forwards)
    assert sum(
        figures["step_time_fractions"]["baseline"][phase]
        for phase in ("schedule", "draft", "forward", "sample", "commit")
    ) == pytest.approx(1)
    assert figures["forward_cost"]["ratio"]["median"] > 0
    assert [each["name"] for each in figures["per_prompt"]] == ["p0", "p1", "p2"]
    assert "speed-up" in result.out
    assert "identical" in result.out


@pytest.mark.parametrize("batch", [2, 3])
def test_batches_give_the_same_tokens(foredraft, tiny_model: Path, prompts: Path, tmp_path: Path, batch: int) -> None:
    path = tmp_path / "figures.json"
    result = foredraft(*flags(tiny_model, prompts, "--dtype", "float32", "--batch", batch, "--json", path))
    assert result.status == 0, result.err
    figures = json.loads(path.read_text())
    assert figures["batch"] == batch
    assert figures["outputs_identical"] is True


def changed_when_speculating(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes speculation wrong: the fifth token of the second prompt becomes another one."""
    generate = LLM.generate

    def wrong(self: LLM, given, *arguments, num_speculative_tokens=None, **options):
        outputs = generate(self, given, *arguments, num_speculative_tokens=num_speculative_tokens, **options)
        for prompt, output in zip(given, outputs, strict=True):
            if num_speculative_tokens is None and len(prompt["prompt_token_ids"]) == len(TEXTS[1]):
                output.outputs[0].token_ids[4] ^= 1
        return outputs

    monkeypatch.setattr(LLM, "generate", wrong)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_different_outputs_are_a_finding_without_a_speedup(
    foredraft, tiny_model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    changed_when_speculating(monkeypatch)
    path = tmp_path / "figures.json"
    result = foredraft(*flags(tiny_model, prompts, "--dtype", dtype, "--json", path))
    assert result.status == 1
    figures = json.loads(path.read_text())
    assert figures["outputs_identical"] is False
    assert figures["speedup"] is None
    assert figures["throughput_gain"] is None
    assert [each["speedup"] for each in figures["per_prompt"]] == [None] * 3
    assert figures["first_difference"]["prompt"] == 1
    assert figures["first_difference"]["position"] == 4
    assert figures["first_difference"]["margin"] > 0.5
    assert "speed-up 0" not in result.out
    assert "speed-up 1" not in result.out
    assert "prompt 2, token 5" in " ".join(result.out.split())


def test_near_ties_in_bfloat16_are_reported_and_are_no_finding(
    foredraft, tiny_model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed_when_speculating(monkeypatch)
    monkeypatch.setattr("foredraft.measure.bench.logit_margin", lambda *_: 0.01)
    monkeypatch.setattr(Decoder, "is_row_invariant", False)
    path = tmp_path / "figures.json"
    result = foredraft(*flags(tiny_model, prompts, "--dtype", "bfloat16", "--json", path))
    assert result.status == 0
    figures = json.loads(path.read_text())
    assert figures["outputs_identical"] is False
    assert figures["speedup"] > 0
    assert "near-tie" in result.out
    # Where identity is promised, no tie is close enough.
    assert foredraft(*flags(tiny_model, prompts, "--dtype", "float32")).status == 1
    monkeypatch.setattr(Decoder, "is_row_invariant", True)
    assert foredraft(*flags(tiny_model, prompts, "--dtype", "bfloat16")).status == 1


def test_unseeded_sampling_is_not_compared(foredraft, tiny_model: Path, prompts: Path, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    result = foredraft(*flags(tiny_model, prompts, "--temperature", 1, "--json", path))
    assert result.status == 0, result.err
    assert json.loads(path.read_text())["outputs_identical"] is None
    assert "same distribution" in result.out


def test_seeded_sampling_is_identical(foredraft, tiny_model: Path, prompts: Path, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    result = foredraft(
        *flags(tiny_model, prompts, "--dtype", "float32", "--temperature", 1, "--seed", 5, "--json", path)
    )
    assert result.status == 0, result.out
    assert json.loads(path.read_text())["outputs_identical"] is True


def test_transformers_takes_turns(foredraft, tiny_model: Path, prompts: Path, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    result = foredraft(*flags(tiny_model, prompts, "--dtype", "float32", "--compare-transformers", "--json", path))
    assert result.status == 0, result.err
    figures = json.loads(path.read_text())
    compared = figures["compared_with_transformers"]
    assert compared["outputs_identical"] is True
    rates = [figures[mode]["tokens_per_second_range"] for mode in ("baseline", "transformers")]
    assert rates[0][0] / rates[1][1] <= compared["plain_gain"] <= rates[0][1] / rates[1][0]
    assert figures["memory"] is None
    assert "transformers' generate" in result.out


@pytest.mark.slow
def test_the_demo_is_exact_on_the_demo_model(foredraft, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    result = foredraft(
        "bench",
        "--dtype",
        "float32",
        "--max-tokens",
        48,
        "--rounds",
        1,
        "--num-speculative-tokens",
        7,
        "--json",
        path,
    )
    assert result.status == 0, result.err
    figures = json.loads(path.read_text())
    assert figures["outputs_identical"] is True
    assert figures["prompts"] == 12
    assert (figures["method"], figures["corrector"]) == ("mixture", "chain")
    assert figures["mean_acceptance_length"] > 1.5
    kinds = {each["kind"] for each in figures["per_prompt"]}
    assert kinds == {"repetitive", "code", "chat"}
