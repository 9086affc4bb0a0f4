"""The server among many clients, some of which leave, dawdle or mean harm: a short run of `bench.load`."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench import load
from tests.cli.conftest import CONTEXT, save_byte_tokenizer
from tests.models.tiny import save_tiny


@pytest.mark.slow
def test_a_crowd_gets_right_answers_and_leaves_nothing_behind(tmp_path: Path) -> None:
    ids = {"bos_token_id": 256, "eos_token_id": 257}
    save_tiny(tmp_path, "llama", vocab_size=258, max_position_embeddings=CONTEXT, **ids)
    save_byte_tokenizer(tmp_path)
    flags = ["--model", str(tmp_path), "--device", "cpu", "--dtype", "float32", "--kv-cache-memory", "1500000"]
    report = load.run(flags, seconds=12, warm_up=4, clients=64)
    assert report.faults == []
    assert report.outcomes["right"] > 0
    assert report.outcomes["left"] > 0
    assert report.outcomes["right, read slowly"] > 0
    assert report.outcomes["attacks"] > 0
    assert report.memory_growth < 0.1
    assert report.blocks_in_use_at_end == 0
    assert report.finished_while_draining == 16
    assert report.exit_status == 0
