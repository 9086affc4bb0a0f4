"""`foredraft audit` as a user runs it: a verdict with counts, an exit status that scripts can trust, faults that are
found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("abcabcabcabc\nto be or not to be or not\n1, 2, 3, 1, 2, 3\n")
    return path


def flags(model: Path, prompts: Path, *drafter: object) -> list[object]:
    return [
        *("audit", model, "--dtype", "float32", "--num-speculative-tokens", 3),
        *("--prompts", prompts, "--max-tokens", 24, "--samples", 60),
        *(drafter or ("--speculative-model", model)),
    ]


def test_a_sound_engine_is_lossless(foredraft, tiny_model: Path, prompts: Path, tmp_path: Path) -> None:
    figures = tmp_path / "audit.json"
    result = foredraft(*flags(tiny_model, prompts), "--json", figures)
    assert result.status == 0, result.out + result.err
    found = json.loads(figures.read_text())
    assert found["lossless"] is True
    assert found["drafter"] == str(tiny_model)
    assert len(found["checks"]) >= 4
    assert {check["name"]: check["passed"] for check in found["checks"]} == {
        check["name"]: True for check in found["checks"]
    }, found["checks"]
    assert found["not_covered"], "an audit says what it did not look at"
    for check in found["checks"]:
        assert check["name"] in result.out


def test_the_self_test_finds_every_fault_that_it_puts_in(foredraft, tiny_model: Path, prompts: Path) -> None:
    result = foredraft(*flags(tiny_model, prompts), "--self-test", "--json", "-")
    assert result.status == 0, result.out + result.err
    found = json.loads(result.out)
    names = " ".join(check["name"] for check in found["checks"])
    for fault in ("residual", "lying", "cut"):
        assert fault in names
    assert all(check["passed"] for check in found["checks"])


def test_nothing_drafted_is_no_verdict(foredraft, tiny_model: Path, prompts: Path) -> None:
    """A random model never repeats itself, so look-up drafts nothing, and an audit of nothing must not say passed."""
    result = foredraft(*flags(tiny_model, prompts, "--method", "ngram"))
    assert "nothing was drafted, so nothing was tested" in result.out
    assert "lossless as far as tested" not in result.out


def test_without_speculation_there_is_nothing_to_audit(foredraft, tiny_model: Path) -> None:
    result = foredraft("audit", "--model", tiny_model, "--prompts", "/nowhere")
    assert result.status == 2
    assert "prompt file /nowhere: cannot be read" in result.err
