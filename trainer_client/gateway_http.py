"""One request to the gateway: its answer, or its error in the class of its code. Shared by the SDK's HTTP clients."""

from __future__ import annotations

from collections.abc import Mapping

import httpx
import msgspec

from protos.decoding import decode_json
from protos.errors import BY_CODE, Conflict, InvalidRequest, LaminarError, OutOfCapacity, Unavailable

ADDRESS = "pass the URL that `gateway serve` prints, such as http://127.0.0.1:8080"
WRONG_SERVER = "is another server listening there? `gateway serve` prints its URL"


class _ErrorBody(msgspec.Struct):
    message: str
    code: str | None = None


class _ErrorAnswer(msgspec.Struct):
    error: _ErrorBody


async def request(
    http: httpx.AsyncClient,
    url: str,
    path: str,
    *,
    body: bytes | None = None,
    query: Mapping[str, str | int] | None = None,
    accept: str = "application/json",
    timeout_s: float,
) -> bytes:
    """`body`: JSON; None makes it a GET. Raises LaminarError: Unavailable if nobody answers, else the gateway's own."""
    headers = {"Accept": accept, "Content-Type": "application/json"}
    try:
        answer = await http.request(
            "GET" if body is None else "POST",
            url + path,
            content=body,
            params=query,
            headers=headers,
            timeout=timeout_s,
        )
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise InvalidRequest(f"gateway address {url!r}: {error}", hint=ADDRESS) from error
    except httpx.TransportError as error:
        reason = str(error) or type(error).__name__
        raise Unavailable(f"no answer from the gateway at {url}: {reason}", hint=ADDRESS) from error
    except RuntimeError as error:
        if http.is_closed:
            raise Conflict("this client is closed", hint="open a new one; a closed client is not used again") from error
        raise
    if answer.is_error:
        raise error_of(answer, url)
    return answer.content


def error_of(answer: httpx.Response, url: str) -> LaminarError:
    """The gateway's error, in the class of its code."""
    try:
        body = decode_json(answer.content, _ErrorAnswer).error
    except msgspec.DecodeError:
        return Unavailable(f"{url} answered {answer.status_code} without a gateway's error body", hint=WRONG_SERVER)
    kind = BY_CODE.get(body.code or "", LaminarError)
    if issubclass(kind, OutOfCapacity):
        return kind(body.message, retry_after_s=_seconds(answer.headers.get("Retry-After", "")))
    return kind(body.message)


def _seconds(retry_after: str) -> float:
    """The seconds of a Retry-After header; 1 s for any other form: a proxy may send a date."""
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        return 1.0
