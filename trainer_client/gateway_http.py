"""One request to the gateway: its answer, or its error in the class of its code. Shared by the SDK's HTTP clients.

`patiently` and `Retry` send it again while the gateway is away: it may be starting. What answers there and is no
gateway is an error at once.

`request` is for small answers. `download` is for batches of trajectories, which have megabytes: the body goes from the
kernel into the memory that its reader keeps, with one copy. Through httpx a body of 12 MB costs ten times the processor
time, mostly for its pieces of 64 KiB.
"""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import h11
import httpx
import msgspec
import numpy as np

from protos.decoding import decode_json
from protos.errors import (
    BY_CODE,
    Conflict,
    InvalidRequest,
    LaminarError,
    Misdirected,
    OutOfCapacity,
    Unavailable,
    VersionUnknown,
    WrongServer,
)
from protos.retries import Backoff, refused_tls

log = logging.getLogger(__name__)

ADDRESS = "pass the URL that `gateway serve` prints, such as http://127.0.0.1:8080"
WRONG_SERVER = "is another server listening there? `gateway serve` prints its URL"
CERTIFICATES = "SSL_CERT_FILE names a file with the certificates of the CAs to trust"

PATIENCE_S = 60.0
"""How long a request is sent again while nobody answers: the server may be starting, or starting again."""
PROXY_STATUSES = frozenset({502, 503, 504})
"""What a proxy answers for a gateway that is away."""
FULL_LOG_S = 60.0
RETRY_FIRST_S, RETRY_MAX_S = 0.2, 2.0
"""Between two tries: each pause is twice the one before, up to the second number."""

HEAD_BYTES = 1 << 16
"""Read at once until an answer's head is complete, and of a body that does not give its length."""
_EVENTS = (h11.InformationalResponse, h11.Response, h11.Data, h11.EndOfMessage)
"""Those of an answer; the others mean that h11 waits for more, or for nothing any more."""

_CUT = "peer closed connection"
"""How h11 begins its error for a body that ends too soon; it has one class for all."""


def root_of(gateway: str) -> str:
    """The URL that routes are added to, of a gateway's URL or of its OpenAI base_url."""
    return gateway.rstrip("/").removesuffix("/v1")


class NoAnswer(Unavailable):
    """The request was sent, and its answer did not come, or not whole: what came of it is in doubt."""


class Presence:
    """Whether `server` ("the gateway at URL") answers. The log gets one line when it does not and one when it does
    again, however many requests are sent again meanwhile. `seen`: it has answered before."""

    def __init__(self, server: str) -> None:
        self.seen = False
        self._server = server
        self._away_since: float | None = None
        self._full_since = -math.inf

    def answered(self) -> None:
        again = "again" if self.seen else "now"
        self.seen = True
        since, self._away_since = self._away_since, None
        if since is not None:
            log.warning("%s answers %s, after %.0f s", self._server, again, time.monotonic() - since)

    def away(self, error: Unavailable, patience_s: float) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic()
            log.warning("%s; trying again for %.0f s", error, patience_s)

    def full(self, error: OutOfCapacity) -> None:
        """It answers, and has no room: that may take long. One line a minute at most says why."""
        if (now := time.monotonic()) >= self._full_since + FULL_LOG_S:
            self._full_since = now
            log.warning("%s has no room, and is asked again: %s", self._server, error)


class Retry:
    """The tries of one request, for `patience_s` from the first failure on: a try may have waited for long before."""

    def __init__(self, presence: Presence, patience_s: float) -> None:
        self.failed = False
        """A try has failed: what came of it is in doubt."""
        self.presence = presence
        """Of the gateway that the next try goes to."""
        self._patience_s = patience_s
        self._backoff = Backoff(RETRY_FIRST_S, RETRY_MAX_S, patience_s)

    def pause_s(self, error: Unavailable | OutOfCapacity | VersionUnknown) -> float:
        """Seconds until the next try, since this one ended with `error`; raises it when the patience is at its end, and
        at once when another server answers where the right one never did. Once it did, a proxy may answer for it."""
        if isinstance(error, WrongServer) and not self.presence.seen:
            raise error
        wait_s = self._backoff.pause_s(getattr(error, "retry_after_s", 0.0))
        if wait_s is None:
            raise error
        if isinstance(error, Unavailable):
            self.failed = True
            self.presence.away(error, self._patience_s)
        if isinstance(error, OutOfCapacity):
            self.presence.full(error)
        return wait_s


T = TypeVar("T")


