"""`foredraft serve` as a process: flags, the configuration file, errors before the model loads, the drain."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2
import pytest
from tests.cli.conftest import CONTEXT, save_byte_tokenizer
from tests.models.tiny import save_tiny

from foredraft.cli.command import run
from foredraft.cli.main import app

COMMAND = "import sys; from foredraft.cli.main import main; sys.exit(main())"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    ids = {"bos_token_id": 256, "eos_token_id": 257}
    save_tiny(directory, "llama", vocab_size=258, max_position_embeddings=CONTEXT, **ids)
    save_byte_tokenizer(directory)
    return directory


class Process:
    """A running `foredraft serve` on a free port."""

    def __init__(self, *flags: object) -> None:
        arguments = [sys.executable, "-c", COMMAND, "serve", *map(str, flags), "--port", "0"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=environment)
        self.log = ""
        self.url = ""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line
            if found := re.search(r"serving .* on (http://\S+)", line):
                self.url = found[1]
                break
        threading.Thread(target=self._drain_log, daemon=True).start()

    def _drain_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line

    def wait_until_ready(self) -> None:
        assert self.url, self.log
        assert httpx2.get(self.url + "/health", timeout=60).status_code == 200


@pytest.fixture
def start():
    started: list[Process] = []

    def begin(*flags: object) -> Process:
        started.append(Process(*flags))
        started[-1].wait_until_ready()
        return started[-1]

    yield begin
    for each in started:
        each.process.kill()
        each.process.wait()


def test_sigterm_drains_and_exits_0(start, model: Path, tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(
        f"model: {model}\nserved-model-name: [from-file, other]\nmax_num_seqs: 4\nhost: 127.0.0.1\n"
        "speculative-config: {method: ngram, num_speculative_tokens: 3, adaptive: false}\n"
    )
    server = start("--config", config, "--served-model-name", "named", "--device", "cpu", "--dtype", "float32")
    assert [each["id"] for each in httpx2.get(server.url + "/v1/models").json()["data"]] == ["named"]
    assert "Using speculative decoding with draft model: ngram, draft length: 3" in server.log
    body = {"model": "named", "prompt": "abc", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx2.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        statuses, last = [], ""
        for line in lines:
            if line and 503 not in statuses:
                statuses.append(httpx2.get(server.url + "/health", timeout=60).status_code)
            last = line or last
        assert 503 in statuses
        assert last == "data: [DONE]"
    assert server.process.wait(timeout=30) == 0
    assert "Traceback" not in server.log


def wait_for(server: Process, pattern: str, seconds: float = 60.0) -> re.Match[str]:
    """The first match in the server's log."""
    deadline = time.monotonic() + seconds
    while (found := re.search(pattern, server.log)) is None:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.05)
    return found


@pytest.mark.slow
def test_without_flags_it_serves_the_demo_model_with_its_drafter(start) -> None:
    server = start()
    wait_for(server, r"Using speculative decoding with draft model: foredraft-smollm2-\S+ \+ ngram, draft length: 5\n")
    body = {
        "messages": [{"role": "user", "content": "Count from one to forty, in digits."}],
        "temperature": 0,
        "max_tokens": 80,
    }
    answer = httpx2.post(server.url + "/v1/chat/completions", json=body, timeout=120).json()
    assert answer["model"] == "demo"
    assert answer["choices"][0]["message"]["content"].strip()
    usage = answer["usage"]
    assert usage["total_time"] > 0
    speculation = usage["speculation"]
    assert 0 <= speculation["accepted_tokens"] <= speculation["draft_tokens"] > 0
    assert speculation["acceptance_rate"] == speculation["accepted_tokens"] / speculation["draft_tokens"]
    # The first token comes with the prompt, which no draft goes before.
    assert speculation["mean_acceptance_length"] == (usage["completion_tokens"] - 1) / speculation["steps"]
    wait_for(
        server,
        r"running 0, waiting 0, [\d.]+ tokens/s, acceptance rate [\d.]+%, mean acceptance length [\d.]+, "
        r"chosen γ [\d.]+\n",
    )
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=60) == 0
    assert "Traceback" not in server.log


