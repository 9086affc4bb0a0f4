"""Text to token ids and back: one class over a `tokenizers` tokenizer, wherever it came from.

Directories are read by transformers' AutoTokenizer, GGUF metadata by `gguf_tokenizer`. Turning a growing list
of ids into a stream of whole characters is the engine's detokeniser, not this.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import tokenizers

from foredraft.errors import ModelError, RequestError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "tekken.json",
    "tiktoken.model",
    "spiece.model",
)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Encodes, decodes and renders chats.

    Args:
        backend: does the work; its truncation and padding are switched off.
        chat_template: Jinja source, or several by name (`default`, `tool_use`), or None.
        special_tokens: the template's variables, such as `bos_token`; also tell `bos_token_id` and
            `eos_token_id`.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id; a model's own vocabulary can be padded beyond it."""
        return max(self.vocab().values(), default=-1) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out by default."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens that the model's own convention adds (BOS) only when asked for.

        Raises:
            RequestError: `text` is no valid Unicode (a lone surrogate).
        """
        try:
            return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"the text cannot be encoded: {error}") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; half a character becomes U+FFFD, ids outside the vocabulary become nothing."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def vocab(self) -> dict[str, int]:
        """Every token's own spelling (not its text) and id, added tokens included."""
        return self.backend.get_vocab(with_added_tokens=True)

    def id_to_token(self, token_id: int) -> str | None:
        """A token's own spelling, such as `Ġthe`; None outside the vocabulary."""
        return self.backend.id_to_token(token_id)

    def id_to_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text, also where they are no whole character; else empty.

        A special token's bytes are its spelling. The space that SentencePiece drops at the start of a text is
        kept.
        """
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added_ids:
            return token.encode()
        if self._spelling == "byte_level":
            codes = _byte_level_codes()
            return b"".join(bytes([codes[c]]) if c in codes else c.encode() for c in token)
        if self._spelling == "sentencepiece":
            byte = _BYTE_TOKEN.fullmatch(token)
            return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()
        return token.encode()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tokenize: bool = False,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str | list[int]:
        """Renders a conversation with the model's template, in a sandbox.

        Args:
            messages: `{"role": ..., "content": ...}` and what else the template reads.
            add_generation_prompt: end with the opening of the assistant's turn.
            tools: JSON schemas of functions, for templates that know tools.
            tokenize: token ids (without adding special tokens, which the template holds) instead of text.
            chat_template: replaces the model's own.
            variables: further variables of the template.

        Raises:
            RequestError: there is no template, or it fails on these messages.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            conversation: Any = [dict(message) for message in messages]
            rendered: Any = render_jinja_template(
                conversations=[conversation],
                tools=[dict(tool) for tool in tools] if tools else None,
                chat_template=chat_template or self._template(bool(tools)),
                add_generation_prompt=add_generation_prompt,
                **{**self.special_tokens, **variables},
            )
        except Exception as error:  # a template is a program: it raises what it likes
            raise RequestError(f"the chat template cannot render these messages: {error}") from error
        text = str(rendered[0][0])
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def first_differences(self, other: Tokenizer, limit: int = 5) -> list[tuple[int, str | None, str | None]]:
        """The first ids that mean another token in `other`, as (id, token here, token there)."""
        differences: list[tuple[int, str | None, str | None]] = []
        for token_id in range(max(self.vocab_size, other.vocab_size)):
            mine, theirs = self.id_to_token(token_id), other.id_to_token(token_id)
            if mine != theirs:
                differences.append((token_id, mine, theirs))
                if len(differences) == limit:
                    break
        return differences

    def _template(self, with_tools: bool) -> str:
        template = self.chat_template
        if isinstance(template, Mapping):
            template = template.get("tool_use" if with_tools else "default") or template.get("default")
        if not template:
            raise RequestError("this model has no chat template: send plain text to completions, or give a template")
        return template

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self.backend.get_added_tokens_decoder())

    @cached_property
    def _spelling(self) -> str:
        """How tokens spell bytes: `byte_level`, `sentencepiece` or `plain`, by what the decoder undoes."""
        decoder = self.backend.decoder
        state = json.loads(decoder.__getstate__()) if decoder is not None else {}
        kinds = {part.get("type") for part in state.get("decoders", [state])}
        if "ByteLevel" in kinds:
            return "byte_level"
        return "sentencepiece" if kinds & {"ByteFallback", "Metaspace"} else "plain"


def tokenizer_from_directory(directory: Path, *, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a model's directory.

    Raises:
        ModelError: there is none, it is damaged, or only a slow Python one exists.
    """
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"{directory}: no tokenizer ({', '.join(TOKENIZER_FILES[:3])}); name one with tokenizer=, or set "
            "skip_tokenizer_init to work with token ids only"
        )
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(
            os.fspath(directory), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # transformers raises whatever the file's reader did
        raise ModelError(f"{directory}: its tokenizer cannot be loaded: {error}") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(
            f"{directory}: only a Python tokenizer ({type(loaded).__name__}) exists; save its fast version "
            "(tokenizer.json) there"
        )
    names = {key: str(value) for key, value in loaded.special_tokens_map.items() if isinstance(value, str)}
    return Tokenizer(backend, chat_template=loaded.chat_template, special_tokens=names)


@cache
def _byte_level_codes() -> dict[str, int]:
    """GPT-2's printable character for every byte, inverted."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
