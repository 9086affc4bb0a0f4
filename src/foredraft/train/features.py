"""Stage two: what the target felt and expected at every token of the answers, in files.

One teacher-forced pass over prompt and answer gives the features that a drafter will see and, for each token of the
answer, the target's most probable tokens there. Files hold some dozens of texts each and appear whole or not at all,
so a stop loses one file's work.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from foredraft.kv.pool import blocks_for
from foredraft.models.batch import ragged_batch
from foredraft.models.decoder import TargetModel
from foredraft.train.regenerate import Response

TOP = 64
"""Tokens of the target's distribution that are kept; the rest is treated as impossible."""
TEXTS_PER_FILE = 64
TOKENS_PER_FORWARD = 768
BLOCK_SIZE = 16

Progress = Callable[[int, int, int], None]
"""Called with (files written, files in all, tokens run since the start)."""


@dataclass(frozen=True)
class Texts:
    """Some texts with their features.

    Args:
        token_ids: [T] int64, all texts one after another, prompts included.
        starts: [n + 1], where each text starts in `token_ids`.
        prompt_lengths: [n].
        features: [T, m·d] bfloat16.
        top_ids, top_log_probs: [R, 64], of each answer token the target's distribution that it was chosen from:
            R is the number of answer tokens in all.
    """

    token_ids: Tensor
    starts: Tensor
    prompt_lengths: Tensor
    features: Tensor
    top_ids: Tensor
    top_log_probs: Tensor


def feature_bytes(responses: Sequence[Response], num_layers: int, hidden_size: int) -> int:
    """Bytes on disk that `cache_features` will take."""
    tokens = sum(len(each.prompt_token_ids) + len(each.token_ids) for each in responses)
    answers = sum(len(each.token_ids) for each in responses)
    return tokens * (num_layers * hidden_size * 2 + 4) + answers * TOP * (4 + 2)


def cache_features(
    model: TargetModel,
    responses: Sequence[Response],
    layers: Sequence[int],
    directory: Path,
    progress: Progress | None = None,
) -> list[Path]:
    """Writes the files that are not there yet; returns all of them in order."""
    directory.mkdir(parents=True, exist_ok=True)
    groups = [responses[at : at + TEXTS_PER_FILE] for at in range(0, len(responses), TEXTS_PER_FILE)]
    files = [directory / f"texts-{index:05d}.safetensors" for index in range(len(groups))]
    done = 0
    for index, (group, file) in enumerate(zip(groups, files, strict=True)):
        if not file.exists():
            _save(_texts(model, group, layers), file)
            done += sum(len(each.prompt_token_ids) + len(each.token_ids) for each in group)
        if progress is not None:
            progress(index + 1, len(files), done)
    return files


def read_texts(file: Path) -> Texts:
    """What `cache_features` wrote."""
    from safetensors.torch import load_file

    found = load_file(file)
    wide = {name: value.long() if value.dtype == torch.int32 else value for name, value in found.items()}
    return Texts(**wide)


def _save(texts: Texts, file: Path) -> None:
    from safetensors.torch import save_file

    narrow = {name: value.int() if value.dtype == torch.int64 else value for name, value in vars(texts).items()}
    partial = file.with_suffix(".partial")
    save_file(narrow, partial)
    os.replace(partial, file)


@torch.inference_mode()
def _texts(model: TargetModel, responses: Sequence[Response], layers: Sequence[int]) -> Texts:
    features, top_ids, top_log_probs = [], [], []
    for group in _forwards(responses):
        texts = [[*each.prompt_token_ids, *each.token_ids] for each in group]
        tables, used = [], 0
        for text in texts:
            blocks = blocks_for(len(text), BLOCK_SIZE)
            tables.append(list(range(used, used + blocks)))
            used += blocks
        # Rows whose next token is an answer token: from the prompt's last one to the one before the end.
        counts = [len(each.token_ids) + 1 for each in group]
        batch = ragged_batch(texts, [0] * len(texts), tables, counts, block_size=BLOCK_SIZE, device=model.device)
        output = model.forward(batch, model.new_cache(used, BLOCK_SIZE), layers)
        features.append(torch.cat(output.features, -1).bfloat16().cpu())
        kept = [logits[:-1] for logits in torch.split(output.logits, counts)]
        top = torch.cat(kept).topk(min(TOP, output.logits.shape[-1]), dim=-1)
        totals = torch.cat([logits.logsumexp(-1) for logits in kept])
        top_ids.append(top.indices.cpu())
        top_log_probs.append((top.values - totals[:, None]).half().cpu())
    lengths = [len(each.prompt_token_ids) + len(each.token_ids) for each in responses]
    return Texts(
        token_ids=torch.tensor([token for each in responses for token in [*each.prompt_token_ids, *each.token_ids]]),
        starts=torch.tensor([0, *lengths]).cumsum(0),
        prompt_lengths=torch.tensor([len(each.prompt_token_ids) for each in responses]),
        features=torch.cat(features),
        top_ids=torch.cat(top_ids),
        top_log_probs=torch.cat(top_log_probs),
    )


def _forwards(responses: Sequence[Response]) -> list[list[Response]]:
    """The texts in groups of about one forward's tokens, in order."""
    groups: list[list[Response]] = [[]]
    tokens = 0
    for response in responses:
        length = len(response.prompt_token_ids) + len(response.token_ids)
        if groups[-1] and tokens + length > TOKENS_PER_FORWARD:
            groups.append([])
            tokens = 0
        groups[-1].append(response)
        tokens += length
    return groups
