"""Errors in the format of OpenAI's API: one mapping from our vocabulary to bodies, headers and retry advice.

Invariants:
- every error's body is `{"error": {"message", "type", "param", "code"}}`, also inside a stream;
- on Anthropic's routes it is `{"type": "error", "error": {"type", "message"}, "request_id"}`; the id is a header, too;
- `x-should-retry: false` stops an SDK from retrying where no retry can succeed; Retry-After says when another may.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from protos.errors import (
    InvalidRequest,
    LaminarError,
    Misdirected,
    NotFound,
    OutOfCapacity,
    TooLarge,
    Unauthenticated,
    UnsupportedField,
    VersionUnknown,
)
from protos.foreign_text import quoted

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


class TooSlow(InvalidRequest):
    """A request that did not arrive in its time."""

    code = "request_timeout"
    http_status = 408


class Internal(LaminarError):
    """An unexpected error of the gateway itself; its log has the details."""


class BodyTooLarge(TooLarge):
    """A body that would take too much once it is decoded."""

    http_status = 413


class ContextExceeded(TooLarge):
    """A prompt that leaves no room in the model's context. Clients look for OpenAI's code and wording."""

    code = "context_length_exceeded"

    def __init__(self, param: str, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.param = param


class HeadTooLarge(InvalidRequest):
    """The head of a request has too many or too long headers."""

    code = "head_too_large"
    http_status = 431


def no_http(message: str) -> LaminarError:
    """`message`: the parser's, over several lines; the bytes that it quotes are left out."""
    what = " ".join(message.split(":")[0].split())[:200]
    if what.startswith(("Got more than", "Too many headers")):
        return HeadTooLarge(f"the head of the request is too large: {what}", hint="send fewer or shorter headers")
    return InvalidRequest(f"the request is no HTTP: {what or 'it does not parse'}", hint="send HTTP/1.1")


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


ANTHROPIC_ROUTES = "/v1/messages"
"""In the paths of the routes whose errors are Anthropic's."""
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's `type` for an HTTP status; for others "invalid_request_error" below 500 and "api_error" from there."""


def anthropic_error(error: LaminarError) -> dict[str, Any]:
    """`details`: of an error that Anthropic's clients recognise by them. Coding agents recognise a context that is
    exceeded by Anthropic's wording, and shorten their history."""
    exceeded = "prompt is too long: " if error.code == ContextExceeded.code else ""
    found = _anthropic(error.http_status, exceeded + str(error))
    if details := getattr(error, "details", None):
        found["error"]["details"] = details
    return found


def _anthropic(status: int, message: str) -> dict[str, Any]:
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_headers(error: LaminarError) -> dict[str, str]:
    """Whether, when and where to retry. The official SDKs obey the first two; on their own they would retry any 409."""
    if isinstance(error, OutOfCapacity | VersionUnknown):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after_s))), "x-should-retry": "true"}
    if isinstance(error, Unauthenticated):
        return {"WWW-Authenticate": "Bearer", "x-should-retry": "false"}
    if isinstance(error, Misdirected) and error.url:
        return {error.url_header: error.url, "x-should-retry": "false"}
    return {"x-should-retry": "true" if error.http_status >= 500 else "false"}


def error_bytes(error: LaminarError) -> bytes:
    return json.dumps(error_body(error)).encode()


def error_response(error: LaminarError, path: str = "") -> web.Response:
    """`path`: of the request."""
    if ANTHROPIC_ROUTES in path:
        return _anthropic_response(anthropic_error(error), error.http_status, error_headers(error))
    return web.json_response(error_body(error), status=error.http_status, headers=error_headers(error))


def _anthropic_response(body: dict[str, Any], status: int, headers: Mapping[str, str]) -> web.Response:
    request_id = f"req_{secrets.token_hex(12)}"
    return web.json_response(
        {**body, "request_id": request_id}, status=status, headers={**headers, "request-id": request_id}
    )


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns every error into an error response: those of the vocabulary, of HTTP, and unexpected ones."""
    try:
        return await handler(request)
    except LaminarError as e:
        if e.http_status >= 500:
            log.warning("%s %s: %s", request.method, quoted(request.path), e)
        return error_response(e, request.path)
    except web.HTTPNotFound:
        return error_response(NotFound(f"no route {request.path}", hint=_meant(request)), request.path)
    except web.HTTPMethodNotAllowed as e:
        allowed = ", ".join(sorted(e.allowed_methods))
        return _refused(
            request, 405, f"{request.path} takes {allowed}, not {request.method}", "method_not_allowed", e.headers
        )
    except web.HTTPRequestEntityTooLarge as e:
        return _refused(request, 413, e.text or "the body is too large", "too_large", {})
    except web.HTTPException as e:
        if e.status < 400:
            raise
        return _refused(request, e.status, e.reason, error_type(e.status), {})
    except (web.RequestPayloadError, HttpProcessingError) as e:  # its transfer or content encoding is broken
        return error_response(InvalidRequest(f"the body cannot be read: {str(e)[:200]}"), request.path)
    except ConnectionError:  # the client is gone: nobody is left to notify
        raise
    except Exception as e:
        if request.writer.output_size > 0:  # a response has begun: only a broken connection shows the error
            raise
        return error_response(unexpected(request, e), request.path)


def unexpected(request: web.Request, error: Exception) -> Internal:
    """The client's error for an unexpected exception, which is logged with its traceback."""
    log.error("%s %s failed", request.method, quoted(request.path), exc_info=error)
    return Internal(f"the gateway failed on this request ({type(error).__name__})", hint="its log says more")


def _refused(request: web.Request, status: int, message: str, code: str, headers: Mapping[str, str]) -> web.Response:
    kept = {"x-should-retry": "false", **({"Allow": headers["Allow"]} if "Allow" in headers else {})}
    if ANTHROPIC_ROUTES in request.path:
        return _anthropic_response(_anthropic(status, message), status, kept)
    body = {"error": {"message": message, "type": error_type(status), "param": None, "code": code}}
    return web.json_response(body, status=status, headers=kept)


def _meant(request: web.Request) -> str:
    """The commonest mistakes: a browser at the root; a base_url without its /v1, or, of Anthropic's client, with it."""
    if request.path == "/":
        return "the dashboard is at /ui, OpenAI's API at /v1"
    if "/v1/v1/messages" in request.path:
        return "the base_url of Anthropic's client does not end in /v1"
    if request.path.endswith(("/chat/completions", "/completions", "/models")) and "/v1/" not in request.path:
        return "the base_url ends in /v1"
    return "completions are at /v1/chat/completions and /v1/completions; GET /openapi.json lists every route"
