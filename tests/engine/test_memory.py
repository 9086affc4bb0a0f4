"""The KV cache's size: as told, or what is left of a share of the device."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch
from tests.models.tiny import save_tiny

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.engine.llm import LLM
from foredraft.engine.memory import MIB, cache_bytes, largest_batch, left_for_cache
from foredraft.errors import ConfigError
from foredraft.models.load import load_model


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    save_tiny(tmp_path, "llama", max_position_embeddings=64)
    return EngineConfig(
        str(tmp_path),
        dtype="float32",
        device="cpu",
        skip_tokenizer_init=True,
        max_num_seqs=7,
        max_num_batched_tokens=100,
        speculative=SpeculativeConfig("ngram", num_speculative_tokens=4),
    )


def test_what_a_share_leaves() -> None:
    assert left_for_cache(0.5, total=1000 * MIB, others=100 * MIB, peak=150 * MIB) == 250 * MIB
    with pytest.raises(ConfigError, match=r"0.2 of the device's 1000 MiB .* take 150 MiB, and others 100 MiB"):
        left_for_cache(0.2, total=1000 * MIB, others=100 * MIB, peak=150 * MIB)


def test_the_largest_forward_is_one_that_runs(config: EngineConfig) -> None:
    model = load_model(config).model
    batch, num_blocks = largest_batch(model, config)
    assert len(batch.input_ids) == 100
    assert len(batch.seq_lens) == 7
    assert len(batch.logits_indices) == 7 * 5
    assert len(set(batch.slot_mapping.tolist())) == 100  # no token writes where another does
    output = model.forward(batch, model.new_cache(num_blocks, config.block_size))
    assert output.logits.shape == (35, model.config.vocab_size)
    assert bool(output.logits.isfinite().all())


def test_told_sizes_and_the_default(config: EngineConfig) -> None:
    model = load_model(config).model
    told = EngineConfig("x", device="cpu", kv_cache_memory=12345)
    assert cache_bytes(told, [model]) == 12345
    free = psutil.virtual_memory().available
    assert cache_bytes(config, [model]) == pytest.approx(free / 4, rel=0.2)


def test_memory_that_holds_no_block_is_refused(config: EngineConfig) -> None:
    options = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True}
    with pytest.raises(ConfigError, match=r"kv_cache_memory: 100 bytes hold no block of 16 tokens, .* raise it"):
        LLM(config.model, kv_cache_memory=100, **options)


@pytest.mark.cuda
def test_a_share_of_a_gpu_is_kept_to(config: EngineConfig) -> None:
    share, total = 0.5, torch.cuda.mem_get_info()[1]
    model = load_model(EngineConfig(config.model, device="cuda", skip_tokenizer_init=True)).model
    asked = EngineConfig(config.model, device="cuda", skip_tokenizer_init=True, gpu_memory_utilization=share)
    found = cache_bytes(asked, [model])
    assert 0 < found < share * total
    free = torch.cuda.mem_get_info()[0]
    assert found <= share * total - (total - free) + torch.cuda.memory_reserved()
