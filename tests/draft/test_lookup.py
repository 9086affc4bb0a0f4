"""Drafting from text: n-gram look-up in the request's own tokens, and a client's prediction."""

from __future__ import annotations

import random
from types import SimpleNamespace

from foredraft.draft.drafter import DraftRequest
from foredraft.draft.ngram import NgramDrafter
from foredraft.draft.prediction import PredictionDrafter


def request_of(tokens: list[int], gamma: int, prediction: list[int] | None = None, prompt: int = 0) -> DraftRequest:
    state = SimpleNamespace(num_prompt_tokens=prompt)
    return DraftRequest("r", tokens, [], gamma, state, prediction or [])


def drafts_of(drafter, request: DraftRequest) -> list[int]:
    proposal = drafter.propose([request])
    return proposal.token_ids[0, : int(proposal.lengths[0])].tolist()


def by_definition(tokens: list[int], shortest: int, longest: int, gamma: int) -> list[int]:
    """Scans the whole text: the latest earlier occurrence of the longest ending."""
    for size in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if size < len(tokens) and tokens[start : start + size] == tokens[-size:]:
                continued = list(tokens)
                for offset in range(gamma):
                    continued.append(continued[start + size + offset])
                return continued[len(tokens) :]
    return []


def test_ngram_finds_what_a_full_scan_finds() -> None:
    generator = random.Random(1)
    num_drafts = 0
    for _ in range(60):
        drafter = NgramDrafter(1, 3)
        tokens = [generator.randrange(4)]
        for _ in range(30):
            tokens += [generator.randrange(4) for _ in range(generator.randint(1, 3))]
            draft = drafts_of(drafter, request_of(tokens, 5))
            assert draft == by_definition(tokens, 1, 3, 5)
            num_drafts += bool(draft)
    assert num_drafts > 1000


def test_ngram_prefers_the_longest_match_over_the_latest() -> None:
    tokens = [1, 2, 3, 7, 9, 3, 8, 1, 2, 3]
    assert drafts_of(NgramDrafter(1, 3), request_of(tokens, 2)) == [7, 9]


def test_ngram_copies_a_repetition_past_the_end() -> None:
    assert drafts_of(NgramDrafter(1, 2), request_of([5, 6, 5, 6], 5)) == [5, 6, 5, 6, 5]


def test_released_requests_are_forgotten() -> None:
    drafter = NgramDrafter(1, 2)
    assert drafts_of(drafter, request_of([1, 2, 1], 1)) == [2]
    drafter.release("r")
    assert drafts_of(drafter, request_of([3, 4], 1)) == []


def test_prediction_is_followed_from_its_start() -> None:
    assert drafts_of(PredictionDrafter(), request_of([9, 9], 3, [1, 2, 3, 4], prompt=2)) == [1, 2, 3]


def test_prediction_is_found_again_after_a_change() -> None:
    drafter = PredictionDrafter()
    prediction = [10, 11, 12, 13, 14, 15, 16, 17]
    output = [9, 10, 11]
    assert drafts_of(drafter, request_of(output, 3, prediction, prompt=1)) == [12, 13, 14]
    output += [99]  # the output leaves the prediction
    assert drafts_of(drafter, request_of(output, 3, prediction, prompt=1)) == []
    output += [14]  # and comes back further on
    assert drafts_of(drafter, request_of(output, 5, prediction, prompt=1)) == [15, 16, 17]


def test_prediction_looks_ahead_of_the_cursor_first() -> None:
    drafter = PredictionDrafter()
    prediction = [1, 2, 3, 1, 2, 4]
    assert drafts_of(drafter, request_of([9, 1, 2, 3, 7, 1], 2, prediction, prompt=1)) == [2, 4]


def test_without_a_prediction_nothing_is_drafted() -> None:
    assert drafts_of(PredictionDrafter(), request_of([1, 2], 3)) == []
