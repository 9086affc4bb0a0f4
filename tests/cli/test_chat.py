"""`foredraft chat`: what the model is asked, and how an answer is stopped."""

from __future__ import annotations

import io
import signal
from pathlib import Path

import pytest
from tests.cli.test_generate import process

from foredraft.engine.llm import LLM

FLAGS = ("--dtype", "float32", "--temperature", "0", "--max-tokens", "8", "--ignore-eos")


@pytest.fixture
def conversations(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, str]]]:
    """What the model was asked, conversation by conversation."""
    asked: list[list[dict[str, str]]] = []
    stream_chat = LLM.stream_chat

    def recorded(self: LLM, messages, *arguments, **options):
        asked.append([dict(message) for message in messages])
        return stream_chat(self, messages, *arguments, **options)

    monkeypatch.setattr(LLM, "stream_chat", recorded)
    return asked


def chat(foredraft, monkeypatch: pytest.MonkeyPatch, model: Path, lines: str, *flags: str):
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return foredraft("chat", "--model", model, *FLAGS, *flags)


def test_the_model_sees_the_whole_conversation(foredraft, monkeypatch, tiny_model: Path, conversations) -> None:
    result = chat(foredraft, monkeypatch, tiny_model, "one\n\ntwo\n/exit\nthree\n", "--system", "Be brief.")
    assert result.status == 0, result.err
    first, second = conversations
    assert first == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]
    assert [message["role"] for message in second] == ["system", "user", "assistant", "user"]
    assert second[2]["content"] == result.out[: len(second[2]["content"])]
    assert second[3]["content"] == "two"


def test_reset_forgets_all_but_the_system_message(foredraft, monkeypatch, tiny_model: Path, conversations) -> None:
    chat(foredraft, monkeypatch, tiny_model, "one\n/reset\ntwo\n", "--system", "Be brief.")
    assert conversations[1] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "two"},
    ]


def test_unknown_commands_are_not_sent(foredraft, monkeypatch, tiny_model: Path, conversations) -> None:
    result = chat(foredraft, monkeypatch, tiny_model, "/frobnicate now\n")
    assert result.status == 0
    assert "/frobnicate" in result.err
    assert conversations == []


def test_a_conversation_that_is_too_long_goes_on_after_reset(
    foredraft, monkeypatch, tiny_model: Path, conversations
) -> None:
    lines = "x" * 60 + "\n/reset\nhi\n"
    result = chat(foredraft, monkeypatch, tiny_model, lines, "--max-model-len", "64", "--stats")
    assert result.status == 0
    assert "64 tokens" in result.err
    assert "/reset" in result.err
    assert conversations[1] == [{"role": "user", "content": "hi"}]
    assert "tokens/s" in result.err


def test_an_interrupt_stops_the_answer_and_not_the_chat(tiny_model: Path) -> None:
    running = process("chat", "--model", tiny_model, "--ignore-eos", "--max-tokens", "4000")
    assert running.stdin is not None
    assert running.stdout is not None
    running.stdin.write("hello\n")
    running.stdin.flush()
    running.stdout.read(1)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate("/exit\n", timeout=60)
    assert running.returncode == 0, err
    assert "(stopped)" in err
    assert "Traceback" not in err
    assert len(out) < 4000
