"""The prompts to train on, checked against what must never be trained on, and split for evaluation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from foredraft.config import require
from foredraft.measure.prompts import demo_prompts, read_prompts

OVERLAP_WORDS = 13
"""Words in a row that two prompts may not share, as is usual for telling training from evaluation data."""


@dataclass(frozen=True)
class TrainingPrompts:
    """Prompts that may be trained on, and how many were refused.

    Args:
        prompts: without repetitions, in the files' order.
        num_refused: left out for what they share with an evaluation prompt.
        num_repeated: left out as repetitions.
    """

    prompts: list[str]
    num_refused: int
    num_repeated: int


def training_prompts(files: Sequence[Path], evaluation: Sequence[Path]) -> TrainingPrompts:
    """Reads prompt files and leaves out what is shared with evaluation prompts.

    A prompt is shared when its words are the same in the same order, whatever their case and punctuation, or when 13
    words in a row are. The prompts that `bench` brings always count as evaluation prompts.

    Raises `ConfigError` for an unreadable file, or when nothing is left.
    """
    held = [record.prompt for path in evaluation for record in read_prompts(path)]
    held += [record.prompt for record in demo_prompts()]
    texts, runs = {_words(prompt) for prompt in held}, {run for prompt in held for run in _runs(_words(prompt))}
    kept: dict[tuple[str, ...], str] = {}
    refused = repeated = 0
    for path in files:
        for record in read_prompts(path):
            words = _words(record.prompt)
            if words in texts or not runs.isdisjoint(_runs(words)):
                refused += 1
            elif words in kept:
                repeated += 1
            else:
                kept[words] = record.prompt
    require(
        bool(kept),
        f"--prompts: none left to train on: {refused} are shared with the evaluation prompts, {repeated} repeated",
    )
    return TrainingPrompts(list(kept.values()), refused, repeated)


def is_held_out(index: int, every: int) -> bool:
    """Whether prompt `index` is kept from training, to measure on: one of `every`, spread over the files."""
    return index % every == every - 1


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", text.casefold()))


def _runs(words: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
    return (words[start : start + OVERLAP_WORDS] for start in range(len(words) - OVERLAP_WORDS + 1))
