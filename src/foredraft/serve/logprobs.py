"""Log-probabilities in the formats of the two endpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foredraft.sampling.logprobs import Logprob
from foredraft.serve.choice_text import ShownToken

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""


def chat_logprobs(tokens: Sequence[ShownToken], count: int, tokenizer: Any) -> dict[str, Any]:
    """`choices[].logprobs` of a chat answer, with the `count` most probable tokens at each place."""
    content = []
    for token in tokens:
        assert token.logprobs is not None
        entries = [_chat_entry(token_id, entry, tokenizer) for token_id, entry in _most_probable(token.logprobs, count)]
        own = _chat_entry(token.token_id, token.logprobs[token.token_id], tokenizer)
        content.append({**own, "top_logprobs": entries})
    return {"content": content, "refusal": None}


def _chat_entry(token_id: int, entry: Logprob, tokenizer: Any) -> dict[str, Any]:
    raw = tokenizer.id_to_bytes(token_id)
    return {
        "token": raw.decode("utf-8", "replace"),
        "logprob": max(entry.logprob, LOWEST),
        "bytes": list(raw),
    }


def completion_logprobs(
    tokens: Sequence[ShownToken], count: int, tokenizer: Any, text_offset: int = 0
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion; offsets count from the start of the choice's text, echo included."""
    found: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for token in tokens:
        assert token.logprobs is not None
        add_completion_entry(found, token.token_id, token.logprobs, count, tokenizer, text_offset + token.start)
    return found


def add_completion_entry(
    found: dict[str, list[Any]],
    token_id: int,
    entries: Mapping[int, Logprob] | None,
    count: int,
    tokenizer: Any,
    offset: int,
) -> None:
    """Adds a token to completions' logprobs; the first token of a prompt has no entries."""
    found["text_offset"].append(offset)
    found["tokens"].append(_text(token_id, tokenizer))
    if entries is None:
        found["token_logprobs"].append(None)
        found["top_logprobs"].append(None)
        return
    found["token_logprobs"].append(max(entries[token_id].logprob, LOWEST))
    top = dict(_most_probable(entries, count))
    top[token_id] = entries[token_id]  # OpenAI lists the token that came, too
    found["top_logprobs"].append({_text(each, tokenizer): max(entry.logprob, LOWEST) for each, entry in top.items()})


def _most_probable(entries: Mapping[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    ranked = sorted(entries.items(), key=lambda pair: pair[1].rank)
    return [pair for pair in ranked if pair[1].rank <= count][:count]


def _text(token_id: int, tokenizer: Any) -> str:
    text: str = tokenizer.id_to_bytes(token_id).decode("utf-8", "replace")
    if "\ufffd" not in text:
        return text
    # Part of a character: two of them may look alike, so the bytes are spelled out, as OpenAI does.
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.id_to_bytes(token_id))
