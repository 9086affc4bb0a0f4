"""Dynamic programming on the lattice against enumeration of all K^γ paths, worked out here in plain
Python."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from foredraft.draft.lattice import (
    Chain,
    acceptance_lengths,
    best_paths,
    best_sizes,
    best_tree,
    conditional_acceptance,
    marginals,
    normalised,
    path_log_probs,
    sample_path,
    survival,
    viterbi,
)

SHAPES = [(1, 1), (1, 4), (2, 3), (3, 3), (4, 2), (3, 1)]  # slots, candidates


def random_scores(slots: int, candidates: int, batch: int = 3, spread: float = 2.0) -> Chain:
    first = torch.randn(batch, candidates) * spread
    return Chain(first, torch.randn(batch, slots - 1, candidates, candidates) * spread)


def softmax(row: list[float], temperature: float = 1.0) -> list[float]:
    weights = [math.exp(x / temperature) for x in row]
    return [weight / sum(weights) for weight in weights]


def prefixes(scores: Chain, request: int, temperatures: list[float] | None = None) -> dict[tuple[int, ...], float]:
    """The probability of every non-empty prefix, by definition."""
    slots, candidates = scores.num_slots, scores.first.shape[1]
    temperatures = temperatures or [1.0] * slots
    first = softmax(scores.first[request].tolist(), temperatures[0])
    found = {}
    for length in range(1, slots + 1):
        for path in itertools.product(range(candidates), repeat=length):
            probability = first[path[0]]
            for slot, (a, b) in enumerate(itertools.pairwise(path)):
                row = scores.edges[request, slot, a].tolist()
                probability *= softmax(row, temperatures[slot + 1])[b]
            found[path] = probability
    return found


def full(found: dict[tuple[int, ...], float], slots: int) -> dict[tuple[int, ...], float]:
    return {path: probability for path, probability in found.items() if len(path) == slots}


@pytest.mark.parametrize(("slots", "candidates"), SHAPES)
def test_marginals_and_paths_equal_enumeration(slots: int, candidates: int) -> None:
    scores, temperatures = random_scores(slots, candidates), [0.5 + slot for slot in range(slots)]
    chain = normalised(scores, torch.tensor(temperatures))
    nodes = marginals(chain).exp()
    for request in range(3):
        found = prefixes(scores, request, temperatures)
        for slot, node in itertools.product(range(slots), range(candidates)):
            expected = sum(p for path, p in found.items() if len(path) == slot + 1 and path[-1] == node)
            assert float(nodes[request, slot, node]) == pytest.approx(expected, rel=1e-5)
        for path in full(found, slots):
            columns = torch.tensor([path] * 3)
            cumulative = path_log_probs(chain, columns)[request].exp().tolist()
            assert cumulative == pytest.approx([found[path[: k + 1]] for k in range(slots)], rel=1e-5)


@pytest.mark.parametrize(("slots", "candidates"), SHAPES)
def test_viterbi_and_best_paths_equal_enumeration(slots: int, candidates: int) -> None:
    scores = random_scores(slots, candidates)
    chain = normalised(scores)
    count = min(7, candidates**slots)
    columns, log_probs = best_paths(chain, 7)
    assert columns.shape == (3, count, slots)
    best, best_log_prob = viterbi(chain)
    for request in range(3):
        ranked = sorted(full(prefixes(scores, request), slots).items(), key=lambda item: -item[1])[:count]
        assert [tuple(path) for path in columns[request].tolist()] == [path for path, _ in ranked]
        assert log_probs[request].exp().tolist() == pytest.approx([p for _, p in ranked], rel=1e-5)
        assert tuple(best[request].tolist()) == ranked[0][0]
        assert math.exp(best_log_prob[request]) == pytest.approx(ranked[0][1], rel=1e-5)


@pytest.mark.parametrize(("slots", "candidates"), SHAPES)
def test_predicted_acceptance_equals_enumeration(slots: int, candidates: int) -> None:
    scores = random_scores(slots, candidates)
    chain = normalised(scores)
    acceptance = torch.rand(3, slots, candidates, dtype=torch.float64)
    surviving = survival(chain, acceptance)
    lengths = acceptance_lengths(surviving)
    for request in range(3):
        expected = [0.0] * (slots + 1)
        for path, probability in full(prefixes(scores, request), slots).items():
            alive = 1.0
            for slot, node in enumerate(path):
                accept = float(acceptance[request, slot, node])
                expected[slot] += probability * alive * (1 - accept)
                alive *= accept
            expected[slots] += probability * alive
        assert lengths[request].tolist() == pytest.approx(expected, rel=1e-5)
        total = sum(k * p for k, p in enumerate(expected))
        assert float(surviving[request].sum()) == pytest.approx(total, rel=1e-5)
    row = conditional_acceptance(chain.first, acceptance[:, 0])
    assert row.tolist() == pytest.approx(surviving[:, 0].tolist())


def subtrees(slots: int, candidates: int, size: int) -> list[frozenset[tuple[int, ...]]]:
    """Every tree of `size` nodes: sets of prefixes that hold each one's own prefix."""
    nodes = [p for k in range(1, slots + 1) for p in itertools.product(range(candidates), repeat=k)]
    return [
        frozenset(chosen)
        for chosen in itertools.combinations(nodes, size)
        if all(len(node) == 1 or node[:-1] in chosen for node in chosen)
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("slots", "candidates"), [(3, 2), (2, 3), (1, 5)])
def test_best_tree_is_the_best_of_all_trees(slots: int, candidates: int, size: int) -> None:
    scores = random_scores(slots, candidates)
    tree = best_tree(normalised(scores), size)
    everything = subtrees(slots, candidates, size)
    for request in range(3):
        found = prefixes(scores, request)
        optimum = max(sum(found[node] for node in each) for each in everything)
        paths = tree_paths(tree, request)
        assert frozenset(paths) in everything
        assert float(tree.log_probs[request].exp().sum()) == pytest.approx(optimum, rel=1e-5)
        assert sum(found[path] for path in paths) == pytest.approx(optimum, rel=1e-5)


