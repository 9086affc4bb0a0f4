"""`foredraft generate`: streaming, files, stdin, JSON, and how it ends when interrupted or no longer read."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

GREEDY = ("--dtype", "float32", "--temperature", "0", "--max-tokens", "24", "--ignore-eos")
PROMPT = "the cat sat on the mat and the cat sat on the "


def process(*arguments: object, **options) -> subprocess.Popen[str]:
    """The installed command as a process of its own."""
    command = [sys.executable, "-c", "import sys; from foredraft.cli.main import main; sys.exit(main())"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    pipes["env"] = {**os.environ, "OMP_NUM_THREADS": "1"}
    # Tests that run in the background inherit a SIGINT that is ignored, which Python would keep so.
    pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen([*command, *map(str, arguments)], text=True, **pipes)


def test_text_and_json_agree_and_speculation_changes_nothing(foredraft, tiny_model: Path, tmp_path: Path) -> None:
    found = {}
    for name, flags in {"plain": ["--no-speculation"], "ngram": ["--num-speculative-tokens", "4"]}.items():
        path = tmp_path / f"{name}.json"
        result = foredraft("generate", "--model", tiny_model, *GREEDY, *flags, "--json", path, PROMPT)
        assert result.status == 0, result.err
        figures = json.loads(path.read_text())
        completion = figures["results"][0]["outputs"][0]
        assert result.out == completion["text"] + "\n"
        assert len(completion["token_ids"]) == figures["new_tokens"] == 24
        assert figures["tokens_per_second"] == pytest.approx(24 / figures["seconds"])
        found[name] = completion["token_ids"]
    assert found["plain"] == found["ngram"]


def test_aliases_and_vllms_json_mean_the_same(foredraft, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for flags in (
        ["--speculative-draft-length", "3"],
        ["--num-speculative-tokens", "3", "--method", "ngram"],
        ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}'],
    ):
        assert foredraft("generate", "--model", tiny_model, *GREEDY, *flags, "--json", path, PROMPT).status == 0
        figures = json.loads(path.read_text())
        assert (figures["gamma"], figures["drafter"]) == (3, "ngram")


def test_a_draft_model_that_is_the_target_is_always_right(foredraft, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    flags = ["--speculative-model", tiny_model, "--num-speculative-tokens", "3", "--no-adaptive"]
    result = foredraft("generate", "--model", tiny_model, *GREEDY, *flags, "--stats", "--json", path, PROMPT)
    assert result.status == 0, result.err
    assert json.loads(path.read_text())["acceptance_rate"] == 1.0
    assert "acceptance rate 100.0%" in result.err


def test_a_mixture_says_what_plain_decoding_says_and_explains_its_lengths(
    foredraft, tiny_model: Path, tmp_path: Path
) -> None:
    path, lines = tmp_path / "x.json", tmp_path / "lengths.txt"
    drafters = [{"method": "ngram", "prompt_lookup_min": 1}, {"method": "draft_model", "model": str(tiny_model)}]
    config = {
        "method": "mixture",
        "drafters": drafters,
        "num_speculative_tokens": 3,
        "explain_lengths": str(lines),
    }
    flags = ["--method", "mixture", "--speculative-config", json.dumps(config)]
    common = ("generate", "--model", tiny_model, *GREEDY, "--json", path)
    found = []
    for more in (["--no-speculation"], flags):
        assert foredraft(*common, *more, PROMPT).status == 0
        figures = json.loads(path.read_text())
        found.append(figures["results"][0]["outputs"][0]["token_ids"])
    assert found[0] == found[1]
    assert figures["drafter"] == f"ngram + {tiny_model}"
    assert "expected" in lines.read_text().splitlines()[0]


def test_the_right_prediction_is_accepted(foredraft, tiny_model: Path, tmp_path: Path) -> None:
    answer, path = tmp_path / "answer.txt", tmp_path / "x.json"
    vocab = json.loads((tiny_model / "tokenizer.json").read_text())["model"]["vocab"]
    letters = [part for letter in "abcdefgh" for part in ("--allowed-token-ids", vocab[letter])]
    common = ("generate", "--model", tiny_model, *GREEDY, *letters, "--json", path)
    plain = foredraft(*common, "--no-speculation", PROMPT)
    answer.write_text(plain.out.rstrip("\n"))
    drafted = foredraft(*common, "--method", "prediction", "--prediction-file", answer, PROMPT)
    assert drafted.status == 0, drafted.err
    assert drafted.out == plain.out
    assert set(drafted.out) <= set("abcdefgh\n")
    assert json.loads(path.read_text())["acceptance_rate"] == 1.0


def test_several_prompts_are_answered_in_order(foredraft, tiny_model: Path, tmp_path: Path) -> None:
    prompts, path = tmp_path / "prompts.jsonl", tmp_path / "x.json"
    texts = ["one", "a much longer second prompt", "three"]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    result = foredraft("generate", "--model", tiny_model, *GREEDY, "--prompt-file", prompts, "--json", path)
    assert result.status == 0, result.err
    together = json.loads(path.read_text())["results"]
    assert [each["prompt"] for each in together] == texts
    assert [line[:3] for line in result.out.splitlines() if line.startswith("[")][:1] == ["[1]"]
    for text, each in zip(texts, together, strict=True):
        assert foredraft("generate", "--model", tiny_model, *GREEDY, "--json", path, text).status == 0
        assert json.loads(path.read_text())["results"][0]["outputs"][0]["token_ids"] == each["outputs"][0]["token_ids"]


def test_json_on_stdout_is_all_of_stdout(foredraft, tiny_model: Path) -> None:
    result = foredraft("generate", "--model", tiny_model, *GREEDY, "--json", "-", PROMPT)
    assert json.loads(result.out)["new_tokens"] == 24


def test_stdin_is_a_prompt(foredraft, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = foredraft("generate", "--model", tiny_model, *GREEDY, PROMPT)
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    assert foredraft("generate", "--model", tiny_model, *GREEDY).out == given.out


def test_a_seed_repeats_and_stop_strings_end(foredraft, tiny_model: Path) -> None:
    flags = ("--model", tiny_model, "--temperature", "1", "--max-tokens", "24", "--ignore-eos", PROMPT)
    first, again = (foredraft("generate", "--seed", "7", *flags).out for _ in range(2))
    assert first == again
    assert foredraft("generate", "--seed", "8", *flags).out != first
    letter = next(char for char in first if char.isascii() and char.isalnum())
    stopped = foredraft("generate", "--seed", "7", "--stop", letter, *flags).out
    assert stopped == first[: first.index(letter)] + "\n"


def test_more_completions_and_logprobs(foredraft, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    flags = ["--n", 2, "--seed", 3, "--max-tokens", 6, "--ignore-eos", "--logprobs", 2, "--prompt-logprobs", 1]
    result = foredraft("generate", "--model", tiny_model, *flags, "--json", path, PROMPT)
    assert result.status == 0, result.err
    found = json.loads(path.read_text())["results"][0]
    assert [len(output["token_ids"]) for output in found["outputs"]] == [6, 6]
    assert found["outputs"][0]["token_ids"] != found["outputs"][1]["token_ids"]
    for output in found["outputs"]:
        for token, entry in zip(output["token_ids"], output["logprobs"], strict=True):
            assert str(token) in entry
            assert len(entry) in (2, 3)
    assert found["prompt_logprobs"][0] is None
    assert len(found["prompt_logprobs"]) == found["prompt_tokens"]


def test_constraints_hold(foredraft, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    flags = ["--max-tokens", 12, "--temperature", 0, "--json", path]
    choice = ["--structured-outputs", '{"choice": ["yes", "no"]}']
    result = foredraft("generate", "--model", tiny_model, *flags, *choice, PROMPT)
    assert result.status == 0, result.err
    assert result.out.strip() in ("yes", "no")
    result = foredraft("generate", "--model", tiny_model, *flags, "--logit-bias", '{"65": 100}', PROMPT)
    assert json.loads(path.read_text())["results"][0]["outputs"][0]["token_ids"] == [65] * 12


def test_interrupting_ends_with_130(tiny_model: Path) -> None:
    running = process("generate", "--model", tiny_model, "--ignore-eos", "--max-tokens", "4000", "hello")
    assert running.stdout is not None
    running.stdout.read(1)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "Traceback" not in err


def test_a_reader_that_goes_away_is_no_error(tiny_model: Path) -> None:
    running = process("generate", "--model", tiny_model, "--ignore-eos", "--max-tokens", "2000", "hello")
    assert running.stdout is not None
    running.stdout.read(1)
    running.stdout.close()
    assert running.stderr is not None
    err = running.stderr.read()
    assert running.wait(timeout=60) == 141
    assert err == ""


def test_help_and_refusals_do_not_wait_for_torch() -> None:
    for arguments, status in (
        (["--help"], 0),
        (["--version"], 0),
        (["generate", "--method", "nope", "hi"], 2),
    ):
        code = (
            "import sys; from foredraft.cli.command import run; from foredraft.cli.main import app\n"
            f"status = run(app, {arguments!r})\n"
            f"sys.exit(0 if status == {status} and 'torch' not in sys.modules else 1)"
        )
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
