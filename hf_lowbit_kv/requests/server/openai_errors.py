"""Errors in the shape of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import JSONResponse
from transformers.cli.serving.utils import CBWorkerDeadError

#: longest value that a message shows
SHOWN = 200
#: `type` of an error by status; those of clients are `invalid_request_error`, others `server_error`
TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class Refused(HTTPException):
    """An error that is sent to the client.

    Args:
        status: of HTTP.
        message: why.
        param: the field of the request that is the reason.
        code: a name for programs.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(status, message)
        self.param, self.code = param, code


def not_allowed(name: str, value: Any, allowed: str) -> Refused:
    """The error for a value that is not allowed.

    Args:
        name: of the field, or of a part of it: `"field: part"`.
    """
    return Refused(400, f"{name}={shown(value)} is not allowed; it must be {allowed}", name.partition(":")[0])


def shown(value: Any) -> str:
    """A value in a message, shortened."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an answer that is an error."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(
    status: int, message: str, param: str | None = None, code: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    """An answer that is an error."""
    return JSONResponse(error_body(status, message, param, code), status, headers)


def answer_errors(app: FastAPI) -> None:
    """Let the application answer every error in this shape."""

    async def refused(_: Any, error: Any) -> JSONResponse:
        details = getattr(error, "param", None), getattr(error, "code", None)
        return error_response(error.status_code, str(error.detail), *details, headers=error.headers)

    async def invalid(_: Any, error: Any) -> JSONResponse:
        first = error.errors()[0]
        return error_response(400, f"the body is not a JSON object that can be read: {first['msg']}")

    async def ended(_: Any, error: Any) -> JSONResponse:
        return error_response(503, str(error))

    async def failed(_: Any, error: Any) -> JSONResponse:
        return error_response(500, f"the server failed: {type(error).__name__}")

    app.add_exception_handler(StarletteHTTPException, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(CBWorkerDeadError, ended)
    app.add_exception_handler(Exception, failed)
