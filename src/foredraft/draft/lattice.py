"""Exact inference on a candidate lattice: a first-order Markov chain over K candidates in each of γ slots.

A drafter's corrected scores make such a chain, so dynamic programming over tiny tensors answers, without
another network pass, what the drafter expects: node probabilities, acceptance lengths, the most probable
paths, the best tree and its best size. Everything is batched, runs in float64, and loops over slots only.

Columns are places among a slot's candidates, not token ids. Knows neither networks nor requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chain:
    """A first-order chain: scores of any scale, or log-probabilities after `normalised`.

    Args:
        first: [B, K], of slot 0's candidates given the anchor.
        edges: [B, γ-1, K, K]; `edges[:, k, a, b]` goes from candidate a of slot k to candidate b of slot k +
            1.
    """

    first: Tensor
    edges: Tensor

    @property
    def num_slots(self) -> int:
        return self.edges.shape[1] + 1


@dataclass(frozen=True)
class PathTree:
    """The most probable prefixes of a chain as a tree; -1 is the anchor, and parents come before their
    children.

    Args:
        columns: [B, n], each node's candidate in slot `depths - 1`.
        parents: [B, n].
        depths: [B, n], 1 for children of the anchor.
        log_probs: [B, n], of the path from the anchor to the node, largest first.
        lengths: [B], nodes of each tree that are possible at all; what follows them is padding.
    """

    columns: Tensor
    parents: Tensor
    depths: Tensor
    log_probs: Tensor
    lengths: Tensor


def normalised(scores: Chain, temperatures: Tensor | None = None) -> Chain:
    """Scores as log-probabilities in float64, each slot's divided by its temperature ([γ], or [B, γ])
    before."""
    first, edges = scores.first.double(), scores.edges.double()
    if temperatures is not None:
        scale = temperatures.double().expand(len(first), scores.num_slots)
        first, edges = first / scale[:, :1], edges / scale[:, 1:, None, None]
    return Chain(first.log_softmax(-1), edges.log_softmax(-1))


def marginals(chain: Chain) -> Tensor:
    """Log-probability of each node [B, γ, K]: the forward recursion."""
    rows = [chain.first]
    for slot in range(chain.num_slots - 1):
        rows.append(torch.logsumexp(rows[-1][:, :, None] + chain.edges[:, slot], dim=1))
    return torch.stack(rows, 1)


def path_log_probs(chain: Chain, columns: Tensor) -> Tensor:
    """Log-probability of each prefix [B, γ] of the paths `columns` [B, γ]."""
    return path_rows(chain, columns).gather(-1, columns[..., None])[..., 0].cumsum(-1)


def survival(chain: Chain, acceptance: Tensor) -> Tensor:
    """Probability [B, γ] that the first k drafts of a path sampled from the chain are all accepted.

    Args:
        acceptance: [B, γ, K], that a node is accepted given that those before it are.
    """
    reached = chain.first.exp() * acceptance[:, 0]  # [B, K], sampled up to here and accepted
    rows = [reached.sum(-1)]
    for slot in range(chain.num_slots - 1):
        reached = (reached[:, None] @ chain.edges[:, slot].exp())[:, 0] * acceptance[:, slot + 1]
        rows.append(reached.sum(-1))
    return torch.stack(rows, 1)


def conditional_acceptance(log_probs: Tensor, acceptance: Tensor) -> Tensor:
    """Σ_b q(b | prefix) · c(b) [B]: what a rule that cuts a sampled draft may know of the next token.

    Args:
        log_probs: [B, K], of the slot's candidates given the tokens before it.
        acceptance: [B, K]. Its value at the token that was drawn must decide nothing.
    """
    return (log_probs.exp() * acceptance).sum(-1)


def acceptance_lengths(surviving: Tensor) -> Tensor:
    """Distribution of the number of accepted drafts [..., γ+1] from the probabilities [..., γ] that k or more
    are."""
    edge = torch.ones_like(surviving[..., :1])
    return torch.cat([edge, surviving], -1) - torch.cat([surviving, torch.zeros_like(edge)], -1)


def best_paths(chain: Chain, count: int) -> tuple[Tensor, Tensor]:
    """The `count` most probable paths (all of them if there are fewer), most probable first: list Viterbi.

    Returns columns [B, n, γ] and log-probabilities [B, n].
    """
    num_candidates = chain.first.shape[-1]
    scores = chain.first[:, None]  # [B, ranks, K], the best paths that end in each node
    pointers: list[tuple[Tensor, int]] = []
    for slot in range(chain.num_slots - 1):
        ranks = scores.shape[1]
        extended = scores[..., None] + chain.edges[:, slot, None]  # [B, ranks, K, K]
        extended = extended.flatten(1, 2)
        scores, origins = extended.topk(min(count, extended.shape[1]), dim=1)
        pointers.append((origins, ranks))
    best, place = scores.flatten(1).topk(min(count, scores[0].numel()), dim=-1)
    rank, column = place // num_candidates, place % num_candidates
    columns = [column]
    for origins, _ in reversed(pointers):
        flat = origins.flatten(1).gather(1, rank * num_candidates + column)
        rank, column = flat // num_candidates, flat % num_candidates
        columns.append(column)
    return torch.stack(columns[::-1], -1), best


def viterbi(chain: Chain) -> tuple[Tensor, Tensor]:
    """The most probable path [B, γ] and its log-probability [B]."""
    columns, log_probs = best_paths(chain, 1)
    return columns[:, 0], log_probs[:, 0]


def best_tree(chain: Chain, num_nodes: int) -> PathTree:
    """The tree of `num_nodes` nodes with the most expected accepted tokens under the chain.

    A tree's expected accepted tokens are the sum of its nodes' path probabilities. A path is never more
    probable than its prefix, so the `num_nodes` most probable prefixes are a tree, and no other tree has a
    larger sum.
    """
    batch, num_candidates = chain.first.shape
    log_probs, columns, parents, depths = [], [], [], []
    base, level, column = 0, torch.zeros(batch, 1, dtype=chain.first.dtype, device=chain.first.device), None
    for slot in range(chain.num_slots):
        if column is None:
            steps = chain.first[:, None]
        else:
            steps = chain.edges[:, slot - 1].gather(1, column[..., None].expand(-1, -1, num_candidates))
        extended = (level[..., None] + steps).flatten(1)  # [B, parents · K]
        # A node among the best has its parent among its own level's best, so no level needs more than
        # num_nodes.
        level, place = extended.topk(min(num_nodes, extended.shape[1]), dim=-1)
        column = place % num_candidates
        log_probs.append(level)
        columns.append(column)
        parents.append(place // num_candidates + base if slot else torch.full_like(place, -1))
        depths.append(torch.full_like(place, slot + 1))
        base = sum(each.shape[1] for each in log_probs[:-1])
    all_probs = torch.cat(log_probs, 1)
    # Stable, so that a parent comes before a child that is certain to follow it.
    order = all_probs.argsort(dim=-1, descending=True, stable=True)
    kept = order[:, :num_nodes]
    new_index = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    old_parents = torch.cat(parents, 1).gather(1, kept)
    new_parents = torch.where(old_parents < 0, -1, new_index.gather(1, old_parents.clamp(min=0)))
    chosen = all_probs.gather(1, kept)
    possible = chosen > float("-inf")
    return PathTree(
        columns=torch.cat(columns, 1).gather(1, kept),
        parents=torch.where(possible, new_parents, -1),
        depths=torch.where(possible, torch.cat(depths, 1).gather(1, kept), 1),
        log_probs=chosen,
        lengths=possible.sum(-1),
    )


def sample_path(chain: Chain, noise: Tensor | None = None) -> Tensor:
    """One path [B, γ] drawn from the chain by standard Gumbel noise [B, γ, K]; without noise, the greedy
    walk."""
    first, edges = chain.first, chain.edges
    if noise is not None:
        first, edges = first + noise[:, 0], edges + noise[:, 1:, None]
    choices = edges.argmax(-1)  # [B, γ-1, K], the step from every node
    columns = [first.argmax(-1, keepdim=True)]
    for slot in range(chain.num_slots - 1):
        columns.append(choices[:, slot].gather(1, columns[-1]))
    return torch.cat(columns, 1)


def path_rows(chain: Chain, columns: Tensor) -> Tensor:
    """The rows [B, γ, K] that a path [B, γ] meets: each slot's scores given the path before it."""
    width = chain.edges.shape[-1]
    rows = chain.edges.gather(2, columns[:, :-1, None, None].expand(-1, -1, 1, width))
    return torch.cat([chain.first[:, None], rows[:, :, 0]], 1)


def best_sizes(log_probs: Tensor, draft_seconds: float, verify_seconds: Tensor) -> Tensor:
    """How many nodes [B] of each request's tree to verify, for the most expected tokens per second of the
    batch.

    Maximises (B + Σ π of the nodes kept) / (t_draft + t_verify(nodes kept)), taking the most probable nodes
    of all requests first. Chains are trees whose nodes are prefixes.

    Args:
        log_probs: [B, n], path log-probabilities, largest first in each row, -inf for padding.
        draft_seconds: what drafting took, whatever is kept of it.
        verify_seconds: [B·n + 1], a target forward with 0, 1, … nodes in all beside the B anchors.
    """
    batch, num_nodes = log_probs.shape
    gains, order = log_probs.double().exp().flatten().sort(descending=True, stable=True)
    zero = torch.zeros(1, dtype=gains.dtype, device=gains.device)
    expected = batch + torch.cat([zero, gains]).cumsum(0)
    kept = int((expected / (draft_seconds + verify_seconds.double().to(gains.device))).argmax())
    # No node that cannot be accepted is worth its place, even where the curve is flat.
    chosen = order[:kept][gains[:kept] > 0]
    return torch.bincount(chosen // num_nodes, minlength=batch)