def refused(capsys: pytest.CaptureFixture[str], *flags: object) -> str:
    capsys.readouterr()
    assert run(app, ["serve", *map(str, flags)]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_a_port_in_use(capsys) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in refused(capsys, "--model", "/no/such/model", "--port", port)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--port", "70000"], "--port"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
        (["--guard", "nonsense"], "--guard"),
        (["--guard-keywords", "/no/such/file"], "/no/such/file"),
        (["--config", "/no/such/file"], "/no/such/file"),
        (["--tool-call-parser", "telepathy"], "telepathy"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout"),
        (["--no-speculation", "--method", "ngram"], "--method"),
        (["a-model", "--model", "another"], "another"),
        (["--api-key", ""], "api_key"),
        (["--method", "telepathy"], "telepathy"),
        (["--seed", str(2**64)], "seed"),
        (["--gpu-memory-utilization", "1.5"], "gpu_memory_utilization: 1.5"),
        (["--gpu-memory-utilization", "0"], "gpu_memory_utilization: 0.0"),
        (["--gpu-memory-utilization", "0.9", "--device", "cpu"], "--kv-cache-memory"),
        (["--gpu-memory-utilization", "0.9", "--kv-cache-memory", "1000000"], "contradicts kv_cache_memory"),
        (["--quantization", "awq"], "'awq' is not supported; leave it out and give an unquantised model, or a .gguf"),
        (["-tp", "2"], "tensor_parallel_size: 2 devices were asked for, but the engine runs on one"),
        (["--tensor-parallel-size", "0"], "tensor_parallel_size"),
    ],
)
def test_wrong_flags_are_refused_before_the_model_loads(
    capsys, monkeypatch: pytest.MonkeyPatch, flags: list[str], named: str
) -> None:
    monkeypatch.setattr("foredraft.cli.serve.loaded_llm", None)
    assert named in refused(capsys, *flags)


def test_a_model_that_is_not_there(capsys) -> None:
    assert "/no/such/model" in refused(capsys, "--model", "/no/such/model", "--port", "0")


def test_an_unknown_tool_call_parser_names_the_known_ones(capsys) -> None:
    line = refused(capsys, "--tool-call-parser", "telepathy")
    assert "'hermes', 'llama3_json'" in line


def test_a_share_of_gpu_memory_without_a_gpu(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    line = refused(capsys, "--model", "/no/such/model", "--port", "0", "--gpu-memory-utilization", "0.9")
    assert "--kv-cache-memory" in line  # told before the model is looked for


@pytest.mark.parametrize(
    ("text", "named"),
    [("frobnicate: 1", "frobnicate"), ("- a\n- b", "names and values"), ("a: [", "YAML"), ("port: many", "port")],
)
def test_wrong_configuration_files(capsys, tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    assert named in refused(capsys, "--config", path)


def test_tool_calls_that_cannot_be_read(start, capsys, model: Path) -> None:
    flags = ["--model", model, "--device", "cpu", "--enable-auto-tool-choice"]
    line = refused(capsys, *flags, "--port", "0")
    assert "--tool-call-parser (hermes, llama3_json)" in line
    server = start(*flags, "--tool-call-parser", "hermes", "--tensor-parallel-size", 1)
    assert server.process.poll() is None


def test_a_seed_for_requests_that_give_none(start, model: Path) -> None:
    server = start("--model", model, "--device", "cpu", "--dtype", "float32", "--seed", 7)

    def text(path: str, **fields: object) -> str:
        body = {"prompt": "abc", "max_tokens": 20, "ignore_eos": True, **fields}
        choice = httpx2.post(server.url + path, json=body, timeout=60).json()["choices"][0]
        return choice["text"] if path.endswith("v1/completions") else choice["message"]["content"]

    assert text("/v1/completions") == text("/v1/completions", seed=7) != text("/v1/completions", seed=8)
    chat = {"messages": [{"role": "user", "content": "x"}]}
    answers = [text("/v1/chat/completions", **chat, **seed) for seed in ({}, {"seed": 7}, {"seed": 8})]
    assert answers[0] == answers[1] != answers[2]


def test_a_template_that_cannot_be_read(capsys, model: Path) -> None:
    line = refused(capsys, "--model", model, "--device", "cpu", "--port", "0", "--chat-template", "/no/such/file")
    assert "/no/such/file" in line
