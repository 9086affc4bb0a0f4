"""The drafter that comes with the package: it loads, it is small, and it reaches what its card says."""

from __future__ import annotations

import json

import pytest
from bench.demo_drafter.prompts import prompts

from foredraft import LLM, SamplingParams, SpeculativeConfig
from foredraft.config import DEMO_DRAFTS, EngineConfig
from foredraft.draft.block_model import load_block_model
from foredraft.draft.shipped import shipped_drafter

MOST_BYTES = 20_000_000


def test_it_is_small_and_has_a_card() -> None:
    directory = shipped_drafter()
    assert sum(path.stat().st_size for path in directory.iterdir()) <= MOST_BYTES
    card = (directory / "README.md").read_text(encoding="utf-8")
    for part in ("Data", "Command", "Figures", "Licence"):
        assert f"## {part}" in card
    config = load_block_model(directory).config
    assert config.corrector == "chain"
    assert config.num_draft_tokens == 7


@pytest.mark.slow
def test_it_reaches_its_stated_length_and_changes_nothing() -> None:
    """On prompts of the same kinds that it was not trained on, within four standard errors of what its card says."""
    stated = json.loads((shipped_drafter() / "figures.json").read_text())["engine"]["greedy"]["mean_acceptance_length"]
    known = set(prompts(4000))
    fresh = [prompt for prompt in prompts(400, seed=99) if prompt not in known][:12]
    llm = LLM("demo", speculative=SpeculativeConfig("block", num_speculative_tokens=7, adaptive=False))
    params = SamplingParams(max_tokens=64, temperature=0.0)
    conversations = [[{"role": "user", "content": prompt}] for prompt in fresh]
    drafted = llm.chat(conversations, params)
    plain = llm.chat(conversations, params, num_speculative_tokens=0)
    assert [each.outputs[0].token_ids for each in drafted] == [each.outputs[0].token_ids for each in plain]
    lengths = [each.stats.mean_acceptance_length for each in drafted]
    mean = sum(lengths) / len(lengths)
    error = (sum((each - mean) ** 2 for each in lengths) / (len(lengths) - 1) / len(lengths)) ** 0.5
    assert abs(mean - stated) < 4 * error + 0.1
    assert llm.drafter_name == shipped_drafter().name


def test_the_demo_drafts_with_it_by_default() -> None:
    config = EngineConfig("demo", speculative=SpeculativeConfig()).speculative
    assert config is not None
    assert config.methods == ("block", "ngram")
    assert load_block_model(shipped_drafter()).config.num_draft_tokens == DEMO_DRAFTS
