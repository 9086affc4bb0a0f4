"""Builds a tokenizer from GGUF metadata: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`).

Pre-tokenisation follows llama.cpp's types by name. An unknown name is refused: another split gives other ids,
and a model fed with those answers worse without any error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers import (
    Tokenizer as Backend,
)

from foredraft.errors import ModelError
from foredraft.models.gguf_file import GGUFFile
from foredraft.models.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LATER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """One of llama.cpp's pre-tokenizer types.

    Args:
        patterns: the text is split by each in turn; what matches becomes a piece, and so does what lies
            between.
        ignore_merges: a piece that is a token as a whole is taken without merging.
        add_bos: whether BOS is prepended where the metadata does not say.
        nfc: normalise to NFC first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_LLAMA3 = PreTokenizer((_LATER.replace("DIGITS", "{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((_LATER.replace("DIGITS", ""),), nfc=True)
_DIGITS_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": PreTokenizer(_LLAMA3.patterns),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": PreTokenizer(_QWEN2.patterns),
    "megrez": _QWEN2,
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
}


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer:
    """The tokenizer in a GGUF file's metadata.

    Raises:
        ModelError: no vocabulary, or a tokenizer or pre-tokenizer of an unknown kind.
    """
    metadata = file.metadata
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{file.path}: no tokenizer in the metadata; name one with tokenizer=")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelError(f"{file.path}: the vocabulary has {len(tokens) - len(vocab)} tokens twice")
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    try:
        if kind == "gpt2":
            backend, add_bos = _byte_level(file, vocab)
        elif kind == "llama":
            backend, add_bos = _sentencepiece(file, vocab, types)
        else:
            raise ModelError(f"{file.path}: tokenizer {kind!r} is not supported; known: gpt2, llama")
    except ModelError:
        raise
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ModelError(f"{file.path}: the vocabulary is inconsistent: {error}") from error

    special = {CONTROL, UNKNOWN} if kind == "llama" else {CONTROL}
    backend.add_special_tokens(
        [AddedToken(tokens[i], special=True, normalized=False) for i, t in enumerate(types) if t in special]
    )
    backend.add_tokens(
        [AddedToken(tokens[i], special=False, normalized=False) for i, t in enumerate(types) if t == USER_DEFINED]
    )
    names = {
        name: tokens[metadata[key]]
        for name, key in (
            ("bos_token", "tokenizer.ggml.bos_token_id"),
            ("eos_token", "tokenizer.ggml.eos_token_id"),
            ("unk_token", "tokenizer.ggml.unknown_token_id"),
            ("pad_token", "tokenizer.ggml.padding_token_id"),
        )
        if key in metadata and metadata[key] < len(tokens)
    }
    first = names.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", add_bos) else None
    last = names.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if first or last:
        added = [token for token in (first, last) if token]
        backend.post_processor = processors.TemplateProcessing(
            single=[*([first] if first else []), "$A", *([last] if last else [])],
            special_tokens=[(token, vocab[token]) for token in dict.fromkeys(added)],
        )
    return Tokenizer(backend, chat_template=_template(metadata), special_tokens=names)


def _byte_level(file: GGUFFile, vocab: dict[str, int]) -> tuple[Backend, bool]:
    name = file.metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"{file.path}: pre-tokenizer {name!r} is not supported (known: {', '.join(PRE_TOKENIZERS)}); "
            "name the model's original tokenizer with tokenizer="
        )
    pre = PRE_TOKENIZERS[name]
    merges = [_pair(merge) for merge in file.metadata.get("tokenizer.ggml.merges", [])]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _sentencepiece(file: GGUFFile, vocab: dict[str, int], types: list[int]) -> tuple[Backend, bool]:
    scores = file.metadata.get("tokenizer.ggml.scores") or [0.0] * len(vocab)
    unknown = next((token for token, index in vocab.items() if types[index] == UNKNOWN), None)
    backend = Backend(
        models.BPE(
            vocab=vocab,
            merges=_merges_by_score(vocab, scores, types),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    # A space before every stretch of text between special tokens, as llama.cpp does.
    prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    undo: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*undo, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return backend, True


def _merges_by_score(vocab: dict[str, int], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best score first: SentencePiece's order as BPE merges."""
    normal = {token for token, index in vocab.items() if types[index] == NORMAL}
    merges = []
    for token in normal:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                merges.append((-scores[vocab[token]], vocab[token], vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _template(metadata: dict[str, Any]) -> str | dict[str, str] | None:
    """The metadata's chat template, or all of them by name when there are several."""
    prefix = "tokenizer.chat_template."
    named = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    default = metadata.get("tokenizer.chat_template")
    if named and default:
        return {**named, "default": default}
    return default
