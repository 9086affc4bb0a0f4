"""Choosing tokens: the target's own, a draft's, and one from a distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.sampling.noise import Stream, gumbel, gumbel_at, uniforms
from foredraft.sampling.state import SamplingState


def target_tokens(
    processed: Tensor,
    states: Sequence[SamplingState],
    drafts: Sequence[Sequence[int]],
    depths: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """The target's token at each row [N]: the most probable one, or the coupled rule's; meaningless for other rules.

    Args:
        processed: from `process_logits` [N, V]; request b owns `len(drafts[b]) + 1` rows.
        depths: for trees, the depth of each draft node (1: child of the anchor), which is its position.
    """
    seeds: list[int] = []
    positions: list[int] = []
    noisy: list[int] = []
    row = 0
    for index, (state, draft) in enumerate(zip(states, drafts, strict=True)):
        count = len(draft) + 1
        if state.verification == "coupled" and not state.params.is_greedy:
            offsets = range(count) if depths is None else [0, *depths[index]]
            seeds += [state.seed] * count
            positions += [state.num_tokens + offset for offset in offsets]
            noisy += range(row, row + count)
        row += count
    if not noisy:
        return processed.argmax(-1)
    noise = gumbel(seeds, positions, Stream.COUPLED, processed.shape[-1], processed.device)
    if len(noisy) == row:
        return (processed + noise).argmax(-1)
    rows = torch.tensor(noisy, device=processed.device)
    tokens = processed.argmax(-1)
    tokens[rows] = (processed[rows] + noise).argmax(-1)
    return tokens


@dataclass(frozen=True)
class Drawn:
    """Tokens drawn for one draft position.

    Args:
        token_ids: [B, width], in the order drawn, without replacement; columns past a distribution's support repeat
            tokens of probability 0.
        probs: [B, V] (or [B, K] over candidates): the distribution that the first column was drawn from, one-hot where
            the draw was not random; None when not asked for.
    """

    token_ids: Tensor
    probs: Tensor | None


def draw_drafts(
    processed: Tensor,
    states: Sequence[SamplingState],
    offset: int,
    *,
    width: int = 1,
    with_probs: bool = True,
    candidates: Tensor | None = None,
) -> Drawn:
    """Draws `width` draft tokens for the position `offset` past each request's committed text.

    Greedy requests take the most probable tokens. Others add Gumbel noise, whose `width` largest sums are a sample
    without replacement: the coupled rule's own noise under that rule, and independent noise under the others.

    Args:
        processed: draft logits after the request's transforms, [B, V], or [B, K] over `candidates`.
        candidates: [B, K] token ids of the columns, when they are not the vocabulary.
    """
    random = [index for index, state in enumerate(states) if not state.params.is_greedy]
    scores = processed
    if random:
        noise = _draft_noise(processed, [states[index] for index in random], offset, random, candidates)
        if len(random) == len(states):
            scores = processed + noise
        else:
            scores = processed.clone()
            scores[torch.tensor(random, device=processed.device)] += noise
    columns = scores.argmax(-1, keepdim=True) if width == 1 else scores.topk(width, dim=-1).indices
    tokens = columns if candidates is None else candidates.gather(-1, columns)
    if not with_probs:
        return Drawn(tokens, None)
    probs = processed.softmax(-1)
    if len(random) < len(states):
        certain = torch.tensor([state.params.is_greedy for state in states], device=processed.device)
        one_hot = torch.zeros_like(probs).scatter_(-1, columns[:, :1], 1.0)
        probs = torch.where(certain[:, None], one_hot, probs)
    return Drawn(tokens, probs)


def _draft_noise(
    processed: Tensor, states: Sequence[SamplingState], offset: int, rows: Sequence[int], candidates: Tensor | None
) -> Tensor:
    """Noise [len(states), V or K]: each request from the stream that its rule asks for."""
    device, vocab_size = processed.device, processed.shape[-1]
    noise = torch.empty(len(states), vocab_size, device=device)
    for stream in (Stream.COUPLED, Stream.DRAFT):
        members = [
            index
            for index, state in enumerate(states)
            if (state.verification == "coupled") == (stream is Stream.COUPLED)
        ]
        if not members:
            continue
        seeds = [states[index].seed for index in members]
        positions = [
            states[index].num_tokens + offset
            if stream is Stream.COUPLED
            else step_position(states[index].num_tokens, offset)
            for index in members
        ]
        if candidates is None:
            part = gumbel(seeds, positions, stream, vocab_size, device)
        else:
            part = gumbel_at(seeds, positions, stream, candidates[[rows[index] for index in members]])
        noise[members] = part
    return noise


def step_position(num_tokens: int, offset: int) -> int:
    """The noise position of a draw that belongs to one step: that of a text of `num_tokens` tokens.

    Not `num_tokens + offset`: the block rule looks at drafts and draws past the accepted length, so the next step,
    which drafts the same positions again, must not meet them again.
    """
    return num_tokens | (offset + 1) << 40


def verification_uniforms(
    states: Sequence[SamplingState], gamma: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Draws for the token and block rules: [B, γ] for accepting position by position, [B] for the final token.

    They are keyed by the text's length, so a request's draws are its own whatever else runs.
    """
    seeds = [state.seed for state in states for _ in range(gamma)]
    positions = [step_position(state.num_tokens, offset) for state in states for offset in range(gamma)]
    accept = uniforms(seeds, positions, Stream.ACCEPT).reshape(len(states), gamma)
    final = uniforms([state.seed for state in states], [state.num_tokens for state in states], Stream.FINAL)
    return accept.to(device), final.to(device)


def sample(probs: Tensor, draws: Tensor) -> Tensor:
    """Inverse-CDF sampling from `probs` [B, V], which need not sum to 1, by `draws` [B] in (0, 1).

    Never returns a token of probability 0.
    """
    total = probs.double().cumsum(-1)
    threshold = draws.to(total.dtype)[:, None] * total[:, -1:]
    index = (total <= threshold).sum(-1)
    # Rounding may leave the draw on the far edge: the last token that has any probability.
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).int().argmax(-1)
    return torch.minimum(index, last)
