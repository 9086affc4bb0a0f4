"""Prompt files, good and bad."""

from __future__ import annotations

from pathlib import Path

import pytest

from foredraft.errors import ConfigError
from foredraft.measure.prompts import PromptRecord, demo_prompts, read_prompts


def test_json_lines_and_text(tmp_path: Path) -> None:
    lines, text = tmp_path / "a.jsonl", tmp_path / "b.txt"
    lines.write_text('{"prompt": "one", "kind": "x"}\n\n{"prompt": "tw\\no", "prediction": "p"}\n')
    text.write_text("one\n\n{not json}\n")
    assert read_prompts(lines) == [PromptRecord("one", kind="x"), PromptRecord("tw\no", prediction="p")]
    assert read_prompts(text) == [PromptRecord("one"), PromptRecord("{not json}")]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "no prompts"),
        ('{"prompt": "a"}\n{', "line 2"),
        ('["a"]', "line 1"),
        ('{"text": "a"}', "'text'"),
        ('{"kind": "a"}', "'prompt'"),
        ('{"prompt": 3}', "prompt: 3"),
        ('{"prompt": ""}', "'prompt'"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, content: str, named: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError) as error:
        read_prompts(path)
    assert named in str(error.value)
    assert str(path) in str(error.value)


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for path in (tmp_path / "missing.txt", tmp_path / "latin.txt", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_prompts(path)


def test_the_demo_has_a_dozen_prompts_of_three_kinds() -> None:
    records = demo_prompts()
    assert len(records) == 12
    assert [sum(record.kind == kind for record in records) for kind in ("repetitive", "code", "chat")] == [
        4,
        4,
        4,
    ]
    assert len({record.name for record in records}) == 12
