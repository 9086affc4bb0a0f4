"""Puts the server together: state, routes, middleware."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles

from foredraft.engine.async_engine import AsyncEngine
from foredraft.engine.embedding import Embedder
from foredraft.engine.llm import LLM
from foredraft.errors import ConfigError
from foredraft.models.load import load_model
from foredraft.serve import chat, completions, routes
from foredraft.serve.access import BodyLimit, HeadLimit, KeyCheck
from foredraft.serve.activity import log_activity
from foredraft.serve.embedding import Embeddings
from foredraft.serve.errors import install_error_handlers
from foredraft.serve.guards import load_guards
from foredraft.serve.metrics import Metrics
from foredraft.serve.settings import MAX_HEADER_BYTES, TOOL_CALL_PARSERS, ServerSettings
from foredraft.serve.state import ServerState
from foredraft.serve.tools import format_of_template

PAGE = Path(__file__).parent / "page"


def make_state(llm: LLM, settings: ServerSettings, version: str) -> ServerState:
    """A server's state over a loaded model; raises `ConfigError` for guards, templates and tools that are of no use."""
    if llm.tokenizer is None:
        raise ConfigError("skip_tokenizer_init: the server needs the model's tokenizer")
    names = tuple(settings.served_model_name) or (llm.config.model,)
    if settings.chat_template is not None:
        llm.tokenizer.chat_template = _read_template(settings.chat_template)
    tool_style = settings.tool_call_parser or _tool_style(llm)
    if settings.enable_auto_tool_choice and tool_style is None:
        raise ConfigError(
            "enable_auto_tool_choice: this model's chat template knows no tools; give --tool-call-parser "
            f"({', '.join(TOOL_CALL_PARSERS)}), or a template that does (--chat-template)"
        )
    metrics = Metrics(names[0])
    metrics.watch(llm.engine)
    return ServerState(
        settings=settings,
        llm=llm,
        engine=AsyncEngine(llm, metrics.on_step),
        metrics=metrics,
        guard=load_guards(settings.guard, settings.guard_keywords),
        names=names,
        tool_style=tool_style,
        embeddings=_embeddings(llm, settings, names),
        version=version,
    )


def create_app(state: ServerState) -> FastAPI:
    """The application; its engine starts and stops with it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await state.engine.start()
        activity = asyncio.create_task(log_activity(state))
        try:
            yield
        finally:
            activity.cancel()
            await state.engine.stop()

    app = FastAPI(title="foredraft", version=state.version, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = state
    for module in (chat, completions, routes):
        app.include_router(module.router)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(
            PAGE / "index.html", headers={"Content-Security-Policy": "default-src 'self'; img-src data:"}
        )

    app.mount("/page", StaticFiles(directory=PAGE), name="page")
    install_error_handlers(app)
    # The last one added is the first one passed.
    app.add_middleware(BodyLimit, max_bytes=state.settings.max_body_bytes)
    app.add_middleware(KeyCheck, keys=state.settings.api_key)
    if state.settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(state.settings.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )
    app.add_middleware(HeadLimit, max_bytes=MAX_HEADER_BYTES)
    return app


def _read_template(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--chat-template {path}: cannot be read: {reason}") from error


def _tool_style(llm: LLM) -> str | None:
    template = llm.tokenizer.chat_template
    sources = template.values() if isinstance(template, dict) else [template or ""]
    return next((style for source in sources if (style := format_of_template(source))), None)


def _embeddings(llm: LLM, settings: ServerSettings, names: tuple[str, ...]) -> Embeddings:
    """Of the served model, or of the second one, which is loaded now."""
    chunk = llm.config.max_num_batched_tokens
    if settings.embedding_model is None:
        return Embeddings(Embedder(llm.model, llm.max_model_len, chunk), llm.tokenizer, names)
    loaded = load_model(llm.config, path=settings.embedding_model)
    longest = loaded.model.config.max_model_len
    return Embeddings(Embedder(loaded.model, longest, chunk), loaded.tokenizer, (settings.embedding_model,))
