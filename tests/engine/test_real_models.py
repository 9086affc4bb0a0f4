"""The engine on small real networks: rollback, draft models, log-probabilities, structured output, n and best_of."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from tests.cli.conftest import save_byte_tokenizer
from tests.models.tiny import save_tiny

from foredraft import LLM, SpeculativeConfig
from foredraft.errors import DrafterError, RequestError
from foredraft.models.batch import ragged_batch
from foredraft.sampling.params import SamplingParams, StructuredOutputs

VOCAB = 258
PROMPTS = [[5, 9, 5, 9, 5, 9, 7], [1, 2, 3], list(range(20, 55)), [200]]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    for path, seed in ((target, 0), (draft, 1)):
        save_tiny(
            path, "llama", seed, vocab_size=VOCAB, eos_token_id=257, bos_token_id=256, max_position_embeddings=128
        )
        save_byte_tokenizer(path)
    return target, draft


def engine_on(directories: tuple[Path, Path], method: str | None, **options) -> LLM:
    speculative = None
    if method is not None:
        kind, _, width = method.partition("/")
        draft = {"draft_model": str(directories[1]), "self": str(directories[0])}.get(kind)
        speculative = SpeculativeConfig(
            method="ngram" if draft is None else "draft_model",
            model=draft,
            num_speculative_tokens=6,
            prompt_lookup_min=1 if draft is None else None,
            tree_width=int(width or 1),
            adaptive=False,
        )
    return LLM(str(directories[0]), dtype="float32", max_model_len=128, speculative=speculative, **options)


METHODS = ["ngram", "draft_model", "self", "ngram/3", "draft_model/2"]


def token_ids(outputs) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


@pytest.mark.parametrize("method", METHODS)
def test_after_any_mix_of_rejections_the_cache_is_one_built_from_scratch(directories, method: str) -> None:
    llm = engine_on(directories, method, max_num_seqs=4)
    params = SamplingParams(temperature=1.0, max_tokens=60, seed=3, ignore_eos=True)
    assembled = [llm._factory.assemble({"prompt_token_ids": ids}, params, None, "token") for ids in PROMPTS]
    for each in assembled:
        llm.engine.add(each.requests[0])
    rejected = 0
    for _ in range(25):
        llm.engine.step()
        for each in assembled:
            request = each.requests[0]
            if request.finished:
                continue
            rejected += request.stats.num_draft_tokens - request.stats.num_accepted_tokens
            count, block = request.num_computed_tokens, llm.engine.cache.block_size
            ids = request.token_ids[:count]
            fresh = llm.model.new_cache(-(-count // block), block)
            table = list(range(-(-count // block)))
            llm.model.forward(ragged_batch([ids], [0], [table], [0], block_size=block, device=llm.model.device), fresh)
            slots = torch.tensor([request.block_table[p // block] * block + p % block for p in range(count)])
            for layer in range(llm.model.config.num_layers):
                for kept, right in zip(
                    llm.engine.cache.read(layer, slots), fresh.read(layer, torch.arange(count)), strict=True
                ):
                    assert torch.equal(kept, right) if llm.is_row_invariant else torch.allclose(kept, right, atol=1e-4)
    assert (rejected > 0) == (method != "self")  # a target that drafts for itself is never rejected


@pytest.mark.parametrize("method", METHODS)
def test_greedy_and_seeded_tokens_do_not_depend_on_drafts(directories, method: str) -> None:
    plain, drafted = engine_on(directories, None), engine_on(directories, method)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    for params in (
        SamplingParams(temperature=0.0, max_tokens=50),
        SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=50, repetition_penalty=1.1),
        SamplingParams(temperature=1.5, seed=8, max_tokens=50, frequency_penalty=0.5, logit_bias={5: 4.0}),
    ):
        expected = token_ids(plain.generate(prompts, params))
        outputs = drafted.generate(prompts, params)
        assert token_ids(outputs) == expected
        assert drafted.stats.num_draft_tokens > 0


def test_fifty_seeds_give_the_same_tokens_in_six_settings(directories) -> None:
    prompts = [{"prompt_token_ids": PROMPTS[seed % 4]} for seed in range(50)]
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=20) for seed in range(50)]
    plain = engine_on(directories, None, max_num_seqs=8)
    expected = [
        plain.generate(prompt, each)[0].outputs[0].token_ids for prompt, each in zip(prompts, params, strict=True)
    ]
    assert token_ids(plain.generate(prompts, params)) == expected
    for method, gamma in (("ngram", 3), ("draft_model", 5), ("draft_model/2", 6)):
        llm = engine_on(directories, method, max_num_seqs=8)
        assert token_ids(llm.generate(prompts, params, num_speculative_tokens=gamma)) == expected
        assert llm.stats.num_draft_tokens > 0
    alone = engine_on(directories, "draft_model")
    for prompt, each, tokens in zip(prompts, params, expected, strict=True):
        assert alone.generate(prompt, each)[0].outputs[0].token_ids == tokens


def test_a_draft_model_that_is_the_target_is_always_accepted(directories) -> None:
    """What separates a broken path from a bad drafter: drafting for itself the target accepts everything."""
    llm = engine_on(directories, "self")
    for temperature, rule in ((0.0, "token"), (1.0, "token"), (1.0, "block"), (1.0, "coupled")):
        llm.reset_stats()
        params = SamplingParams(temperature=temperature, max_tokens=1 + 7 * 4, seed=1, ignore_eos=True)
        llm.generate({"prompt_token_ids": PROMPTS[2]}, params, verification=rule)
        assert llm.stats.num_draft_tokens > 0
        assert llm.stats.acceptance_rate == 1.0
        assert llm.stats.mean_acceptance_length == 7.0


def test_acceptance_after_a_parked_stretch_is_that_of_a_fresh_drafter(directories) -> None:
    """A drafter whose cache misses the tokens of steps without drafts would rot; output alone would not show it."""
    llm = engine_on(directories, "self")
    params = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
    request = llm._factory.assemble({"prompt_token_ids": PROMPTS[0]}, params, None).requests[0]
    llm.engine.add(request)
    for step in range(60):
        request.max_draft_tokens = 0 if 3 <= step < 30 else 6
        if request.finished:
            break
        llm.engine.step()
    assert request.stats.num_draft_tokens > 20
    assert request.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("method", METHODS)
def test_logprobs_are_the_same_with_and_without_drafts(directories, method: str) -> None:
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=40, logprobs=5, prompt_logprobs=3, top_k=20)
    plain = engine_on(directories, None).generate(prompts, params)
    drafted = engine_on(directories, method, max_num_batched_tokens=64, max_num_seqs=3).generate(prompts, params)
    for one, other in zip(plain, drafted, strict=True):
        left, right = one.outputs[0], other.outputs[0]
        assert left.token_ids == right.token_ids
        assert len(left.logprobs) == len(left.token_ids)
        assert other.prompt_logprobs[0] is None
        assert len(other.prompt_logprobs) == len(one.prompt_token_ids)
        for a, b in zip(
            left.logprobs + one.prompt_logprobs[1:], right.logprobs + other.prompt_logprobs[1:], strict=True
        ):
            assert a.keys() == b.keys()
            for token in a:
                assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-5)
                assert a[token].rank == b[token].rank
        assert left.cumulative_logprob == pytest.approx(
            sum(entry[token].logprob for entry, token in zip(left.logprobs, left.token_ids, strict=True))
        )


def test_prompt_logprobs_are_those_of_one_forward(directories) -> None:
    llm = engine_on(directories, "ngram", max_num_batched_tokens=32, max_num_seqs=1)
    ids = PROMPTS[2]
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0)
    (output,) = llm.generate({"prompt_token_ids": ids}, params)
    cache = llm.model.new_cache(3, 16)
    batch = ragged_batch([ids], [0], [[0, 1, 2]], [len(ids)], block_size=16, device=llm.model.device)
    logprobs = llm.model.forward(batch, cache).logits.double().log_softmax(-1)
    for position, entry in enumerate(output.prompt_logprobs[1:]):
        assert entry[ids[position + 1]].logprob == pytest.approx(float(logprobs[position, ids[position + 1]]), abs=1e-5)


def test_n_gives_each_completion_its_own_seed_and_best_of_the_most_probable(directories) -> None:
    llm = engine_on(directories, "draft_model")
    prompt = {"prompt_token_ids": PROMPTS[0]}
    (four,) = llm.generate(prompt, SamplingParams(n=4, seed=10, max_tokens=12, logprobs=0))
    single = [
        llm.generate(prompt, SamplingParams(seed=10 + index, max_tokens=12))[0].outputs[0].token_ids
        for index in range(4)
    ]
    assert [completion.token_ids for completion in four.outputs] == single
    (best,) = llm.generate(prompt, SamplingParams(n=2, best_of=4, seed=10, max_tokens=12))
    ranked = sorted(four.outputs, key=lambda completion: -completion.cumulative_logprob)
    assert [completion.token_ids for completion in best.outputs] == [each.token_ids for each in ranked[:2]]
    assert [completion.index for completion in best.outputs] == [0, 1]


@pytest.mark.parametrize("method", [None, "ngram", "draft_model", "self", "draft_model/2"])
@pytest.mark.parametrize("rule", ["token", "coupled"])
def test_structured_output_obeys_its_grammar(directories, method: str | None, rule: str) -> None:
    llm = engine_on(directories, method)
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}, "b": {"enum": ["x", "yy"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    for seed in range(4):
        for spec, check in (
            (StructuredOutputs(json=schema), lambda text: set(json.loads(text)) == {"a", "b"}),
            (StructuredOutputs(regex="[ab]{3}-[0-9]+z"), lambda text: re.fullmatch("[ab]{3}-[0-9]+z", text)),
            (StructuredOutputs(choice=["yes", "no", "maybe"]), lambda text: text in ("yes", "no", "maybe")),
        ):
            params = SamplingParams(
                structured_outputs=spec, max_tokens=90, seed=seed, logit_bias={ord(" "): -9, 10: -9}
            )
            (output,) = llm.generate({"prompt_token_ids": PROMPTS[0]}, params, verification=rule)
            if output.outputs[0].finish_reason == "stop":
                assert check(output.outputs[0].text), output.outputs[0].text
            else:
                assert spec.regex or spec.json, "a choice always ends"
    if method in ("self", "draft_model"):
        assert llm.stats.num_draft_tokens > 0


def test_structured_output_is_the_same_with_and_without_drafts(directories) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="([a-z]{2} )*[0-9]"), max_tokens=40, seed=2)
    expected = token_ids(engine_on(directories, None).generate({"prompt_token_ids": PROMPTS[0]}, params))
    for method in METHODS:
        llm = engine_on(directories, method)
        assert token_ids(llm.generate({"prompt_token_ids": PROMPTS[0]}, params)) == expected


def test_a_bad_grammar_fails_its_request_with_a_message(directories) -> None:
    llm = engine_on(directories, "ngram")
    for spec in (
        StructuredOutputs(regex="a("),
        StructuredOutputs(json={"type": 5}),
        StructuredOutputs(regex="a" * 70000),
    ):
        with pytest.raises(RequestError, match="structured_outputs"):
            llm.generate({"prompt_token_ids": [1]}, SamplingParams(structured_outputs=spec))
    assert llm.engine.scheduler.pool.num_used == 0


def test_a_draft_model_of_another_vocabulary_is_refused_with_the_first_ids(directories, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", vocab_size=VOCAB)
    save_byte_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    data = json.loads(path.read_text())
    vocab = data["model"]["vocab"]
    swapped = {token: {65: 66, 66: 65}.get(index, index) for token, index in vocab.items()}
    data["model"]["vocab"] = swapped
    path.write_text(json.dumps(data))
    with pytest.raises(DrafterError, match=r"65: .* against .*66: "):
        LLM(str(directories[0]), speculative=SpeculativeConfig(model=str(tmp_path)))


def test_wrong_prompts_are_refused_before_anything_runs(directories) -> None:
    llm = engine_on(directories, "ngram")
    for prompt, said in (
        ({"prompt_token_ids": [VOCAB]}, "not an id"),
        ({"prompt_token_ids": []}, "no tokens"),
        ({"prompt_token_ids": [1] * 128}, "128 tokens leave no room"),
        ({"prompt_token_ids": [1] * 120}, "lower max_tokens to 8"),
        ({"text": "x"}, "unknown field 'text'"),
        ({}, "give text"),
    ):
        with pytest.raises(RequestError, match=said):
            llm.generate([{"prompt_token_ids": [1]}, prompt], SamplingParams(max_tokens=16))
    assert not llm.engine.scheduler.has_unfinished
    with pytest.raises(RequestError, match="2 given for 1"):
        llm.generate([{"prompt_token_ids": [1]}], [SamplingParams(), SamplingParams()])


def test_streamed_pieces_add_up_to_the_text(directories) -> None:
    llm = engine_on(directories, "self")
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=80, stop=["\x07", "ab"], ignore_eos=True)
    (whole,) = llm.generate({"prompt_token_ids": PROMPTS[2]}, params)
    pieces = list(llm.stream({"prompt_token_ids": PROMPTS[2]}, params))
    assert "".join(piece.text for piece in pieces) == whole.outputs[0].text
    assert [token for piece in pieces for token in piece.token_ids] == whole.outputs[0].token_ids
    assert "".join(piece.origins for piece in pieces) == pieces[-1].output.outputs[0].origins
    stream = llm.stream({"prompt_token_ids": PROMPTS[2]}, params)
    next(stream)
    stream.close()
    assert llm.engine.scheduler.pool.num_used == 0
