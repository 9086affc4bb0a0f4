"""The small routes: health, version, models, metrics, embeddings, tokenizing."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from foredraft.serve.errors import ApiError, JsonResponse
from foredraft.serve.params import template_messages
from foredraft.serve.protocol import DetokenizeBody, EmbeddingBody, TokenizeBody
from foredraft.serve.state import state_of
from foredraft.serve.streaming import answered

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the engine takes and steps requests; 503 when it drains or is stuck."""
    engine = state_of(request).engine
    if not engine.is_running:
        raise ApiError(503, "shutting down, or not started", code="shutting_down")
    if engine.is_stuck:
        raise ApiError(503, "the engine is stuck: its steps fail or do not end", code="stuck")
    return Response(status_code=200)


@router.get("/version")
async def version(request: Request) -> Response:
    """The version of foredraft."""
    return JsonResponse({"version": state_of(request).version})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus' exposition."""
    text = state_of(request).metrics.text()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The names that clients may ask for."""
    server = state_of(request)
    names = [*server.names, *(name for name in server.embeddings.names if name not in server.names)]
    return JsonResponse({"object": "list", "data": [_model(request, name) for name in names]})


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> Response:
    """One of them."""
    server = state_of(request)
    if name not in server.embeddings.names:
        server.model_name(name)
    return JsonResponse(_model(request, name))


def _model(request: Request, name: str) -> dict[str, Any]:
    server = state_of(request)
    return {
        "id": name,
        "object": "model",
        "created": server.started,
        "owned_by": "foredraft",
        "root": server.llm.config.model if name in server.names else name,
        "max_model_len": server.max_model_len if name in server.names else server.embeddings.embedder.max_model_len,
    }


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingBody, request: Request) -> Response:
    """Vectors of texts."""
    server = state_of(request)
    server.note_unknown(body)

    async def work() -> Response:
        with server.admitted(1):
            return JsonResponse(await server.embeddings.answer(body, server))

    return await answered(request, work())


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """The token ids of a prompt or of a rendered conversation."""
    server = state_of(request)
    server.model_name(body.model)
    server.note_unknown(body)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: give either prompt or messages", param="prompt")
    if body.messages is not None:
        messages = template_messages(body.messages)
        server.check_length("".join(message["content"] for message in messages), "messages")
        opening = body.add_generation_prompt
        prompt: Any = await server.engine.off_loop(lambda: server.llm.rendered(messages, add_generation_prompt=opening))
        ids = prompt["prompt_token_ids"]
    else:
        text = body.prompt or ""
        server.check_length(text, "prompt")
        special = body.add_special_tokens is not False
        ids = await server.engine.off_loop(server.tokenizer.encode, text, special)
    found = {"count": len(ids), "max_model_len": server.max_model_len, "tokens": ids}
    if body.return_token_strs:
        found["token_strs"] = [server.tokenizer.id_to_token(token) for token in ids]
    return JsonResponse(found)


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """The text of token ids."""
    server = state_of(request)
    server.model_name(body.model)
    server.note_unknown(body)
    size = server.llm.model.config.vocab_size
    if not all(0 <= token < size for token in body.tokens):
        raise ApiError(400, f"tokens: ids are from 0 to {size - 1}", param="tokens")
    text = await server.engine.off_loop(lambda: server.tokenizer.decode(body.tokens, skip_special_tokens=False))
    return JsonResponse({"prompt": text})
