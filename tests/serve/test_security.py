"""What a model's files and a client's strings may not do. Keys, bodies and headers are in `test_errors`."""

from __future__ import annotations

import json
from pathlib import Path

import httpx2
import pytest
import torch
from tests.cli.conftest import save_byte_tokenizer
from tests.models.tiny import save_tiny
from tests.serve.scripted import MODEL, RunningServer, script

from foredraft.cli.command import run
from foredraft.cli.main import app


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
        "{{ messages.append.__self__.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['__builtins__']['open']('MARK', 'w') }}",
        "{% set x = messages.__init__.__globals__ %}{{ x.update }}",
        "{% for x in range(10000000000) %}x{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.system('touch MARK') }}",
        "{{ 1 / 0 }}",
        "{{ messages[9].content }}",
        "{{ '%s' | format }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_templates_run_sandboxed(tmp_path: Path, template: str) -> None:
    mark = tmp_path / "mark"
    path = tmp_path / "template"
    path.write_text(template.replace("MARK", str(mark)))
    with RunningServer({"chat_template": str(path)}) as server:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
        answer = httpx2.post(server.url + "/v1/chat/completions", json=body)
        assert answer.status_code == 400, answer.text
        assert "chat template" in answer.json()["error"]["message"]
        assert not mark.exists()
        body = {"model": MODEL, "prompt": script("fine")}
        assert httpx2.post(server.url + "/v1/completions", json=body).json()["choices"][0]["text"] == "fine"


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (open, (str(self.mark), "w"))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_pickles_that_run_code_are_refused(tmp_path: Path, capsys, family: str) -> None:
    ids = {"bos_token_id": 256, "eos_token_id": 257, "vocab_size": 258}
    if family == "llama":
        save_tiny(tmp_path, family, **ids)
        (tmp_path / "model.safetensors").unlink()
    else:
        sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "architectures": ["GPT2LMHeadModel"]}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes, **ids}))
    save_byte_tokenizer(tmp_path)
    mark = tmp_path / "mark"
    torch.save({"model.norm.weight": Bomb(mark), "lm_head.weight": Bomb(mark)}, tmp_path / "pytorch_model.bin")
    assert run(app, ["serve", "--model", str(tmp_path), "--device", "cpu", "--port", "0"]) == 2
    assert not mark.exists()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("foredraft: error")]
    assert str(tmp_path) in line
    torch.load(tmp_path / "pytorch_model.bin", weights_only=False)
    assert mark.exists()  # it would have gone off


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "..\\..\\secret", "scripted/../../etc/passwd", "\0"]
)
def test_a_model_name_is_no_path(served: RunningServer, name: str) -> None:
    bodies = {
        "/v1/completions": {"prompt": "x"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/v1/embeddings": {"input": "x"},
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [1]},
    }
    for path, body in bodies.items():
        answer = httpx2.post(served.url + path, json={"model": name, **body})
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
    escaped = "".join(f"%{byte:02x}" for byte in name.encode())
    answer = httpx2.get(f"{served.url}/v1/models/{escaped}")
    assert answer.status_code == 404
    assert "root:" not in answer.text
