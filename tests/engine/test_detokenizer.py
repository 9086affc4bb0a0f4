"""Detokenisation: whole characters, stop strings across tokens, and pieces that add up to the whole."""

from __future__ import annotations

import random

import pytest
from tests.engine.fake import ByteTokenizer

from foredraft.engine.detokenizer import Detokenizer

TEXT = "naïve café — 東京 👩‍👩‍👧 z̷̢ okay, fine."


def pieces_of(detokenizer: Detokenizer, tokens: list[int]) -> tuple[list[str], str | None]:
    """What a stream would show, token by token, and the stop string that was found."""
    pieces, found = [], None
    for token in tokens:
        found = detokenizer.append(token)
        pieces.append(detokenizer.pop_new_text(found is not None))
        if found is not None:
            return pieces, found
    found = detokenizer.finish()
    pieces.append(detokenizer.pop_new_text(True))
    return pieces, found


def test_pieces_are_whole_characters_and_add_up() -> None:
    tokens = list(TEXT.encode())
    pieces, _ = pieces_of(Detokenizer(ByteTokenizer(), []), tokens)
    assert "".join(pieces) == TEXT
    assert all("\ufffd" not in piece for piece in pieces)


def test_incomplete_bytes_at_the_end_come_out_as_replacement() -> None:
    tokens = list("ab東".encode())[:-1]
    pieces, _ = pieces_of(Detokenizer(ByteTokenizer(), []), tokens)
    assert "".join(pieces) == ByteTokenizer().decode(tokens)


def test_prompt_text_is_not_repeated() -> None:
    pieces, _ = pieces_of(Detokenizer(ByteTokenizer(), list(b"hello")), list(b" world"))
    assert "".join(pieces) == " world"


def test_stop_strings_never_show_even_in_part() -> None:
    generator = random.Random(0)
    num_found = 0
    for _ in range(300):
        start = generator.randrange(len(TEXT))
        stop = TEXT[start : start + generator.randint(1, 5)] + ("" if generator.random() < 0.7 else "?")
        detokenizer = Detokenizer(ByteTokenizer(), [], [stop, "never"])
        pieces, found = pieces_of(detokenizer, list(TEXT.encode()))
        expected, present, _ = TEXT.partition(stop)
        assert found == (stop if present else None)
        assert "".join(pieces) == expected
        assert detokenizer.text == expected
        num_found += bool(present)
    assert 100 < num_found < 300


def test_the_stop_string_that_ends_first_wins() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), [], ["cde", "bc"])
    pieces, found = pieces_of(detokenizer, list(b"abcdef"))
    assert (found, "".join(pieces)) == ("bc", "a")


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, "a"), (2, "a"), (3, "aba"), (4, "aba")])
def test_stop_strings_within_the_minimum_are_text(min_tokens: int, expected: str) -> None:
    detokenizer = Detokenizer(ByteTokenizer(), [], ["b"], min_tokens=min_tokens)
    pieces, found = pieces_of(detokenizer, list(b"abab"))
    assert (found, "".join(pieces)) == ("b", expected)


def test_included_stop_string_ends_the_text() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), [], ["cd"], include_stop=True)
    pieces, found = pieces_of(detokenizer, list(b"abcdef"))
    assert (found, "".join(pieces)) == ("cd", "abcd")
