"""The draft vocabulary: the tokens that the target is likeliest to say, so that the drafter's head is small."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from foredraft.train.features import read_texts


def draft_vocabulary(
    files: Sequence[Path], size: int, vocab_size: int, ids: Tensor | None = None
) -> tuple[Tensor, float]:
    """The `size` tokens with the most of the target's probability over all answers, or the given `ids`.

    Returns their ids [size], ascending, and the share of probability that they hold. Ties go to lower ids, which are
    a tokenizer's more frequent tokens.
    """
    mass = torch.zeros(vocab_size, dtype=torch.float64)
    for file in files:
        texts = read_texts(file)
        mass.index_add_(0, texts.top_ids.flatten(), texts.top_log_probs.double().exp().flatten())
    if ids is None:
        ids = mass.argsort(descending=True, stable=True)[:size].sort().values
    return ids, float(mass[ids].sum() / mass.sum())