def tree_paths(tree, request: int) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for node in range(int(tree.lengths[request])):
        parent = int(tree.parents[request, node])
        assert parent < node
        prefix = () if parent < 0 else paths[parent]
        paths.append((*prefix, int(tree.columns[request, node])))
        assert len(paths[-1]) == int(tree.depths[request, node])
    assert len(set(paths)) == len(paths)
    return paths


def test_certain_and_impossible_steps_keep_a_tree_whole() -> None:
    never = float("-inf")
    first = torch.tensor([[0.0, never, never]])
    edges = torch.tensor([[[[0.0, never, never]] * 3, [[0.0, 0.0, never]] * 3]])
    tree = best_tree(normalised(Chain(first, edges)), 6)
    paths = tree_paths(tree, 0)
    assert paths[:2] == [(0,), (0, 0)]
    assert set(paths[2:]) == {(0, 0, 0), (0, 0, 1)}
    assert tree.lengths.tolist() == [4]
    assert tree.parents[0, 4:].tolist() == [-1, -1]


def test_a_tree_larger_than_the_lattice_is_the_whole_lattice() -> None:
    tree = best_tree(normalised(random_scores(2, 2)), 50)
    assert tree.lengths.tolist() == [6, 6, 6]


def test_sampled_paths_follow_the_chain() -> None:
    scores = random_scores(3, 2, batch=1)
    many = 40000
    chain = normalised(scores)
    wide = Chain(chain.first.expand(many, -1), chain.edges.expand(many, -1, -1, -1))
    uniform = torch.rand(many, 3, 2, dtype=torch.float64)
    columns = sample_path(wide, -(-uniform.log()).log())
    expected = full(prefixes(scores, 0), 3)
    for path, probability in expected.items():
        share = float((columns == torch.tensor(path)).all(-1).double().mean())
        assert abs(share - probability) < 5 * (probability * (1 - probability) / many) ** 0.5 + 1e-9


@pytest.mark.parametrize("batch", [1, 3])
def test_best_sizes_equal_trying_every_combination(batch: int) -> None:
    num_nodes = 4
    probs = torch.rand(batch, num_nodes, dtype=torch.float64).sort(descending=True).values
    for curve in (
        lambda n: 1.0 + 0.05 * n,
        lambda n: 1.0 + 0.3 * n,
        lambda n: 1.0 + 0.02 * n * n,
        lambda n: 1.0,
    ):
        seconds = torch.tensor([curve(n) for n in range(batch * num_nodes + 1)])
        sizes = best_sizes(probs.log(), 0.4, seconds)

        def rate(kept, seconds=seconds) -> float:
            gain = sum(float(row[:size].sum()) for row, size in zip(probs, kept, strict=True))
            return (batch + gain) / (0.4 + float(seconds[sum(kept)]))

        best = max(rate(kept) for kept in itertools.product(range(num_nodes + 1), repeat=batch))
        assert rate(sizes.tolist()) == pytest.approx(best)


def test_best_sizes_take_nothing_that_cannot_be_accepted() -> None:
    log_probs = torch.tensor([[0.5, 0.0]]).log()
    assert best_sizes(log_probs, 0.1, torch.ones(3)).tolist() == [1]


def test_long_chains_stay_finite() -> None:
    scores = Chain(torch.randn(2, 8) * 200, torch.randn(2, 63, 8, 8) * 200)
    chain = normalised(scores)
    assert bool(marginals(chain).logsumexp(-1).abs().max() < 1e-9)
    assert bool(viterbi(chain)[1].isfinite().all())
