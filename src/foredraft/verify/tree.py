"""Verification of draft trees: by equality, and by recursive rejection (Miao et al. 2023, SpecInfer; Cai et al. 2024).

A tree's row 0 is the anchor, row j + 1 its node j; parents come before children.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.draft.proposal import DenseProbs, DraftProposal, SparseProbs
from foredraft.sampling.choose import sample
from foredraft.verify.verification import Verification


def verify_tree_match(proposal: DraftProposal, target_tokens: Tensor) -> Verification:
    """Follows, from the anchor, the child that equals the target's token, as long as there is one.

    Exact for greedy decoding and for the coupled rule, whatever the tree.

    Args:
        proposal: a tree of n nodes.
        target_tokens: [B, n+1], the target's token after the anchor and after each node's path.
    """
    outcomes = []
    choices = target_tokens.tolist()
    for request, (tokens, parents) in enumerate(_trees(proposal)):
        row, path, emitted = 0, list[int](), [choices[request][0]]
        while True:
            child = next((node for node in _children(parents, row - 1) if tokens[node] == emitted[-1]), None)
            if child is None:
                break
            path.append(child)
            row = child + 1
            emitted.append(choices[request][row])
        outcomes.append((path, emitted))
    return _verification(outcomes, proposal)


def verify_tree_token(
    proposal: DraftProposal, target_probs: Tensor, accept_draws: Tensor, final_draws: Tensor
) -> Verification:
    """Recursive rejection: a node's children are tried in turn, each against what the ones before it left of p.

    Args:
        proposal: a tree of n nodes. Node j was drawn from row j of `probs` without the tokens of its earlier siblings.
        target_probs: [B, n+1, V], after the anchor and after each node's path.
        accept_draws: [B, n] in (0, 1), one per node.
        final_draws: [B] in (0, 1).
    """
    outcomes = []
    vocab_size = target_probs.shape[-1]
    for request, (tokens, parents) in enumerate(_trees(proposal)):
        row, path = 0, []
        while True:
            p = target_probs[request, row].double()
            accepted: int | None = None
            tried: list[int] = []
            for node in _children(parents, row - 1):
                q = _dense(proposal.probs, request, node, vocab_size)
                q[tried] = 0
                token = tokens[node]
                if not 0 <= token < vocab_size or q[token] <= 0:
                    continue  # cannot have been drawn: nothing to try, nothing to subtract
                tried.append(token)
                q = q / q.sum()
                if float(accept_draws[request, node]) * float(q[token]) < float(p[token]):
                    accepted = node
                    break
                residual = (p - q).clamp(min=0)
                p = residual / residual.sum() if float(residual.sum()) > 0 else p
            if accepted is None:
                break
            path.append(accepted)
            row = accepted + 1
        last = int(sample(p[None], final_draws[request : request + 1])[0])
        outcomes.append((path, [*(tokens[node] for node in path), last]))
    return _verification(outcomes, proposal)


def _trees(proposal: DraftProposal) -> list[tuple[list[int], list[int]]]:
    """Each request's node tokens and parents, without padding."""
    assert proposal.tree is not None
    rows = zip(proposal.token_ids.tolist(), proposal.tree.parents.tolist(), proposal.lengths.tolist(), strict=True)
    return [(tokens[:length], parents[:length]) for tokens, parents, length in rows]


def _children(parents: list[int], node: int) -> list[int]:
    return [child for child, parent in enumerate(parents) if parent == node]


def _dense(probs: DenseProbs | SparseProbs, request: int, node: int, vocab_size: int) -> Tensor:
    if isinstance(probs, DenseProbs):
        return probs.probs[request, node].double()
    candidates = probs.candidates[request, node]
    known = (candidates >= 0) & (candidates < vocab_size)
    dense = torch.zeros(vocab_size, dtype=torch.float64, device=candidates.device)
    mass = torch.where(known, probs.probs[request, node].double(), 0.0)
    return dense.index_add_(0, candidates.clamp(0, vocab_size - 1), mass)


def _verification(outcomes: list[tuple[list[int], list[int]]], proposal: DraftProposal) -> Verification:
    device, width = proposal.token_ids.device, proposal.token_ids.shape[1]
    paths = [[*path, *[-1] * (width - len(path))] for path, _ in outcomes]
    tokens = [[*emitted, *[0] * (width + 1 - len(emitted))] for _, emitted in outcomes]
    shape = (len(outcomes), width)
    return Verification(
        torch.tensor(tokens, dtype=torch.int64, device=device),
        torch.tensor([len(path) for path, _ in outcomes], dtype=torch.int64, device=device),
        torch.tensor(paths, dtype=torch.int64, device=device).reshape(shape),
    )
