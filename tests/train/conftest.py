"""A tiny target with a byte tokenizer, and what a training run needs of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.cli.conftest import save_byte_tokenizer
from tests.models.tiny import save_tiny


@pytest.fixture(scope="module", autouse=True)
def _one_thread(one_thread: None) -> None:
    """All tests of this directory."""


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    sizes = {"vocab_size": 258, "bos_token_id": 256, "eos_token_id": 257, "max_position_embeddings": 256}
    model = save_tiny(directory, "llama", initializer_range=0.5, tie_word_embeddings=False, **sizes)
    # Only its last token decides what it says, mostly one of 24 tokens: what a small drafter learns from little text.
    with torch.no_grad():
        model.lm_head.weight[24:] = 0
        model.lm_head.weight *= 1.5
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    model.save_pretrained(directory)
    save_byte_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("".join(f"number {index} of many\n" for index in range(140)))
    return path
