"""Makes models for tests: tiny random ones of every family, and real ones cut from the demo model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from foredraft.models.batch import ForwardBatch, ragged_batch
from foredraft.models.decoder import ForwardOutput, TargetModel
from foredraft.models.demo import demo_path
from foredraft.models.gguf import open_gguf
from foredraft.models.gguf_file import GGUFFile
from foredraft.models.gguf_tokenizer import tokenizer_from_gguf
from foredraft.models.weights import expected_shapes

ODD = {
    "vocab_size": 101,
    "hidden_size": 36,
    "intermediate_size": 53,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 96,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes of which none is a power of two and heads do not add up to the hidden size."""


def save_tiny(directory: Path, family: str, seed: int = 0, **overrides: Any) -> Any:
    """Saves a random model of `family` (a `model_type`) as a directory and returns transformers' model.

    Biases and norms are random too, so that leaving one out shows.
    """
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **{**ODD, **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    return model


def save_demo_layers(directory: Path, num_layers: int) -> Path:
    """Saves the demo model's first `num_layers` layers, with its norm, head and tokenizer, as a directory."""
    from safetensors.torch import save_file

    file = GGUFFile(demo_path())
    config, weights = open_gguf(file)
    directory.mkdir(parents=True, exist_ok=True)
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_model_len,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": True,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(raw))
    kept = [
        name
        for name in expected_shapes(config)
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < num_layers
    ]
    save_file(
        {name: weights.read(name, torch.float32) for name in kept},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    tokenizer = tokenizer_from_gguf(file)
    tokenizer.backend.save(str(directory / "tokenizer.json"))
    settings = {
        **tokenizer.special_tokens,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": tokenizer.chat_template,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


class Session:
    """Runs a model over requests that keep their KV cache, whose blocks are handed out in scrambled order."""

    def __init__(self, model: TargetModel, num_blocks: int = 40, block_size: int = 5) -> None:
        self.model = model
        self.cache = model.new_cache(num_blocks, block_size)
        self.block_size = block_size
        generator = torch.Generator().manual_seed(3)
        self.free = torch.randperm(num_blocks, generator=generator).tolist()
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    def batch(self, chunks: dict[str, Sequence[int]]) -> ForwardBatch:
        """The batch that appends each chunk to its request, with logits of every token."""
        starts = []
        for name, ids in chunks.items():
            start = self.lengths.get(name, 0)
            table = self.tables.setdefault(name, [])
            while len(table) * self.block_size < start + len(ids):
                table.append(self.free.pop())
            starts.append(start)
            self.lengths[name] = start + len(ids)
        return ragged_batch(
            [list(ids) for ids in chunks.values()],
            starts,
            [self.tables[name] for name in chunks],
            [len(ids) for ids in chunks.values()],
            block_size=self.block_size,
            device=self.model.device,
        )

    def run(self, chunks: dict[str, Sequence[int]], feature_layers: Sequence[int] = ()) -> ForwardOutput:
        return self.model.forward(self.batch(chunks), self.cache, feature_layers)

    def logits(self, ids: Sequence[int], chunk: int, name: str = "a") -> Tensor:
        """Logits [len(ids), V] of one request that is fed in chunks of `chunk` tokens."""
        parts = [self.run({name: ids[at : at + chunk]}).logits for at in range(0, len(ids), chunk)]
        return torch.cat(parts)
