"""`POST /v1/embeddings`: mean-pooled, normalised hidden states of the served model or of a second one."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from foredraft.engine.embedding import Embedder, unit
from foredraft.serve.errors import ApiError
from foredraft.serve.protocol import EmbeddingBody

if TYPE_CHECKING:
    from foredraft.serve.state import ServerState


class Embeddings:
    """Embeds one text at a time, between the engine's steps.

    Args:
        embedder: runs the model.
        tokenizer: the model's own.
        names: that clients may ask for beside the served ones; the first one is in answers.
    """

    def __init__(self, embedder: Embedder, tokenizer: Any, names: Sequence[str]) -> None:
        self.embedder = embedder
        self.tokenizer = tokenizer
        self.names = tuple(names)
        self._turn = asyncio.Lock()

    async def answer(self, body: EmbeddingBody, server: ServerState) -> dict[str, Any]:
        """OpenAI's answer to a request."""
        if body.model is not None and body.model not in self.names:
            raise ApiError(
                404,
                f"model: {body.model[:200]!r} makes no embeddings here; {self.names[0]} does",
                param="model",
                code="model_not_found",
            )
        size = self.embedder.size
        if body.dimensions is not None and body.dimensions > size:
            raise ApiError(400, f"dimensions: {body.dimensions} is above the model's {size}", param="dimensions")
        texts = await self._token_ids(body, server)
        data = []
        for index, ids in enumerate(texts):
            vector = await self._embed(ids, server)
            if body.dimensions is not None:
                vector = unit(vector[: body.dimensions])
            told = _base64(vector) if body.encoding_format == "base64" else vector.tolist()
            data.append({"object": "embedding", "index": index, "embedding": told})
        count = sum(map(len, texts))
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": body.model or self.names[0], "usage": usage}

    async def _embed(self, ids: Sequence[int], server: ServerState) -> Tensor:
        async with self._turn:
            for chunk in self.embedder.chunks(ids):
                vector = await server.engine.between_steps(chunk)
        if not bool(vector.isfinite().all()):
            raise ApiError(500, "the model's hidden states are not numbers (NaN); try dtype float32")
        return vector

    async def _token_ids(self, body: EmbeddingBody, server: ServerState) -> list[list[int]]:
        given: list[Any] = listed(body.input)
        if not given:
            raise ApiError(400, "input: the list is empty; give at least one text", param="input")
        longest, vocab_size = self.embedder.max_model_len, self.embedder.model.config.vocab_size
        texts = []
        for each in given:
            if isinstance(each, str):
                server.check_length(each, "input")
                server.check_input(each)
                each = await server.engine.off_loop(self.tokenizer.encode, each)
            if not each:
                raise ApiError(400, "input: a text is empty; give at least one token", param="input")
            if len(each) > longest:
                raise ApiError(
                    400,
                    f"input: {len(each)} tokens exceed the context of {longest} tokens; shorten the text",
                    param="input",
                    code="context_length_exceeded",
                )
            if not all(0 <= token < vocab_size for token in each):
                raise ApiError(400, f"input: token ids are from 0 to {vocab_size - 1}", param="input")
            texts.append(each)
        return texts


def listed(given: str | Sequence[Any]) -> list[Any]:
    """Prompts as a list: one text, one list of ids, or several of either."""
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given]
    return list(given)


def _base64(vector: Tensor) -> str:
    return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
