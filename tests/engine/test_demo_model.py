"""The demo model in earnest: token for token what transformers' greedy `generate` gives, with and without drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.models.tiny import save_demo_layers

from foredraft import LLM, SpeculativeConfig
from foredraft.models.demo import demo_path
from foredraft.sampling.params import SamplingParams

pytestmark = pytest.mark.slow

NUM_TOKENS = 96
TOPICS = [
    "the sea",
    "a small red fox",
    "prime numbers",
    "how bread is baked",
    "an old clock",
    "the moon landing",
    "sorting a list in Python",
    "a letter to a friend",
    "tomatoes",
    "a haunted library",
]
FORMS = [
    "Write three sentences about {}.",
    "Once upon a time there was a story about {}. It began",
    "List five facts about {}:\n1.",
    "def describe():\n    # prints a text about {}\n    print(",
]
MORE_FORMS = [
    "What is {}?",
    "Repeat the words {} ten times:",
    "Here is a poem on {}.\n\n",
    "Dear editor, I write to you about {}",
    "{}: a dictionary entry",
    "Q: Tell me about {}.\nA:",
]
PROMPTS = [form.format(topic) for topic in TOPICS for form in FORMS]
HUNDRED = [form.format(topic) for topic in TOPICS for form in FORMS + MORE_FORMS]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """transformers' own greedy output for each prompt, prompts of one length together, so that nothing is padded."""
    from transformers import AutoModelForCausalLM

    path = demo_path()
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # every prompt gives its full 96 tokens
    tokenizer = LLM("demo", dtype="float32", max_num_seqs=1, max_model_len=64).tokenizer
    groups: dict[int, list[str]] = {}
    for prompt in PROMPTS:
        groups.setdefault(len(tokenizer.encode(prompt)), []).append(prompt)
    outputs: dict[str, list[int]] = {}
    for length, prompts in groups.items():
        ids = torch.tensor([tokenizer.encode(prompt) for prompt in prompts])
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False)
        outputs.update(zip(prompts, tokens[:, length:].tolist(), strict=True))
    return outputs


@pytest.fixture(scope="module")
def draft_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_demo_layers(tmp_path_factory.mktemp("draft"), 4)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_float32_is_token_identical_to_transformers(
    method: str, expected: dict[str, list[int]], draft_directory: Path
) -> None:
    speculative = SpeculativeConfig(
        method=method,
        model=str(draft_directory) if method == "draft_model" else None,
        num_speculative_tokens=8,
        adaptive=False,
    )
    llm = LLM("demo", dtype="float32", max_model_len=256, max_num_seqs=20, speculative=speculative)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for gamma in (0, 1, 3, 5, 8):
        llm.reset_stats()
        outputs = llm.generate(PROMPTS, params, num_speculative_tokens=gamma)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert output.outputs[0].token_ids == expected[prompt], (gamma, prompt)
        assert (llm.stats.num_draft_tokens > 0) == (gamma > 0)
        assert (llm.stats.num_accepted_tokens > 0) == (gamma > 0)


def test_bfloat16_is_identical_over_a_hundred_prompts() -> None:
    """The CPU kernels give a row the same bits in any company, so bfloat16 keeps to plain decoding's tokens too."""
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=4, adaptive=False)
    llm = LLM("demo", max_model_len=256, max_num_seqs=25, invariant=True, speculative=speculative)
    params = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
    plain = llm.generate(HUNDRED, params, num_speculative_tokens=0)
    drafted = llm.generate(HUNDRED, params)
    for prompt, one, other in zip(HUNDRED, plain, drafted, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids, prompt
    assert llm.stats.num_draft_tokens > 0


def test_bfloat16_is_identical_with_any_drafts_and_batch_mates(draft_directory: Path) -> None:
    speculative = SpeculativeConfig(model=str(draft_directory), num_speculative_tokens=7, adaptive=False)
    llm = LLM("demo", dtype="bfloat16", max_model_len=256, max_num_seqs=10, speculative=speculative)
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    plain = [llm.generate(prompt, params, num_speculative_tokens=0)[0].outputs[0].token_ids for prompt in PROMPTS[:8]]
    for gamma in (0, 3, 7):
        together = llm.generate(PROMPTS[:8], params, num_speculative_tokens=gamma)
        assert [output.outputs[0].token_ids for output in together] == plain
