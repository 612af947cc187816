"""HTTP to an engine of any dialect: control calls with a deadline each, and event streams.

- a control call that fails in any way is `EngineFailed`, with method, address and reason;
- a stream that breaks is `StreamCut` with the reason; a request that no engine would accept is `RequestRefused`;
- leaving a stream early closes its connection, which aborts the request in the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar
from urllib.parse import urljoin, urlsplit

import msgspec

from gateway.engines.base import (
    CONTROL_TIMEOUT_S,
    AdapterContext,
    CutReason,
    EngineFailed,
    PassedAnswer,
    RequestRefused,
    StreamCut,
    Tls,
    system_tls,
)
from gateway.engines.connections import Events, Wire
from gateway.engines.http1 import Refused
from protos.decoding import decode_json

ERROR_SHOWN = 500
REDIRECTS_MAX = 5
DEFAULT_PORTS = {"http": 80, "https": 443}
CONTROL_BYTES_MAX = 4 << 20
"""Of a control call's response: metrics are the longest, about 100 KiB."""

T = TypeVar("T")


class _Reason(msgspec.Struct):
    message: str


class _Failure(msgspec.Struct):
    """An error in the form of OpenAI and vLLM, or in SGLang's."""

    error: _Reason | None = None
    message: str | None = None


class _Tokenized(msgspec.Struct):
    tokens: tuple[int, ...]


def reason_in(text: str) -> str:
    """The message in the body of an error response, in one line; the body itself where it has none."""
    try:
        failure = decode_json(text, _Failure)
    except (msgspec.MsgspecError, RecursionError):
        failure = _Failure()
    message = failure.error.message if failure.error is not None else failure.message
    return one_line(text if message is None else message)


def one_line(text: str) -> str:
    return " ".join(text.split())[:ERROR_SHOWN]


