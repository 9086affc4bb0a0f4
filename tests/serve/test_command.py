"""`foredraft serve` as a process: flags, the configuration file, errors before the model loads, the drain."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
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
        (["--model", "/no/such/model", "--port", "0"], "/no/such/model"),
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
    ],
)
def test_wrong_flags(capsys, flags: list[str], named: str) -> None:
    assert named in refused(capsys, *flags)


@pytest.mark.parametrize(
    ("text", "named"),
    [("frobnicate: 1", "frobnicate"), ("- a\n- b", "names and values"), ("a: [", "YAML"), ("port: many", "port")],
)
def test_wrong_configuration_files(capsys, tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    assert named in refused(capsys, "--config", path)


def test_a_template_that_cannot_be_read(capsys, model: Path) -> None:
    line = refused(capsys, "--model", model, "--device", "cpu", "--port", "0", "--chat-template", "/no/such/file")
    assert "/no/such/file" in line
