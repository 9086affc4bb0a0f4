"""A tiny random model with a byte tokenizer and a chat template, as a directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.models.tiny import save_tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from foredraft.cli.command import run
from foredraft.cli.main import app

CONTEXT = 4096
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_byte_tokenizer(directory: Path, chat_template: str | None = TEMPLATE) -> None:
    """A tokenizer of one token per byte (ids 0 to 255) and an end of text (257)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module", autouse=True)
def _one_thread(one_thread: None) -> None:
    """All tests of this directory."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny(
        directory,
        "llama",
        vocab_size=258,
        bos_token_id=256,
        eos_token_id=257,
        max_position_embeddings=CONTEXT,
    )
    save_byte_tokenizer(directory)
    return directory


class Result:
    """What a command printed, and its exit status."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err


@pytest.fixture
def foredraft(capsys: pytest.CaptureFixture[str]):
    """Runs the command line in this process, as the entry point does."""

    def call(*arguments: object) -> Result:
        capsys.readouterr()
        status = run(app, [str(argument) for argument in arguments])
        return Result(status, *capsys.readouterr())

    return call
