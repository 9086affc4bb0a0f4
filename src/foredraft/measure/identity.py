"""Whether two ways of decoding gave the same tokens, and how close the target's choice was if not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.measure.forward import next_logits
from foredraft.models.decoder import TargetModel

NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.5}
"""Logit gaps by dtype that rounding in another order of summation can turn around.

bfloat16 keeps 8 bits, so logits of 16 to 32 come in steps of 1/8; a few such steps gather over the layers.
"""


@dataclass(frozen=True)
class Difference:
    """The first token in which two outputs of a prompt differ.

    Args:
        prompt, position: index of the prompt, and of the output token.
        left, right: the two token ids; None where that output had ended.
    """

    prompt: int
    position: int
    left: int | None
    right: int | None


def first_difference(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> Difference | None:
    """The first difference in the first prompt that has one; None when all outputs are the same."""
    for prompt, (ours, theirs) in enumerate(zip(left, right, strict=True)):
        for position in range(max(len(ours), len(theirs))):
            pair = [tokens[position] if position < len(tokens) else None for tokens in (ours, theirs)]
            if pair[0] != pair[1]:
                return Difference(prompt, position, *pair)
    return None


def logit_margin(
    model: TargetModel, prompt_ids: Sequence[int], output_ids: Sequence[int], difference: Difference
) -> float | None:
    """The target's logit gap (≥ 0) between the two tokens at the difference; None where one output had ended.

    Args:
        prompt_ids: the prompt's tokens.
        output_ids: either output of that prompt; they agree up to the difference.
    """
    if difference.left is None or difference.right is None:
        return None
    logits = next_logits(model, [*prompt_ids, *output_ids[: difference.position]])
    return abs(float(logits[difference.left] - logits[difference.right]))
