"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from time import perf_counter
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from foredraft.errors import RequestError
from foredraft.sampling.params import StructuredOutputs
from foredraft.serve.answers import Answers, running
from foredraft.serve.chat_choice import ChatChoice
from foredraft.serve.errors import ApiError, JsonResponse
from foredraft.serve.params import chat_params, response_constraint, template_messages, template_options, text_of
from foredraft.serve.protocol import ChatBody
from foredraft.serve.state import ServerState, state_of
from foredraft.serve.streaming import EventStream, answered
from foredraft.serve.tools import ToolReader, forced_calls

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answers a conversation."""
    server, began = state_of(request), perf_counter()
    model = server.model_name(body.model)
    server.note_unknown(body)
    params = chat_params(body, _constraint(body, server), server.settings.seed)
    prompt = await _prompt(body, server)

    async with AsyncExitStack() as stack:
        context = running(server, body, [prompt], params, model=model, prefix="chatcmpl", began=began)
        if not body.stream:
            return await answered(request, _whole(body, context))
        answers = await stack.enter_async_context(context)
        return EventStream(_chunks(body, answers), stack.pop_all().aclose)
    raise AssertionError


def _uses_tools(body: ChatBody) -> bool:
    return bool(body.tools) and body.tool_choice != "none"


def _constraint(body: ChatBody, server: ServerState) -> StructuredOutputs | None:
    """The grammar of `response_format` or of a forced tool call."""
    constraint = response_constraint(body.response_format)
    if not body.tools:
        if body.tool_choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice: there are no tools to choose from", param="tool_choice")
        return constraint
    if not _uses_tools(body):
        return constraint
    if server.tool_style is None:
        raise ApiError(
            400,
            "tools: this model's chat template knows no tools; serve a model that does, or give --chat-template",
            param="tools",
        )
    try:
        forced = forced_calls(body.tools, body.tool_choice, server.tool_style, body.parallel_tool_calls)
    except RequestError as error:
        raise ApiError(400, str(error), param="tool_choice") from None
    if forced is not None and constraint is not None:
        raise ApiError(400, "response_format: contradicts a forced tool_choice; give one of them", param="tool_choice")
    return forced or constraint


async def _prompt(body: ChatBody, server: ServerState) -> dict[str, Any]:
    """The conversation rendered and checked, with the text that it is expected to give."""
    messages = template_messages(body.messages)
    server.check_length("".join(message["content"] for message in messages), "messages")
    options = template_options(body)
    if _uses_tools(body):
        assert body.tools is not None
        options["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    rendered = await server.engine.off_loop(lambda: server.llm.rendered(messages, **options))
    assert isinstance(rendered, dict)
    server.check_input(rendered["prompt"])
    if body.prediction is not None:
        predicted = text_of(body.prediction.content, "prediction")
        server.check_length(predicted, "prediction")
        rendered["prediction"] = predicted
    return rendered


def _choices(body: ChatBody, answers: Answers) -> list[ChatChoice]:
    server = answers.server
    made = []
    for index in range(answers.num_choices):
        reader = None
        if _uses_tools(body) and body.tools is not None and server.tool_style is not None:
            names = [tool.function.name for tool in body.tools]
            reader = ToolReader(server.tool_style, names, body.parallel_tool_calls)
        top = (body.top_logprobs or 0) if body.logprobs else None
        made.append(ChatChoice(index, reader, server.tokenizer, top, body.speculation.origins))
    return made


async def _whole(body: ChatBody, context: Any) -> Response:
    async with context as answers:
        choices = _choices(body, answers)
        deltas: list[list[dict[str, Any]]] = [[] for _ in choices]
        async for index, shown in answers.shown():
            deltas[index] += choices[index].feed(shown)
        told = [choice.whole(parts) for choice, parts in zip(choices, deltas, strict=True)]
        return JsonResponse({**answers.head("chat.completion"), "choices": told, "usage": answers.usage()})


async def _chunks(body: ChatBody, answers: Answers) -> AsyncIterator[Any]:
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    head = {**answers.head("chat.completion.chunk"), **({"usage": None} if with_usage else {})}
    choices = _choices(body, answers)
    async for index, shown in answers.shown():
        for choice in choices[index].feed(shown):
            yield {**head, "choices": [choice]}
    if with_usage:
        yield {**head, "choices": [], "usage": answers.usage()}
