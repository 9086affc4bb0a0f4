"""Prompts, answers, features and batches: what is trained on is what the target said, at the right places."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from foredraft import LLM, SamplingParams
from foredraft.errors import ConfigError
from foredraft.measure.forward import sequence_batch
from foredraft.measure.prompts import demo_prompts, encoded
from foredraft.train.batches import batches
from foredraft.train.features import cache_features, feature_bytes, read_texts
from foredraft.train.prompts import is_held_out, training_prompts
from foredraft.train.regenerate import read_responses, regenerate
from foredraft.train.trainer import count_batches
from foredraft.train.vocabulary import draft_vocabulary

LAYERS = (0, 2)


@pytest.fixture(scope="module")
def llm(tiny_target: Path) -> LLM:
    return LLM(str(tiny_target), dtype="float32", max_num_seqs=8, kv_cache_memory=10**7)


@pytest.fixture(scope="module")
def answers(llm: LLM, prompt_file: Path, tmp_path_factory: pytest.TempPathFactory):
    file = tmp_path_factory.mktemp("answers") / "responses.jsonl"
    prompts = training_prompts([prompt_file], []).prompts
    return regenerate(llm, prompts, file, max_tokens=20, seed=5)


def test_prompts_shared_with_the_evaluation_set_are_refused(tmp_path: Path) -> None:
    long = "one two three four five six seven eight nine ten eleven twelve thirteen"
    evaluation = tmp_path / "evaluation.jsonl"
    held = ("What is tea?", f"Sum up: {long} fourteen")
    evaluation.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in held))
    training = tmp_path / "training.txt"
    lines = [
        "what is TEA",  # the same words
        f"Please repeat {long}!",  # thirteen words in a row
        "What is tea made of?",
        "Something else",
        "something, else",  # a repetition
        demo_prompts()[0].prompt.splitlines()[0] if "\n" not in demo_prompts()[0].prompt else "another",
    ]
    training.write_text("\n".join(lines) + "\n")
    found = training_prompts([training], [evaluation])
    assert found.num_repeated == 1
    assert "What is tea made of?" in found.prompts
    assert "what is TEA" not in found.prompts
    assert all(long not in prompt for prompt in found.prompts)
    assert found.num_refused >= 2
    training.write_text("What is tea?\n")
    with pytest.raises(ConfigError, match="none left to train on: 1 are shared"):
        training_prompts([training], [evaluation])


def test_answers_are_the_targets_own_and_a_cut_file_is_continued(llm: LLM, prompt_file: Path, tmp_path: Path) -> None:
    prompts = training_prompts([prompt_file], []).prompts[:12]
    file = tmp_path / "responses.jsonl"
    whole = regenerate(llm, prompts, file, max_tokens=10, seed=5)
    greedy = llm.generate([encoded(llm, prompts[2])], SamplingParams(max_tokens=10, temperature=0.0))[0]
    assert whole[2].token_ids == greedy.outputs[0].token_ids
    assert [each.temperature for each in whole[:4]] == [0.0, 1.0, 0.0, 1.0]
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:5]) + lines[5][:20])  # killed while it wrote
    assert len(read_responses(file)) == 5
    assert regenerate(llm, prompts, file, max_tokens=10, seed=5) == whole


def test_features_are_those_of_a_forward_over_the_whole_text(llm: LLM, answers, tmp_path: Path) -> None:
    some = answers[:5]
    (file,) = cache_features(llm.model, some, LAYERS, tmp_path)
    texts = read_texts(file)
    row = 0
    for index, response in enumerate(some):
        ids = [*response.prompt_token_ids, *response.token_ids]
        start = int(texts.starts[index])
        assert texts.token_ids[start : start + len(ids)].tolist() == ids
        cache = llm.model.new_cache(40, 16)
        output = llm.model.forward(sequence_batch(ids, 0, len(ids), torch.device("cpu")), cache, LAYERS)
        features = torch.cat(output.features, -1)
        torch.testing.assert_close(texts.features[start : start + len(ids)].float(), features, rtol=0.01, atol=0.01)
        for place in range(len(response.token_ids)):  # the row that an answer token was chosen from
            log_probs = output.logits[len(response.prompt_token_ids) + place - 1].log_softmax(-1)
            assert texts.top_ids[row, 0] == log_probs.argmax()
            torch.testing.assert_close(
                texts.top_log_probs[row].float(), log_probs[texts.top_ids[row]], rtol=0.01, atol=0.01
            )
            row += 1
    assert row == len(texts.top_ids)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size == pytest.approx(feature_bytes(some, len(LAYERS), 36), rel=0.1)


def test_batches_show_each_slot_its_own_token_and_distribution(llm: LLM, answers, tmp_path: Path) -> None:
    files = cache_features(llm.model, answers, LAYERS, tmp_path)
    by_text = {tuple(each.prompt_token_ids + each.token_ids): each for each in answers}
    seen = 0
    for batch in batches(files, texts=3, anchors=6, num_slots=4, seed=1, epoch=0):
        for text in range(len(batch.anchors)):
            for place in range(batch.anchors.shape[1]):
                if not batch.valid[text, place, 0]:
                    continue
                anchor = int(batch.anchors[text, place])
                labels = batch.labels[text, place][batch.valid[text, place]].tolist()
                previous = batch.previous[text, place].tolist()
                owners = [
                    ids
                    for ids, each in by_text.items()
                    if anchor >= len(each.prompt_token_ids)
                    and list(ids[anchor : anchor + 1 + len(labels)]) == [previous[0], *labels]
                ]
                assert owners, "the block is no part of an answer"
                assert previous[1 : len(labels)] == labels[:-1]
                seen += len(labels)
                top = batch.top_probs[text, place][batch.valid[text, place]]
                assert (top.sum(-1) <= 1.01).all()
                assert (top[:, 0] > 0).all()
    assert seen > 500
    assert count_batches(files, 3) == sum(1 for _ in batches(files, texts=3, anchors=6, num_slots=4, seed=1, epoch=0))


def test_the_draft_vocabulary_is_the_likeliest_tokens(llm: LLM, answers, tmp_path: Path) -> None:
    files = cache_features(llm.model, answers, LAYERS, tmp_path)
    ids, share = draft_vocabulary(files, 40, 258)
    assert len(ids) == 40
    assert ids.tolist() == sorted(ids.tolist())
    mass = torch.zeros(258, dtype=torch.float64)
    for file in files:
        texts = read_texts(file)
        for top, log_probs in zip(texts.top_ids.tolist(), texts.top_log_probs.double().exp().tolist(), strict=True):
            for token, probability in zip(top, log_probs, strict=True):
                mass[token] += probability
    assert mass[ids].min() >= mass[[token for token in range(258) if token not in ids.tolist()]].max()
    assert share == pytest.approx(float(mass[ids].sum() / mass.sum()))


def test_one_prompt_in_so_many_is_held_out() -> None:
    assert [index for index in range(70) if is_held_out(index, 32)] == [31, 63]
