"""Errors of the gateway in vLLM's format: `{"error": {"message", "type", "param", "code"}}`.

Invariant: a message is one line of Unicode text, whatever it quotes. `param` is the field that the line begins with.
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError, StarletteHTTPException
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from tailrace.app.calls import refused
from tailrace.app.calls.refused import TooLargeForQuota
from tailrace.app.calls.resume import lost_service
from tailrace.deployments.messages.errors import REFUSED

KINDS = {
    400: "BadRequestError", 401: "AuthenticationError", 403: "PermissionError", 404: "NotFoundError",
    429: "RateLimitError", 500: "InternalServerError", 503: "ServiceUnavailableError",
}  # fmt: skip
"""Error types by status; all others are a ServiceError."""

MAX_MESSAGE_CHARACTERS = 1_000
"""Maximum length of a message: it may quote a request's value, which may have megabytes."""

FIELD = re.compile(r"[a-z_][a-z0-9_]*")
BEGIN = re.compile(r"(?:[a-z_][\w.]*: )+")
MADE_NAME = re.compile(r"^prompt 'prompt-[0-9a-f]{16}'(: )?")
"""Name of a group that the request did not name."""

TYPES = {"str", "int", "float", "bool", "bytes", "list", "tuple", "dict", "none"}
"""Pydantic's names for the branches of a union, which it adds to the place of an error."""


class FieldRefused(ValueError):
    """A request's field is refused in the words of vLLM, which do not begin with its name. `param`: the name."""

    def __init__(self, message: str, param: str):
        super().__init__(message)
        self.param = param


class SampleFailed(RuntimeError):
    """A sample has ended as failed. `status`: 400 if no engine can run it, so that its request is to blame."""

    def __init__(self, error: str | None):
        self.status = 400 if (error or "").startswith(REFUSED) else 500
        super().__init__((error or "the sample has failed").removeprefix(REFUSED))


class UnknownModel(ValueError):
    """A request names a model that is not served."""


class UnknownTrajectory(ValueError):
    """There is no such trajectory, or it has ended."""


class ErrorInfo(BaseModel):
    """`code`: the status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorAnswer(BaseModel):
    """The body of any answer of 400 and above."""

    error: ErrorInfo


def error_body(status: int, message: str, kind: str | None = None, param: str | None = None) -> dict:
    """Returns vLLM's format of an error. `kind`: its type, or None for that of the status. `param`: the field, or None
    for the one that the message begins with.
    """
    text = " ".join(message.encode(errors="backslashreplace").decode().split())
    if len(text) > MAX_MESSAGE_CHARACTERS:
        text = f"{text[:MAX_MESSAGE_CHARACTERS]}..."
    if param is None and (begin := BEGIN.match(text)) is not None:
        param = begin[0].removesuffix(": ").replace(": ", ".")
    return {
        "error": {"message": text, "type": kind or KINDS.get(status, "ServiceError"), "param": param, "code": status}
    }


def line_of(errors: Sequence[dict[str, Any]]) -> str:
    """Returns the first of pydantic's errors as one line that begins with the field."""
    first = errors[0]
    parts = [part for part in first["loc"] if isinstance(part, int) or (FIELD.fullmatch(part) and part not in TYPES)]
    place = ".".join(str(part) for part in parts if part not in ("body", "query", "path"))
    message = first["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place else message


def first_cause(error: BaseException) -> BaseException:
    """Returns the first error inside a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def status_of(error: BaseException) -> int:
    """Returns the HTTP status of an error of the client."""
    if isinstance(error, SampleFailed):
        return error.status
    if isinstance(error, UnknownModel | UnknownTrajectory):
        return 404
    return refused.status_of(error) or (503 if isinstance(error, lost_service()) else 500)


def error_of(error: BaseException) -> tuple[dict, int]:
    """Returns an exception in vLLM's format, and its status."""
    cause = first_cause(error)
    status, text = status_of(cause), str(cause).strip()
    text = (
        MADE_NAME.sub(lambda made: "" if made[1] else "prompt", text.splitlines()[0]) if text else type(cause).__name__
    )
    if isinstance(cause, ValidationError):
        text = line_of(cause.errors(include_input=False, include_url=False))
    own = isinstance(cause, TooLargeForQuota | SampleFailed) and status == 400  # `app.http` reads their names
    kind = type(cause).__name__ if own else None
    param = "model" if isinstance(cause, UnknownModel) else getattr(cause, "param", None)
    return error_body(status, text, kind, param), status


def bad_request(message: str) -> dict:
    """Returns the body of an error 400."""
    return error_body(400, message)


def add_refusals(app: FastAPI, reasons: Mapping[str, str], body: Callable[[str], dict] = bad_request) -> None:
    """Adds routes that are refused: `reasons` by path. `body`: makes an answer's body of its path and reason."""
    for path, reason in reasons.items():
        refused = _refusing(body(f"{path}: {reason}"))
        app.add_api_route(path, refused, methods=["POST"], summary="Refused, with the reason")


def _refusing(content: dict) -> Callable[[], Awaitable[JSONResponse]]:
    async def refused():
        return JSONResponse(content, 400)

    return refused


def add_errors(app: FastAPI) -> None:
    """Adds the answers to exceptions of routes."""
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(StarletteHTTPException, _other)
    app.add_exception_handler(ClientDisconnect, _left)
    for kind in (ValueError, PermissionError, ExceptionGroup, SampleFailed, *lost_service(), Exception):
        app.add_exception_handler(kind, _failed)


async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
    if isinstance(error.body, bytes) and error.body:
        return JSONResponse(error_body(400, "content-type: the body has to be application/json", param="body"), 400)
    found = error.errors()
    cause = found[0].get("ctx", {}).get("error")
    return JSONResponse(error_body(400, line_of(found), param=getattr(cause, "param", None)), 400)


async def _other(_: Request, error: StarletteHTTPException) -> JSONResponse:
    return JSONResponse(error_body(error.status_code, str(error.detail)), error.status_code, error.headers)


async def _left(*_) -> JSONResponse:
    return JSONResponse(bad_request("the connection ended before the whole body had come"), 400)


async def _failed(_: Request, error: Exception) -> JSONResponse:
    body, status = error_of(error)
    return JSONResponse(body, status, {"retry-after": "1"} if status in (429, 503) else None)
