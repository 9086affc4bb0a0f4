"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from time import perf_counter
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from foredraft.engine.detokenizer import Detokenizer
from foredraft.serve.answers import Answers, origins, running
from foredraft.serve.choice_text import Shown, ShownToken
from foredraft.serve.embedding import listed
from foredraft.serve.errors import ApiError, JsonResponse
from foredraft.serve.logprobs import add_completion_entry, completion_logprobs
from foredraft.serve.params import completion_params
from foredraft.serve.protocol import CompletionBody
from foredraft.serve.state import ServerState, state_of
from foredraft.serve.streaming import EventStream, answered

router = APIRouter()
KIND = "text_completion"


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request) -> Response:
    """Completes prompts."""
    server, began = state_of(request), perf_counter()
    model = server.model_name(body.model)
    server.note_unknown(body)
    params = completion_params(body, server.settings.seed)
    prompts = [_prompt(each, server) for each in listed(body.prompt)]
    if not prompts:
        raise ApiError(400, "prompt: the list is empty; give at least one prompt", param="prompt")
    for prompt in prompts:
        server.check_input(_text(prompt, server))

    async with AsyncExitStack() as stack:
        context = running(server, body, prompts, params, model=model, prefix="cmpl", began=began)
        if not body.stream:
            return await answered(request, _whole(body, context))
        answers = await stack.enter_async_context(context)
        return EventStream(_chunks(body, answers), stack.pop_all().aclose)
    raise AssertionError


def _prompt(given: Any, server: ServerState) -> dict[str, Any]:
    if isinstance(given, str):
        server.check_length(given, "prompt")
        return {"prompt": given}
    return {"prompt_token_ids": given}


def _text(prompt: dict[str, Any], server: ServerState) -> str:
    """A prompt's text, for guards only where it is given as tokens."""
    if "prompt" in prompt:
        return str(prompt["prompt"])
    ids = [token for token in prompt["prompt_token_ids"] if 0 <= token < server.llm.model.config.vocab_size]
    return str(server.tokenizer.decode(ids)) if server.guard is not None else ""


class _Completions:
    """Turns what is shown of choices into OpenAI's choices, streamed or not."""

    def __init__(self, body: CompletionBody, answers: Answers) -> None:
        self.body = body
        self.answers = answers
        self.only_scored = body.echo and body.max_tokens == 0
        self._tokenizer = answers.server.tokenizer
        self._echoes = [self._echo(place) for place in range(len(answers.streams))] if body.echo else []

    def opening(self, index: int) -> str:
        """What a choice's text begins with: the prompt, when it is to be echoed."""
        return self._echoes[index // self.body.n] if self.body.echo else ""

    def prompt_logprobs(self, index: int) -> dict[str, list[Any]] | None:
        """The echoed prompt's log-probabilities; known once the choice has begun."""
        if self.body.logprobs is None or not self.body.echo:
            return None
        stream = self.answers.streams[index // self.body.n]
        found: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        text = Detokenizer(self._tokenizer, [])
        for token, entry in zip(stream.prompt_token_ids, stream.assembled.requests[0].prompt_logprobs, strict=False):
            add_completion_entry(found, token, entry, self.body.logprobs, self._tokenizer, len(text.text))
            text.append(token)
        return found

    def logprobs(self, index: int, tokens: list[ShownToken], with_prompt: bool) -> dict[str, Any] | None:
        """`choices[].logprobs` of some tokens."""
        if self.body.logprobs is None:
            return None
        offset = len(self.opening(index))
        shown = [] if self.only_scored else tokens
        found = completion_logprobs(shown, self.body.logprobs, self._tokenizer, offset)
        before = self.prompt_logprobs(index) if with_prompt else None
        return {key: before[key] + found[key] for key in found} if before else found

    def choice(self, index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        """One choice of an answer or a chunk."""
        if self.only_scored and reason is not None:
            reason = "length"
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def usage(self) -> dict[str, Any]:
        usage = self.answers.usage()
        if self.only_scored:  # the token that the step had to make was not asked for
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def _echo(self, place: int) -> str:
        assembled = self.answers.streams[place].assembled
        if assembled.prompt is not None:
            return assembled.prompt
        return str(self._tokenizer.decode(self.answers.streams[place].prompt_token_ids))


async def _whole(body: CompletionBody, context: Any) -> Response:
    async with context as answers:
        maker = _Completions(body, answers)
        texts = [maker.opening(index) for index in range(answers.num_choices)]
        tokens: list[list[ShownToken]] = [[] for _ in texts]
        async for index, shown in answers.shown():
            texts[index] += "" if maker.only_scored else shown.text
            tokens[index] += shown.tokens
        choices = [
            maker.choice(index, text, maker.logprobs(index, tokens[index], True), answers.choices[index].finish_reason)
            for index, text in enumerate(texts)
        ]
        return JsonResponse({**answers.head(KIND), "choices": choices, "usage": maker.usage()})


async def _chunks(body: CompletionBody, answers: Answers) -> AsyncIterator[Any]:
    maker = _Completions(body, answers)
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    begun: set[int] = set()
    head = answers.head(KIND)
    async for index, shown in answers.shown():
        first = index not in begun
        begun.add(index)
        text = "" if maker.only_scored else shown.text
        if first:
            text = maker.opening(index) + text
        if not (text or shown.tokens or shown.finish_reason):
            continue
        logprobs = maker.logprobs(index, shown.tokens, first)
        choice = maker.choice(index, text, logprobs, shown.finish_reason)
        yield {**head, "choices": [_with_origins(choice, shown, body)], **({"usage": None} if with_usage else {})}
    if with_usage:
        yield {**head, "choices": [], "usage": maker.usage()}


def _with_origins(choice: dict[str, Any], shown: Shown, body: CompletionBody) -> dict[str, Any]:
    return {**choice, **origins(shown)} if body.speculation.origins else choice
