"""Errors as the OpenAI API says them: one table from our vocabulary to bodies, headers and retry advice.

Invariants:
- every error answer is `{"error": {"message", "type", "param", "code"}}`, also inside a stream;
- an SDK is told not to retry what no retry can mend (`x-should-retry: false`), and when to retry what it can.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from protos.errors import InvalidRequest, LaminarError, NotFound, OutOfCapacity, UnsupportedField

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class BadField(InvalidRequest):
    """A field has a wrong type or value; `param` is its path in the body."""

    def __init__(self, param: str, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.param = param


class RefusedField(UnsupportedField):
    """A field, or a value of one, that this gateway does not support; `param` is its path."""

    def __init__(self, param: str, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.param = param


def error_type(status: int) -> str:
    """OpenAI's `type` for an HTTP status."""
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def error_body(error: LaminarError) -> dict[str, Any]:
    return {
        "error": {
            "message": str(error),
            "type": error_type(error.http_status),
            "param": getattr(error, "param", None),
            "code": error.code,
        }
    }


def error_headers(error: LaminarError) -> dict[str, str]:
    """Whether and when to try again. The official SDKs obey both headers; by themselves they would retry any 409."""
    if isinstance(error, OutOfCapacity):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after_s))), "x-should-retry": "true"}
    return {"x-should-retry": "true" if error.http_status >= 500 else "false"}


def error_response(error: LaminarError) -> web.Response:
    return web.json_response(error_body(error), status=error.http_status, headers=error_headers(error))


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns LaminarErrors, unknown routes and bodies over the size limit into error answers."""
    try:
        return await handler(request)
    except LaminarError as e:
        if e.http_status >= 500:
            log.warning("%s %s: %s", request.method, request.path, e)
        return error_response(e)
    except web.HTTPNotFound:
        return error_response(NotFound(f"no route {request.path}", hint=_meant(request)))
    except web.HTTPMethodNotAllowed as e:
        allowed = ", ".join(sorted(e.allowed_methods))
        return _refused(405, f"{request.path} takes {allowed}, not {request.method}", "method_not_allowed", e.headers)
    except web.HTTPRequestEntityTooLarge as e:
        return _refused(413, e.text or "the body is too large", "too_large", {})


def _refused(status: int, message: str, code: str, headers: Mapping[str, str]) -> web.Response:
    body = {"error": {"message": message, "type": error_type(status), "param": None, "code": code}}
    kept = {"Allow": headers["Allow"]} if "Allow" in headers else {}
    return web.json_response(body, status=status, headers={"x-should-retry": "false", **kept})


def _meant(request: web.Request) -> str:
    """The commonest mistake is a base_url without its /v1."""
    if request.path.endswith(("/chat/completions", "/completions", "/models")) and "/v1/" not in request.path:
        return "the base_url ends in /v1"
    return "completions are at /v1/chat/completions and /v1/completions; GET /openapi.json lists every route"