async def patiently(presence: Presence, send: Callable[[], Awaitable[T]]) -> T:
    """What `send` returns, called again while nobody answers."""
    retry = Retry(presence, PATIENCE_S)
    while True:
        try:
            found = await send()
        except Unavailable as error:
            await asyncio.sleep(retry.pause_s(error))
        else:
            presence.answered()
            return found


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
    headers: Mapping[str, str] | None = None,
    timeout_s: float,
) -> bytes:
    """`body`: JSON; None makes it a GET. Raises LaminarError: Unavailable if nobody answers, WrongServer if another
    server does, else the gateway's own."""
    with named_errors(http, url):
        answer = await http.request(
            "GET" if body is None else "POST",
            url + path,
            content=body,
            params=query,
            headers={"Accept": "application/json", "Content-Type": "application/json", **(headers or {})},
            timeout=timeout_s,
        )
    if not answer.is_success:  # a redirect, too: nothing has landed
        raise error_of(answer, url)
    return answer.content


def our_transport(url: str) -> dict[str, Any]:
    """Arguments of an httpx client of `url`: the address is one of the cluster, never a proxy's. InvalidRequest where
    SSL_CERT_FILE names no certificates and it begins with https. Else they may not be needed: the client trusts nobody,
    and a call that goes to https all the same, as a session's may, says why."""
    try:
        trusted = _certificates()
    except InvalidRequest:
        if url.lower().startswith("https:"):
            raise
        trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return {"trust_env": False, "verify": trusted}


def _certificates() -> ssl.SSLContext:
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        raise InvalidRequest(f"SSL_CERT_FILE cannot be read: {error}", hint=CERTIFICATES) from error


def _no_http(url: str, error: Exception) -> WrongServer:
    return WrongServer(f"what answers at {url} speaks no HTTP/1.1: {error}", hint=WRONG_SERVER)


def _refuse_tls(url: str, error: BaseException | None) -> None:
    """WrongServer for a failed handshake that fails every time; InvalidRequest where no certificates can be read."""
    refused = refused_tls(error)
    if isinstance(refused, ssl.SSLCertVerificationError):
        _certificates()  # a client that could not read them trusts nobody
        raise WrongServer(
            f"the certificate of {url} is refused: {refused.verify_message}", hint=CERTIFICATES
        ) from error
    if refused is not None:
        raise WrongServer(f"what answers at {url} speaks no TLS", hint="begin the URL with http://") from error


@contextmanager
def named_errors(http: httpx.AsyncClient | httpx.Client, url: str) -> Iterator[None]:
    """Errors of httpx in a request to the gateway at `url`, as LaminarError."""
    try:
        yield
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise InvalidRequest(f"gateway address {url!r}: {error}", hint=ADDRESS) from error
    except httpx.TransportError as error:
        cause = error.__cause__  # httpcore's; its context is OpenSSL's, or h11's unless it ended before a head
        broken = None if cause is None else cause.__context__
        _refuse_tls(url, broken)
        if isinstance(broken, h11.RemoteProtocolError) and not str(broken).startswith(_CUT):
            raise _no_http(url, error) from error
        reason = str(error) or type(error).__name__
        raise Unavailable(f"no answer from the gateway at {url}: {reason}", hint=ADDRESS) from error
    except RuntimeError as error:
        if http.is_closed:
            raise Conflict("this client is closed", hint="open a new one; a closed client is not used again") from error
        raise


async def download(
    url: str, path: str, *, body: bytes, accept: str, timeout_s: float, credentials: Mapping[str, str] | None = None
) -> memoryview:
    """The answer's body to a POST of `body` (JSON), read-only. Has a connection of its own. `timeout_s`: how long the
    gateway may be silent. `credentials`: the header of `protos.access.bearer`. Raises LaminarError like `request`, and
    NoAnswer once there was a connection."""
    try:
        target = httpx.URL(url + path)
    except httpx.InvalidURL as error:
        raise InvalidRequest(f"gateway address {url!r}: {error}", hint=ADDRESS) from error
    if target.scheme not in ("http", "https") or not target.host:
        raise InvalidRequest(f"gateway address {url!r} begins with neither http:// nor https://", hint=ADDRESS)
    answer = _Answer()
    failed: type[Unavailable] = Unavailable
    try:
        async with asyncio.timeout(timeout_s) as limit:
            loop = asyncio.get_running_loop()
            exchange = _Exchange(
                h11.Request(
                    method="POST", target=target.raw_path, headers=_headers(target, body, accept, credentials or {})
                ),
                body,
                answer,
                moved=lambda: limit.reschedule(loop.time() + timeout_s),
            )
            secure = _certificates() if target.scheme == "https" else None
            port = target.port or (80 if secure is None else 443)
            await loop.create_connection(lambda: exchange, target.host, port, ssl=secure)
            failed = NoAnswer
            try:
                await exchange.ended
            finally:
                exchange.close()  # also when the caller is cancelled: the gateway then gives the lease back
    except h11.RemoteProtocolError as error:
        if not answer.status:
            raise _no_http(url, error) from error
        raise NoAnswer(f"the answer of the gateway at {url} is broken: {error}", hint=ADDRESS) from error
    except OSError as error:
        _refuse_tls(url, error)
        silent = isinstance(error, TimeoutError) and not str(error)
        reason = f"it was silent for {timeout_s:g} s" if silent else str(error) or type(error).__name__
        raise failed(f"no answer from the gateway at {url}: {reason}", hint=ADDRESS) from error
    if not 200 <= answer.status < 300:
        raise error_of(httpx.Response(answer.status, headers=answer.headers, content=bytes(answer.body)), url)
    return answer.body.toreadonly()


