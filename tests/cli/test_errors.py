"""What a user can do wrong: exit 2, one line that names the thing, no traceback. Bugs of ours: exit 70."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

COMMANDS = ("generate", "chat", "bench")


def assert_refused(result, *named: str) -> None:
    assert result.status == 2, result.err
    lines = result.err.strip().splitlines()
    assert len(lines) == 1, result.err
    assert lines[0].startswith("foredraft: error: ")
    assert "Traceback" not in result.err
    for name in named:
        assert name in result.err
    assert result.out == ""


def copied(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "model"))


@pytest.mark.parametrize("command", COMMANDS)
def test_missing_model_directory(foredraft, command: str) -> None:
    arguments = [command, "--model", "/no/such/model"]
    if command == "generate":
        arguments.append("hello")
    assert_refused(foredraft(*arguments), "/no/such/model")


def test_missing_config(foredraft, tiny_model: Path, tmp_path: Path) -> None:
    model = copied(tiny_model, tmp_path)
    (model / "config.json").unlink()
    assert_refused(foredraft("generate", "--model", model, "hello"), "config.json", str(model))


def test_broken_config(foredraft, tiny_model: Path, tmp_path: Path) -> None:
    model = copied(tiny_model, tmp_path)
    (model / "config.json").write_text("{")
    assert_refused(foredraft("generate", "--model", model, "hello"), "config.json")


def test_unknown_architecture(foredraft, tiny_model: Path, tmp_path: Path) -> None:
    model = copied(tiny_model, tmp_path)
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "sundial", "architectures": ["SundialForCausalLM"]}
    (model / "config.json").write_text(json.dumps(config))
    assert_refused(foredraft("generate", "--model", model, "hello"), "sundial", "architecture")


@pytest.mark.parametrize("kept", [0, 5, 1000])
def test_truncated_weights(foredraft, tiny_model: Path, tmp_path: Path, kept: int) -> None:
    weights = copied(tiny_model, tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    assert_refused(foredraft("generate", "--model", weights.parent, "hello"), "model.safetensors")


def test_unreadable_weights(foredraft, tiny_model: Path, tmp_path: Path) -> None:
    weights = copied(tiny_model, tmp_path) / "model.safetensors"
    weights.write_bytes(b"no tensors here, only prose, and rather a lot of it")
    assert_refused(foredraft("generate", "--model", weights.parent, "hello"), "model.safetensors")


def test_wrong_shapes(foredraft, tiny_model: Path, tmp_path: Path) -> None:
    weights = copied(tiny_model, tmp_path) / "model.safetensors"
    tensors = load_file(weights)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = torch.zeros(3, 4)
    save_file(tensors, weights, metadata={"format": "pt"})
    assert_refused(foredraft("generate", "--model", weights.parent, "hello"), name, "[3, 4]")


def test_prompt_longer_than_the_context(foredraft, tiny_model: Path) -> None:
    result = foredraft("generate", "--model", tiny_model, "--max-model-len", 64, "word " * 20)
    assert_refused(result, "100 tokens", "64")


def test_bench_prompt_longer_than_the_context(foredraft, tiny_model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("short\n" + "word " * 40 + "\n")
    result = foredraft("bench", "--model", tiny_model, "--max-model-len", 100, "--max-tokens", 8, "--prompts", prompts)
    assert_refused(result, "prompt 2", "100")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--num-speculative-tokens", "0"], "--num-speculative-tokens"),
        (["--speculative-draft-length", "-3"], "--speculative-draft-length"),
        (["--speculative-config", '{"num_speculative_tokens": 0}'], "num_speculative_tokens"),
        (["--speculative-config", '{"num_speculative_tokens": "five"}'], "num_speculative_tokens"),
        (["--method", "telepathy"], "telepathy"),
        (["--speculative-config", '{"method": "telepathy"}'], "telepathy"),
        (["--speculative-config", '{"draft_tensor_parallel_size": 1}'], "draft_tensor_parallel_size"),
        (["--speculative-config", "{"], "--speculative-config"),
        (["--speculative-config", "[]"], "--speculative-config"),
        (["--speculative-config", '{"model": 3}'], "model"),
        (["--speculative-config", "{}", "--method", "ngram"], "--method"),
        (["--speculative-config", '{"method": "mixture"}', "--method", "ngram"], "drafters"),
        (["--speculative-config", '{"method": "ngram"}', "--no-adaptive"], "--adaptive"),
        (["--speculative-config", '{"adaptive": 1}'], "adaptive"),
        (["--no-adaptive", "--explain-lengths", "-"], "explain_lengths"),
        (["--method", "mixture"], "drafters"),
        (["--speculative-config", '{"drafters": [{"method": "ngram"}]}'], "drafters"),
        (["--speculative-config", '{"method": "mixture", "drafters": 3}'], "drafters"),
        (["--speculative-config", '{"method": "mixture", "drafters": [{"method": "ngram"}]}'], "two"),
        (["--speculative-config", '{"method": "mixture", "drafters": [{}, {"gamma": 2}]}'], "gamma"),
        (["--speculative-config", '{"method": "mixture", "drafters": [{}, {"tree_width": 2}]}'], "tree_width"),
        (
            ["--speculative-config", '{"method": "mixture", "drafters": [{}, {"verification": "token"}]}'],
            "verification",
        ),
        (["--method", "draft_model"], "--speculative-model"),
        (["--method", "ngram", "--speculative-model", "somewhere"], "somewhere"),
        (["--prompt-lookup-min", "5"], "prompt_lookup_max"),
        (["--prompt-lookup-max", "3", "--method", "prediction"], "it is for method ngram"),
        (["--prompt-lookup-min", "2", "--speculative-model", "somewhere"], "method draft_model looks nothing up"),
        (["--prompt-lookup-min", "2", "--tree-width", "2", "--model", "demo"], "method block looks nothing up"),
        (
            [
                "--speculative-config",
                '{"method": "mixture", "drafters": [{"method": "ngram"}, {}], "prompt_lookup_max": 4}',
            ],
            "its ngram part",
        ),
        (["--speculative-config", '{"method": "ngram", "prompt_lookup_min": 0}'], "prompt_lookup_min"),
        (["--dtype", "float8"], "float8"),
        (["--device", "abacus"], "abacus"),
        (["--max-num-batched-tokens", "4"], "max_num_batched_tokens"),
        (["--model"], "--model"),
        (["--frobnicate"], "--frobnicate"),
    ],
)
def test_wrong_flags(foredraft, command: str, arguments: list[str], named: str) -> None:
    assert_refused(foredraft(command, *arguments), named)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--no-speculation", "--method", "ngram", "hi"], "--method"),
        (["--method", "prediction", "hi"], "prediction"),
        (["--prompt-file", "/no/such/file.jsonl"], "/no/such/file.jsonl"),
        (["--prompt-file", "/no/such/file.jsonl", "hi"], "--prompt-file"),
        (["--prediction-file", __file__, "hi"], "--method prediction"),
        (["--prediction-file", "/no/such/file", "hi"], "/no/such/file"),
        ([""], "empty"),
        (["--temperature", "-1", "hi"], "temperature"),
        (["--top-p", "1.5", "hi"], "top_p"),
        (["--max-tokens", "0", "hi"], "max-tokens"),
        (["--logprobs", "2", "hi"], "--json"),
        (["--logit-bias", "{", "hi"], "--logit-bias"),
        (["--logit-bias", '{"x": 1}', "hi"], "'x'"),
        (["--structured-outputs", '{"shape": 1}', "hi"], "shape"),
        (["--structured-outputs", "{}", "hi"], "structured_outputs"),
    ],
)
def test_wrong_flags_of_generate(foredraft, arguments: list[str], named: str) -> None:
    assert_refused(foredraft("generate", *arguments), named)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--batch", "64"], "--batch"),
        (["--rounds", "0"], "--rounds"),
        (["--prompts", "/no/such/file"], "/no/such/file"),
        (["--compare-transformers", "--temperature", "1"], "--compare-transformers"),
        (["--compare-transformers", "--batch", "2"], "--compare-transformers"),
        (["--method", "prediction"], "prediction"),
    ],
)
def test_wrong_flags_of_bench(foredraft, arguments: list[str], named: str) -> None:
    assert_refused(foredraft("bench", *arguments), named)


def test_a_json_file_that_cannot_be_written(foredraft, tiny_model: Path) -> None:
    result = foredraft("generate", "--model", tiny_model, "--max-tokens", 2, "--json", "/no/such/dir/x.json", "hi")
    assert result.status == 2
    assert "/no/such/dir/x.json" in result.err


def test_chat_without_a_template(foredraft, tiny_model: Path, tmp_path: Path) -> None:
    model = copied(tiny_model, tmp_path)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    assert_refused(foredraft("chat", "--model", model), "chat template")


def test_no_command_prints_help_and_exits_2(foredraft) -> None:
    result = foredraft()
    assert result.status == 2
    assert "generate" in result.out


def test_a_bug_of_ours_is_one_line_and_70(foredraft, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("deep\ninside")

    monkeypatch.setattr("foredraft.cli.flags.EngineFlags.config", broken)
    monkeypatch.delenv("FOREDRAFT_DEBUG", raising=False)
    result = foredraft("generate", "hello")
    assert result.status == 70
    assert result.err.count("\n") == 1
    assert "ZeroDivisionError: deep inside" in result.err
    assert "FOREDRAFT_DEBUG=1" in result.err
    monkeypatch.setenv("FOREDRAFT_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        foredraft("generate", "hello")