class EngineHttp:
    """Connections to one server. `stall_timeout_s`: silence on a stream for longer counts as a cut.

    `control_timeout_s`: for a whole control call without a deadline of its own. `not_found_hint`: advice for when a
    control route is not there. `tls`: for https.
    """

    def __init__(
        self,
        url: str,
        *,
        stall_timeout_s: float,
        control_timeout_s: float = CONTROL_TIMEOUT_S,
        not_found_hint: str = "",
        tls: Tls = system_tls,
    ) -> None:
        self.url = url.rstrip("/")
        self._not_found_hint = not_found_hint
        self._control_timeout_s = control_timeout_s
        self._wire = Wire(self.url, stall_timeout_s=stall_timeout_s, tls=tls)

    async def close(self) -> None:
        await self._wire.close()

    # -- streams

    @asynccontextmanager
    async def stream(self, path: str, body: object, traceparent: str = "") -> AsyncIterator[Events]:
        """POSTs and yields the data of each event, up to and without `[DONE]`. Raises StreamCut or RequestRefused."""
        try:
            async with self._wire.post(path, msgspec.json.encode(body), traceparent) as events:
                yield events
        except Refused as e:
            if (reason := cut_reason(e.status)) is None:
                raise RequestRefused(f"{self.url} refused the request: {reason_in(e.text)}") from e
            raise StreamCut(reason, f"{self.url} answered {e.status}: {reason_in(e.text)}") from e

    async def pass_on(self, path: str, body: bytes, *, stall_timeout_s: float) -> PassedAnswer:
        """POSTs a client's own body; the response is unchanged, whatever its status. Raises StreamCut."""
        return await self._wire.pass_on(path, body, stall_timeout_s=stall_timeout_s)

    # -- control

    async def get(self, path: str, kind: type[T]) -> T:
        return self._decode("GET", path, await self.text("GET", path), kind)

    async def post(self, path: str, body: object | None = None, *, timeout_s: float | None = None) -> str:
        return await self.text("POST", path, body, timeout_s=timeout_s)

    async def text(self, method: str, path: str, body: object | None = None, *, timeout_s: float | None = None) -> str:
        """The response's body. EngineFailed when there is none in time, or its status is an error's."""
        status, answer = await self._call(method, path, body, timeout_s)
        if status >= 400:
            outline = f"{method} {self.url}{path} answered {status}"
            raise EngineFailed(
                f"{outline}: {reason_in(answer.decode(errors='replace'))}",
                hint=self._not_found_hint if status == 404 else "",
                outline=outline,
            )
        try:
            return answer.decode()
        except UnicodeDecodeError as e:
            raise EngineFailed(f"{method} {self.url}{path} gave no text: {e}") from e

    async def status(self, method: str, path: str) -> int:
        """The response's status, whatever it is. EngineFailed when there is none in time."""
        return (await self._call(method, path, None, None))[0]

    async def tokenize(self, model: str, text: str) -> tuple[int, ...] | None:
        """The ids of `text`, by the route that all dialects share; None: it is not there, or returns no ids."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        status, answer = await self._call("POST", "/tokenize", body, None)
        if status != 200:
            return None
        try:
            return decode_json(answer, _Tokenized).tokens
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    async def _call(self, method: str, path: str, body: object | None, timeout_s: float | None) -> tuple[int, bytes]:
        """A redirect is followed within the server, as vLLM's from /metrics to /metrics/: to another one the gateway
        would carry requests wherever an engine says."""
        deadline_s = self._control_timeout_s if timeout_s is None else timeout_s
        encoded, target = None if body is None else msgspec.json.encode(body), self._wire.base + path
        try:
            async with asyncio.timeout(deadline_s):
                for _ in range(REDIRECTS_MAX):
                    if method == "GET":
                        found = await self._wire.get(target, bytes_max=CONTROL_BYTES_MAX)
                    else:
                        found = await self._wire.call(
                            target, encoded, bytes_max=CONTROL_BYTES_MAX, silence_s=2 * deadline_s
                        )
                    if not 300 <= found.status < 400:
                        return found.status, found.body
                    target = _redirected(urljoin(self.url, target), found.location)
                raise ValueError("it redirects for ever")
        except (StreamCut, TimeoutError, OSError, ValueError) as e:  # ValueError: no such host
            what = f"{method} {self.url}{path}"
            raise EngineFailed(f"{what}: {_reason(e, deadline_s)}", outline=f"{what}: {_outline(e, deadline_s)}") from e

    def _decode(self, method: str, path: str, text: str, kind: type[T]) -> T:
        try:
            return decode_json(text, kind)
        except (msgspec.DecodeError, RecursionError) as e:
            raise EngineFailed(f"{method} {self.url}{path} gave no {kind.__name__.strip('_')}: {e}") from e


class HttpAdapter:
    """The common base of the adapters."""

    NOT_FOUND_HINT = ""

    def __init__(self, url: str, context: AdapterContext) -> None:
        self._http = EngineHttp(
            url,
            stall_timeout_s=context.stall_timeout_s,
            control_timeout_s=context.control_timeout_s,
            not_found_hint=self.NOT_FOUND_HINT,
            tls=context.tls,
        )
        self.url = self._http.url
        self._context = context
        self._model = context.model
        self._load_timeout_s = context.load_timeout_s

    async def close(self) -> None:
        await self._http.close()

    async def pass_on(self, path: str, body: bytes, *, stall_timeout_s: float) -> PassedAnswer:
        return await self._http.pass_on(path, body, stall_timeout_s=stall_timeout_s)

    async def tokenize(self, text: str) -> tuple[int, ...] | None:
        return await self._http.tokenize(self._model, text)

    def _other_model(self, served: Iterable[str]) -> EngineFailed:
        return EngineFailed(
            f"{self.url} serves {sorted(served)}, not {self._model!r}",
            hint="start it under that name (vLLM, SGLang: --served-model-name), or the gateway with --model of its own",
        )

    def _check_loaded(self, version: int, label: str, *, same_incarnation: bool) -> None:
        """EngineFailed unless the engine reports the version and was not restarted by the load."""
        if label != str(version):
            raise EngineFailed(f"{self.url} reports version {label!r} after loading version {version}")
        if not same_incarnation:
            raise EngineFailed(f"{self.url} was restarted while it loaded version {version}")


def _redirected(url: str, location: str) -> str:
    """The path and query to which `location` leads, within the server of `url`."""
    try:
        here, there = urlsplit(url), urlsplit(urljoin(url, location))
        origins = [(one.scheme, one.hostname, one.port or DEFAULT_PORTS[one.scheme]) for one in (here, there)]
    except (KeyError, ValueError) as e:
        raise ValueError("it redirects to what is no address") from e
    if origins[0] != origins[1]:
        raise ValueError("it redirects to another server")
    return there._replace(scheme="", netloc="", fragment="").geturl() or "/"


def cut_reason(status: int) -> CutReason | None:
    """Why a turn is cut that an engine answers with this error. None: no other engine would accept the request either.

    An engine that sheds load (SGLang: 503 when its queue is full) has no room: no fault. One to which the gateway may
    not speak, or that lacks the route or the model, was set up wrongly: whatever the request, it fails there.
    """
    if status in (408, 429, 503):
        return "no_room"
    return None if 400 <= status < 500 and status not in (401, 403, 404) else "server_error"


def _outline(error: Exception, timeout_s: float) -> str:
    """`_reason` without bytes that the server sent: what does not speak HTTP is quoted there."""
    quotes = isinstance(error, StreamCut) and error.reason == "protocol"
    return "it does not speak HTTP as it should" if quotes else _reason(error, timeout_s)


def _reason(error: Exception, timeout_s: float) -> str:
    return str(error) or (
        f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else type(error).__name__
    )