def _headers(target: httpx.URL, body: bytes, accept: str, credentials: Mapping[str, str]) -> list[tuple[str, str]]:
    return [
        ("Host", target.netloc.decode("ascii")),
        ("Accept", accept),
        ("Content-Type", "application/json"),
        ("Content-Length", str(len(body))),
        ("Connection", "close"),
        *credentials.items(),
    ]


@dataclass(slots=True)
class _Answer:
    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: memoryview = field(default_factory=lambda: memoryview(b""))


class _Exchange(asyncio.BufferedProtocol):
    """One request and its answer on one connection. h11 reads the head, and the bodies that do not give their length;
    a body of known length is received where it stays."""

    def __init__(self, request: h11.Request, body: bytes, answer: _Answer, moved: Callable[[], None]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answer, self._moved = answer, moved
        self._http = h11.Connection(h11.CLIENT)
        self._request = b"".join(
            self._http.send(part) or b"" for part in (request, h11.Data(data=body), h11.EndOfMessage())
        )
        self._head = memoryview(bytearray(HEAD_BYTES))
        self._pieces: list[bytes] = []
        self._length: int | None = None  # of the body, if it is known
        self._filled = 0
        self._transport: Any = None  # asyncio.Transport, or uvloop's

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._request)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._head if self._length is None else self._answer.body[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._moved()
        if self._length is None:
            self._feed(bytes(self._head[:nbytes]))
        else:
            self._filled += nbytes
            if self._filled == self._length:
                self._end()

    def eof_received(self) -> None:
        if self._length is None and self._answer.status:
            self._feed(b"")  # the end of a body that gives no length

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(error or ConnectionResetError("it closed the connection before its answer ended"))

    def _feed(self, received: bytes) -> None:
        if self.ended.done():
            return
        try:
            self._http.receive_data(received)
            while isinstance(event := self._http.next_event(), _EVENTS):
                self._take(event)
        except h11.RemoteProtocolError as error:
            self.ended.set_exception(error)
            return
        if self._length is not None:
            self._receive_in_place(self._length)

    def _take(self, event: h11.Event) -> None:
        if isinstance(event, h11.Response):
            self._answer.status, self._answer.headers = event.status_code, list(event.headers)
            length = dict(event.headers).get(b"content-length")
            self._length = None if length is None else int(length)
        elif isinstance(event, h11.Data):
            self._pieces.append(bytes(event.data))
        elif isinstance(event, h11.EndOfMessage):
            self._answer.body = memoryview(b"".join(self._pieces))
            self._end()

    def _receive_in_place(self, length: int) -> None:
        """Takes over from h11, behind what came with the head."""
        if self.ended.done():
            return
        begun = b"".join(self._pieces)
        # Large arrays of numpy lie in huge pages: a `bytearray` of the size costs a page fault each 4 KiB.
        self._answer.body = np.empty(length, np.uint8).data
        self._answer.body[: len(begun)] = begun
        self._filled = len(begun)

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
            self.close()  # at once: no place is left to receive into

    def close(self) -> None:
        self._transport.abort()


def error_of(answer: httpx.Response, url: str) -> LaminarError:
    """The gateway's error, in the class of its code."""
    try:
        body = decode_json(answer.content, _ErrorAnswer).error
    except msgspec.DecodeError:
        away = answer.status_code in PROXY_STATUSES
        return (Unavailable if away else WrongServer)(
            f"{url} answered {answer.status_code} without a gateway's error body", hint=WRONG_SERVER
        )
    kind = BY_CODE.get(body.code or "", LaminarError)
    if issubclass(kind, OutOfCapacity):
        return kind(body.message, retry_after_s=_seconds(answer.headers.get("Retry-After", "")))
    if issubclass(kind, Misdirected):
        return kind(body.message, url=answer.headers.get(kind.url_header, ""))
    return kind(body.message)


def _seconds(retry_after: str) -> float:
    """The seconds of a Retry-After header; 1 s for any other form: a proxy may send a date."""
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        return 1.0
