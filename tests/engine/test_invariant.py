"""`invariant` without our CPU kernels: tokens in bfloat16 that depend neither on drafts nor on batch mates.

Run in a process of its own, since the kernels are switched off for the whole of one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.models.tiny import save_tiny

from foredraft import LLM, SpeculativeConfig
from foredraft.errors import ConfigError
from foredraft.models import native

SCRIPT = """
import sys
import torch
from foredraft import LLM, SpeculativeConfig
from foredraft.models import native
from foredraft.sampling.params import SamplingParams

assert not native.available()
torch.set_num_threads(1)
directory, draft, invariant = sys.argv[1], sys.argv[2], sys.argv[3] == "invariant"
llm = LLM(directory, dtype="bfloat16", skip_tokenizer_init=True, invariant=invariant, max_num_seqs=6,
          max_num_batched_tokens=64,
          speculative=SpeculativeConfig(model=draft, num_speculative_tokens=5, adaptive=False))
assert llm.is_row_invariant == invariant
prompts = [
    {"prompt_token_ids": [(seed * 7 + place * place) % 97 for place in range(3 + 5 * seed)]} for seed in range(12)
]
for params in (SamplingParams(temperature=0.0, max_tokens=60), SamplingParams(seed=3, max_tokens=60)):
    plain = [llm.generate(prompt, params, num_speculative_tokens=0)[0].outputs[0].token_ids for prompt in prompts]
    for gamma in (0, 2, 5):
        together = llm.generate(prompts, params, num_speculative_tokens=gamma)
        same = [output.outputs[0].token_ids for output in together] == plain
        print("same" if same else "different")
assert llm.stats.num_draft_tokens > 0

from foredraft.models.batch import ragged_batch

wide = LLM(directory, dtype="float32", skip_tokenizer_init=True, invariant=invariant)
bits = []
for size in (40, 1, 7):
    cache, rows = wide.model.new_cache(4, 16), []
    for start in range(0, 40, size):
        ids = list(range(start, min(start + size, 40)))
        batch = ragged_batch([ids], [start], [[0, 1, 2, 3]], [len(ids)], block_size=16, device=wide.model.device)
        rows.append(wide.model.forward(batch, cache).logits)
    bits.append(torch.cat(rows))
print("same" if torch.equal(bits[0], bits[1]) and torch.equal(bits[0], bits[2]) else "different")
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("invariant")
    save_tiny(path, "mistral", vocab_size=97, hidden_size=256, intermediate_size=384, max_position_embeddings=300)
    return path


def decisions(directory: Path, mode: str) -> list[str]:
    environment = {**os.environ, "FOREDRAFT_NATIVE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(directory), str(directory), mode],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_tokens_depend_on_nothing_but_the_request(directory: Path) -> None:
    assert decisions(directory, "invariant") == ["same"] * 7


def test_power_without_it_they_do(directory: Path) -> None:
    """Whether tokens differ is chance, on so small a model; that the logits' bits do is not."""
    assert decisions(directory, "plain")[-1] == "different"


@pytest.mark.skipif(not native.available(), reason=native.why_not)
def test_with_our_kernels_it_is_given_anyway(directory: Path) -> None:
    llm = LLM(str(directory), skip_tokenizer_init=True, invariant=True, speculative=SpeculativeConfig(tree_width=2))
    assert llm.is_row_invariant


def test_models_of_transformers_are_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=64)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="invariant: this model runs through transformers"):
        LLM(str(tmp_path), skip_tokenizer_init=True, invariant=True)
