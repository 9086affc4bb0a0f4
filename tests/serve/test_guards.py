"""Guards: a blocked phrase is caught however it is written and split, and never leaves the server in part."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from tests.serve.scripted import MODEL, RunningServer, script

from foredraft.errors import ConfigError
from foredraft.serve.guards import AllOf, KeywordGuard, load_guards

PHRASE = "secret word"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("guard") / "words"
    path.write_text(f"{PHRASE}\ncafé\n\n禁止\n", encoding="utf-8")
    with RunningServer({"guard_keywords": str(path)}) as running:
        yield running
        running.wait_until_idle()


def told(piece: str, pieces: list[str]) -> str:
    return "".join(pieces) + piece


@pytest.mark.parametrize("size", [1, 2, 3, 5, 50])
@pytest.mark.parametrize(
    "written",
    [
        "secret word",
        "SeCrEt WORD",
        "ｓｅｃｒｅｔ　ｗｏｒｄ",
        "secret \n\t word",
        "sec\u200bret w\u00adord",
        "CAFE\u0301",
        "café",
        "禁止",
    ],
)
def test_phrases_however_written_and_split(written: str, size: int) -> None:
    watch = AllOf([KeywordGuard([PHRASE, "café", "禁止"])]).watch()
    text = f"it is secre wo: {written}, said he"
    shown, blocked = 0, False
    for start in range(0, len(text), size):
        piece = text[start : start + size]
        shown, blocked = watch.see(piece, start + size >= len(text))
        assert shown <= text.index(written)
        if blocked:
            break
    assert blocked
    assert text[:shown] == "it is secre wo: "


@pytest.mark.parametrize("size", [1, 2, 7])
def test_harmless_text_passes_whole(size: int) -> None:
    watch = KeywordGuard([PHRASE]).watch()
    text = "a secret wor and secrets, secret-word, e\u0301 secret"
    shown = 0
    for start in range(0, len(text), size):
        shown, blocked = watch.see(text[start : start + size], start + size >= len(text))
        assert not blocked
    assert shown == len(text)


def chat(text: str, **fields) -> dict:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


def spelled(text: str) -> str:
    """A prompt that makes the model say `text` without having it, so that the input check lets it pass."""
    return script(text)


@pytest.mark.parametrize("stream", [False, True])
def test_an_output_is_cut_before_the_phrase(guarded: RunningServer, stream: bool, monkeypatch) -> None:
    monkeypatch.setattr(guarded.state, "check_input", lambda text: None)
    body = chat(spelled("fine, fine, secret w... no: Secret  WORD and more"), stream=stream, logprobs=True)
    answer = httpx2.post(guarded.url + "/v1/chat/completions", json=body)
    expected = "fine, fine, secret w... no: "
    if not stream:
        (choice,) = answer.json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (expected, "content_filter")
        assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == expected
        return
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    content = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert content == expected
    assert events[-1]["choices"][0]["finish_reason"] == "content_filter"
    tokens = [entry for event in events for entry in (event["choices"][0]["logprobs"] or {}).get("content", ())]
    assert "".join(entry["token"] for entry in tokens) == expected
    guarded.wait_until_idle()


def test_other_choices_go_on(guarded: RunningServer, monkeypatch) -> None:
    monkeypatch.setattr(guarded.state, "check_input", lambda text: None)
    prompts = [script("a secret word"), script("all is well")]
    body = {"model": MODEL, "prompt": prompts, "max_tokens": 30, "temperature": 0}
    choices = httpx2.post(guarded.url + "/v1/completions", json=body).json()["choices"]
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [
        ("a ", "content_filter"),
        ("all is well", "stop"),
    ]


def test_an_input_is_refused_before_the_engine(guarded: RunningServer) -> None:
    before = guarded.llm.model.num_forwards
    for path, body in (
        ("/v1/chat/completions", chat("tell me the Secret Word")),
        ("/v1/completions", {"model": MODEL, "prompt": list(b"secret word")}),
        ("/v1/embeddings", {"model": MODEL, "input": "SECRET WORD"}),
    ):
        answer = httpx2.post(guarded.url + path, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "content_filter"
    assert guarded.llm.model.num_forwards == before


class NoDigits:
    """A guard of a user's own."""

    def blocks_input(self, text: str) -> bool:
        return False

    def watch(self) -> NoDigits:
        self.seen = ""
        return self

    def see(self, new_text: str, finished: bool) -> tuple[int, bool]:
        self.seen += new_text
        for place, char in enumerate(self.seen):
            if char.isdigit():
                return place, True
        return len(self.seen), False


def test_a_guard_by_name() -> None:
    guard = (
        load_guards([f"{NoDigits.__module__}:NoDigits"], None) if "." in NoDigits.__module__ else AllOf([NoDigits()])
    )
    assert guard is not None
    assert guard.watch().see("abc1", False) == (3, True)


@pytest.mark.parametrize(
    "name", ["nonsense", "no.such.module:Class", "json:NoSuchClass", "json:JSONDecoder", ":", "json:"]
)
def test_guards_that_cannot_be_made(name: str) -> None:
    with pytest.raises(ConfigError, match="--guard"):
        load_guards([name], None)


def test_keyword_files_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n \n")
    for path in (tmp_path / "missing", tmp_path / "empty", tmp_path):
        with pytest.raises(ConfigError, match="--guard-keywords"):
            load_guards([], str(path))
