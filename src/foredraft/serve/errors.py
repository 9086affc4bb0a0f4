"""Errors as OpenAI's clients know them: `{"error": {"message", "type", "param", "code"}}` with a fitting status."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from foredraft.errors import ContextLengthError, EngineStoppedError, ForedraftError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


SCALARS = ("str", "int")
"""Types that pydantic names in the place of an error."""
_TEXTS = "a string, token ids, or a list of strings or of lists of token ids"
ALTERNATIVES = {"prompt": _TEXTS, "input": _TEXTS, "stop": "a string or a list of strings"}
"""What fields of several types take."""


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        param: the request's field at fault.
        code: what OpenAI's clients switch on.
        headers: beside the usual ones.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The HTTP answer."""
        return JsonResponse(self.body, self.status, self.headers)


class JsonResponse(Response):
    """JSON that can hold whatever a client sent, lone surrogates too: they stay escaped."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content)


def encode(content: Any) -> bytes:
    """Content as JSON in UTF-8."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")  # a lone surrogate becomes JSON's own escape of it


def api_error(error: Exception) -> ApiError:
    """What a client is told of an error: a `ForedraftError` in full, a bug of ours by its type alone."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineStoppedError):
        return ApiError(503, str(error), code="shutting_down", headers={"Retry-After": "5"})
    if isinstance(error, ForedraftError):
        field, colon, _ = str(error).partition(":")
        code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
        return ApiError(400, str(error), param=field if colon and field.isidentifier() else None, code=code)
    return ApiError(500, f"unexpected {type(error).__name__} in the server (a bug of foredraft's; its log has more)")


def install_error_handlers(app: FastAPI) -> None:
    """Answers every error in OpenAI's shape."""

    async def told(_: Request, error: Exception) -> Response:
        return api_error(error).response()

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _from_validation(error).response()

    async def http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}.get(error.status_code)
        answer = ApiError(error.status_code, str(error.detail), code=code, headers=error.headers)
        return answer.response()

    app.add_exception_handler(ApiError, told)
    app.add_exception_handler(ForedraftError, told)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, told)


def _from_validation(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body, as a 400; OpenAI's servers never answer 422."""
    found = error.errors()
    # A value may be of several types: that it is too long says more than that it is none of the others.
    first = next((each for each in found if each["type"] == "too_long"), found[0])
    place = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    if not place:
        return ApiError(400, "the body is not a JSON object, or is not sent as `Content-Type: application/json`")
    # Names of union members, which pydantic puts between the parts, mean nothing to a client.
    named = [part for part in place if "[" not in part and not part[:1].isupper() and part not in SCALARS]
    param = ".".join(named) or None
    if param in ALTERNATIVES and first["type"].endswith("_type"):
        return ApiError(400, f"{param}: expected {ALTERNATIVES[param]}", param=param)
    message = str(first["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"{param}: {message}" if param else message, param=param)
