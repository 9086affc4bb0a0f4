"""From feature files to training batches: texts padded together, random anchors in each, and what the target wanted.

An anchor stands at position a; slot k is to propose the token at a + k + 1, with the features before a known.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from foredraft.train.features import Texts, read_texts

ANCHOR_STEP, LENGTH_STEP = 16, 64
"""Shapes are rounded up to these: oneDNN compiles its kernels anew for every shape, which takes longer than a step."""


@dataclass(frozen=True)
class TrainingBatch:
    """B texts with A anchors each, γ slots an anchor.

    Args:
        features: [B, S, m·d] float32, padded at the end.
        anchors: [B, A] positions.
        previous: [B, A, γ], the true token before each slot; the first is the anchor.
        labels: [B, A, γ], the true token of each slot.
        valid: [B, A, γ], whether the text reaches so far; a text with fewer anchors repeats one, invalid.
        top_ids: [B, A, γ, 64], the target's most probable tokens at each slot.
        top_probs: [B, A, γ, 64] float32, their probabilities.
    """

    features: Tensor
    anchors: Tensor
    previous: Tensor
    labels: Tensor
    valid: Tensor
    top_ids: Tensor
    top_probs: Tensor

    @property
    def num_slots(self) -> int:
        """Slots that teach something."""
        return int(self.valid.sum())

    def to(self, device: torch.device) -> TrainingBatch:
        return TrainingBatch(**{name: value.to(device) for name, value in vars(self).items()})


def batches(
    files: Sequence[Path], *, texts: int, anchors: int, num_slots: int, seed: int, epoch: int
) -> Iterator[TrainingBatch]:
    """One pass over the files in a random order that (seed, epoch) fixes.

    Args:
        texts: B.
        anchors: A at most; a text with fewer positions gives all of them.
        num_slots: γ.
    """
    random_ = random.Random(f"{seed}/{epoch}")
    order = list(files)
    random_.shuffle(order)
    for file in order:
        loaded = read_texts(file)
        lengths = (loaded.starts[1:] - loaded.starts[:-1]).tolist()
        members = [index for index in range(len(lengths)) if _positions(loaded, index)]
        # Texts of like length share a batch, so that little is padding; the batches then come in a random order.
        members.sort(key=lambda index: lengths[index] + random_.random() * 40)
        groups = [members[at : at + texts] for at in range(0, len(members), texts)]
        random_.shuffle(groups)
        for group in groups:
            yield _batch(loaded, group, anchors, num_slots, random_)


def _positions(texts: Texts, index: int) -> range:
    """Where anchors of a text can stand: on its answer, with a token to come."""
    start, end = int(texts.starts[index]), int(texts.starts[index + 1])
    return range(int(texts.prompt_lengths[index]), end - start - 1)


def _batch(texts: Texts, members: Sequence[int], anchors: int, num_slots: int, random_: random.Random) -> TrainingBatch:
    chosen = []
    for index in members:
        positions = _positions(texts, index)
        chosen.append(sorted(random_.sample(positions, min(anchors, len(positions)))))
    most = min(_rounded(max(map(len, chosen)), ANCHOR_STEP), anchors)
    real = torch.tensor([[place < len(each) for place in range(most)] for each in chosen])  # [B, A]
    places = torch.tensor([each + [each[-1]] * (most - len(each)) for each in chosen])
    starts, ends = texts.starts[list(members)], texts.starts[[index + 1 for index in members]]
    lengths = ends - starts
    longest = _rounded(int(places.max()) + 1, LENGTH_STEP)
    rows = starts[:, None] + torch.minimum(torch.arange(longest), lengths[:, None] - 1)
    steps = torch.arange(num_slots)
    at = places[..., None] + steps  # [B, A, γ], position of the token before each slot
    valid = real[..., None] & (at + 1 < lengths[:, None, None])
    inside = torch.minimum(at, lengths[:, None, None] - 2)
    previous = texts.token_ids[starts[:, None, None] + inside]
    labels = texts.token_ids[starts[:, None, None] + inside + 1]
    answers = torch.cat([torch.zeros(1, dtype=torch.int64), _answer_lengths(texts)]).cumsum(0)[list(members)]
    wanted = answers[:, None, None] + inside + 1 - texts.prompt_lengths[list(members)][:, None, None]
    return TrainingBatch(
        features=texts.features[rows].float(),
        anchors=places,
        previous=previous,
        labels=labels,
        valid=valid,
        top_ids=texts.top_ids[wanted],
        top_probs=texts.top_log_probs[wanted].float().exp(),
    )


def _rounded(count: int, step: int) -> int:
    return -(-count // step) * step


def _answer_lengths(texts: Texts) -> Tensor:
    return texts.starts[1:] - texts.starts[:-1] - texts.prompt_lengths
