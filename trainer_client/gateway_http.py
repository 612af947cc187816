"""One request to the gateway: its answer, or its error in the class of its code. Shared by the SDK's HTTP clients.

`patiently` and `Retry` send it again while the gateway is away: it may be starting. What answers there and is no
gateway is an error at once.

`request` is for small answers. `download` is for batches of trajectories, which have megabytes: the body goes from the
kernel into the memory that its reader keeps, with one copy. Through httpx a body of 12 MB costs ten times the processor
time, mostly for its pieces of 64 KiB.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import math
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

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

_CUT = ("peer closed connection", "Server disconnected")
"""How httpx begins its errors for an answer that ends too soon, or does not come; it has one class for all."""


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


def _no_http(url: str, error: object) -> WrongServer:
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


@contextlib.contextmanager
def named_errors(http: httpx.AsyncClient | httpx.Client, url: str) -> Iterator[None]:
    """Errors of httpx in a request to the gateway at `url`, as LaminarError."""
    try:
        yield
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise InvalidRequest(f"gateway address {url!r}: {error}", hint=ADDRESS) from error
    except httpx.TransportError as error:
        _refuse_tls(url, error)
        if isinstance(error, httpx.RemoteProtocolError) and not str(error).startswith(_CUT):
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
    headers = {"Accept": accept, "Content-Type": "application/json", "Connection": "close", **(credentials or {})}
    exchange = _Exchange(target, timeout_s)
    try:
        answer = await exchange.answer(body, headers)
    except (http.client.HTTPException, OSError) as error:
        _refuse_tls(url, error)
        raise _named(error, exchange, url, timeout_s) from error
    if not answer.is_success:
        raise error_of(answer, url)
    return exchange.body.toreadonly()


def _named(error: Exception, exchange: _Exchange, url: str, timeout_s: float) -> LaminarError:
    cut = isinstance(error, http.client.RemoteDisconnected | http.client.IncompleteRead)
    if isinstance(error, http.client.HTTPException) and not (cut or exchange.has_begun):
        what = "illegal status line: " if isinstance(error, http.client.BadStatusLine) else ""
        return _no_http(url, f"{what}{error}")
    reason = f"it was silent for {timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
    if cut:
        reason = "it closed the connection before its answer ended"
    kind = NoAnswer if exchange.is_connected else Unavailable
    return kind(f"no answer from the gateway at {url}: {reason or type(error).__name__}", hint=ADDRESS)


class _Exchange:
    """One request and its answer on a connection of its own, in a thread, since `http.client` blocks: it receives a
    body of known length where that stays, with one copy."""

    def __init__(self, target: httpx.URL, timeout_s: float) -> None:
        secure = {"context": _certificates()} if target.scheme == "https" else {}
        kind: Any = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._target = target
        self._connection: http.client.HTTPConnection = kind(target.host, target.port, timeout=timeout_s, **secure)
        self._left = False  # by the caller
        self.is_connected = self.has_begun = False  # the second: its head has come
        self.body = memoryview(b"")

    async def answer(self, body: bytes, headers: Mapping[str, str]) -> httpx.Response:
        """The answer's head, with the body of an error; any other is in `body`. A caller that is cancelled ends the
        connection at once: the gateway then gives the lease back."""
        ended: Future[httpx.Response] = Future()
        ended.set_running_or_notify_cancel()  # so that the thread may set it, whoever was cancelled

        def run() -> None:
            try:
                ended.set_result(self._exchange(body, headers))
            except BaseException as error:  # noqa: BLE001  (it is raised where the answer is awaited)
                ended.set_exception(error)
            finally:
                self._connection.close()

        threading.Thread(target=run, name="download", daemon=True).start()
        try:
            return await asyncio.wrap_future(ended)
        except asyncio.CancelledError:
            self._left = True
            self._leave()
            raise

    def _exchange(self, body: bytes, headers: Mapping[str, str]) -> httpx.Response:
        self._connection.connect()
        self.is_connected = True
        if self._left:
            self._leave()
        self._connection.request("POST", self._target.raw_path.decode("ascii"), body, headers)
        answer = self._connection.getresponse()
        self.has_begun = True
        self.body = _read(answer)
        content = b"" if 200 <= answer.status < 300 else bytes(self.body)
        return httpx.Response(answer.status, headers=answer.getheaders(), content=content)

    def _leave(self) -> None:
        sock = self._connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):  # the thread has closed it meanwhile
                sock.shutdown(socket.SHUT_RDWR)


def _read(answer: http.client.HTTPResponse) -> memoryview:
    """The body. IncompleteRead where it ends early."""
    if answer.length is None:
        return memoryview(answer.read())
    # Large arrays of numpy lie in huge pages: a `bytearray` of the size costs a page fault each 4 KiB.
    body, filled = np.empty(answer.length, np.uint8).data, 0
    while filled < len(body):
        if not (num := answer.readinto(body[filled:])):
            raise http.client.IncompleteRead(b"", len(body) - filled)
        filled += num
    return body


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
