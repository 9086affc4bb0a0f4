"""Rotary tables against transformers' own computation, and against formulas worked here."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from foredraft.errors import ModelError
from foredraft.models.rope import rope_from_hf, rope_tables

KINDS = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.707,
        "mscale_all_dim": 1.2,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    "yarn untruncated": {
        "rope_type": "yarn",
        "factor": 3.0,
        "original_max_position_embeddings": 48,
        "attention_factor": 0.8,
        "truncate": False,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
}


def reference(params: dict, positions: torch.Tensor, **config) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' cos and sin, first halves (its tables hold every frequency twice)."""
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=16,
        rope_parameters={"rope_theta": 10000.0, **params},
        **config,
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    return cos[0, :, :8], sin[0, :, :8]


def ours(params: dict, length: int, max_position: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    rope = rope_from_hf({"rope_parameters": params}, head_dim=16, max_position=max_position, where="config.json")
    return rope_tables(rope, length)


@pytest.mark.parametrize("kind", KINDS)
def test_tables_equal_transformers_within_the_trained_length(kind):
    want = reference(KINDS[kind], torch.arange(64), max_position_embeddings=64)
    for got, expected in zip(ours(KINDS[kind], 64), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


def test_older_spelling_means_the_same():
    raw = {
        "rope_theta": 500_000.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_parameters": None,
    }
    old = rope_from_hf(raw, head_dim=16, max_position=64, where="")
    new = rope_from_hf(
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500_000.0}},
        head_dim=16,
        max_position=64,
        where="",
    )
    assert old == new
    assert old.max_model_len == 128


def test_dynamic_rotates_each_position_as_transformers_does_token_by_token():
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=16,
        max_position_embeddings=20,
        rope_parameters={"rope_theta": 10000.0, **KINDS["dynamic"]},
    )
    module = LlamaRotaryEmbedding(config)
    cos, sin = ours(KINDS["dynamic"], 60, max_position=20)
    for position in range(60):
        want_cos, want_sin = module(torch.zeros(1), torch.tensor([[position]]))
        torch.testing.assert_close(cos[position], want_cos[0, 0, :8], rtol=0, atol=1e-5)
        torch.testing.assert_close(sin[position], want_sin[0, 0, :8], rtol=0, atol=1e-5)


def test_partial_rotation_spreads_the_wavelengths_over_the_rotated_part():
    rope = rope_from_hf({"partial_rotary_factor": 0.25}, head_dim=16, max_position=8, where="")
    cos, _ = rope_tables(rope, 8)
    assert rope.rotary_dim == 4
    want = [[math.cos(p), math.cos(p / 100)] for p in range(8)]  # theta ** (2 / 4) = 100
    torch.testing.assert_close(cos, torch.tensor(want), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "'su' is not supported; known: default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "needs factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "8"}}, "got '8'"),
        ({"rope_scaling": 8}, "rope_scaling is 8, not an object"),
        ({"partial_rotary_factor": 0.3}, "an even number"),
        ({"partial_rotary_factor": 2}, "an even number"),
        ({"rope_parameters": {"full_attention": {}}}, "per layer type"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(raw, message):
    with pytest.raises(ModelError, match="config.json.*" + message):
        rope_from_hf(raw, head_dim=10, max_position=64, where="config.json")
