"""HTTP to an engine of any dialect: control calls with a deadline each, and event streams.

- a control call that fails in any way is `EngineFailed`, naming method, address and what was said;
- a stream that breaks is `StreamCut` with the reason; `RequestRefused` is what no other engine would take either;
- leaving a stream early closes its connection, which aborts the request in the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import aiohttp
import msgspec
from aiohttp.http_exceptions import LineTooLong

from gateway.engines.base import EngineFailed, RequestRefused, StreamCut

CONTROL_TIMEOUT_S = 10.0
LOAD_TIMEOUT_S = 300.0
CONNECT_TIMEOUT_S = 5.0
EVENT_BYTES_MAX = 4 << 20
"""One event's line: the first carries the prompt's ids."""
ERROR_SHOWN = 500

T = TypeVar("T")


class EngineHttp:
    """Connections to one server. `stall_timeout_s`: silence on a stream for longer counts as a cut.

    `control_timeout_s`: for a whole control call that names no deadline of its own. `not_found_hint`: what would be
    right when a control route is not there.
    """

    def __init__(
        self,
        url: str,
        *,
        stall_timeout_s: float,
        control_timeout_s: float = CONTROL_TIMEOUT_S,
        not_found_hint: str = "",
    ) -> None:
        self.url = url.rstrip("/")
        self._not_found_hint = not_found_hint
        self._control_timeout_s = control_timeout_s
        self._streams: set[aiohttp.ClientResponse] = set()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=EVENT_BYTES_MAX,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=stall_timeout_s),
        )
        # vLLM closes a connection after a 500: the next call on it would fail for no fault of its own.
        self._control = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),  # a load says nothing for long
        )

    async def close(self) -> None:
        for response in self._streams:  # aiohttp forgets them without a word
            response.content.set_exception(aiohttp.ClientConnectionError("the engine was taken out"))
        await self._session.close()
        await self._control.close()

    # -- streams

    @asynccontextmanager
    async def stream(self, path: str, body: object) -> AsyncIterator[AsyncIterator[bytes]]:
        """POSTs and yields the data of each event, up to and without `[DONE]`. Raises StreamCut or RequestRefused."""
        try:
            response = await self._session.post(self.url + path, json=body)
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            raise _cut_of(e, self.url) from e
        self._streams.add(response)
        try:
            if response.status != 200:
                await _raise_refusal(response)
            yield _events(response, self.url)
        finally:
            self._streams.discard(response)
            response.close()

    # -- control

    async def get(self, path: str, kind: type[T]) -> T:
        return self._decode("GET", path, await self.text("GET", path), kind)

    async def post(self, path: str, body: object | None = None, *, timeout_s: float | None = None) -> str:
        return await self.text("POST", path, body, timeout_s=timeout_s)

    async def text(self, method: str, path: str, body: object | None = None, *, timeout_s: float | None = None) -> str:
        """The answer's body. EngineFailed when there is none in time, or its status is an error's."""
        status, text = await self._ask(method, path, body, timeout_s)
        if status >= 400:
            raise EngineFailed(
                f"{method} {self.url}{path} answered {status}: {text[:ERROR_SHOWN]}",
                hint=self._not_found_hint if status == 404 else "",
            )
        return text

    async def status(self, method: str, path: str) -> int:
        """The answer's status, whatever it is. EngineFailed when there is none in time."""
        return (await self._ask(method, path, None, None))[0]

    async def _ask(self, method: str, path: str, body: object | None, timeout_s: float | None) -> tuple[int, str]:
        deadline_s = self._control_timeout_s if timeout_s is None else timeout_s
        try:
            async with (
                asyncio.timeout(deadline_s),
                self._control.request(method, self.url + path, json=body) as response,
            ):
                return response.status, await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            raise EngineFailed(f"{method} {self.url}{path}: {_said(e, deadline_s)}") from e

    def _decode(self, method: str, path: str, text: str, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(text, type=kind)
        except msgspec.DecodeError as e:
            raise EngineFailed(f"{method} {self.url}{path} gave no {kind.__name__.strip('_')}: {e}") from e


async def _events(response: aiohttp.ClientResponse, url: str) -> AsyncIterator[bytes]:
    try:
        async for line in response.content:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield data
    except LineTooLong as e:
        raise StreamCut("protocol", f"{url} sent too long a line: {e}") from e
    except (aiohttp.ClientError, TimeoutError, OSError) as e:
        raise _cut_of(e, url) from e


async def _raise_refusal(response: aiohttp.ClientResponse) -> None:
    try:
        text = (await response.text(errors="replace"))[:500]
    except (aiohttp.ClientError, TimeoutError, OSError) as e:
        text = f"(its body broke off: {e})"
    if refuses(response.status):
        raise RequestRefused(f"{response.url.origin()} refused the request: {text}")
    raise StreamCut("server_error", f"{response.url.origin()} answered {response.status}: {text}")


def refuses(status: int) -> bool:
    """Whether no other engine would take the request either."""
    return 400 <= status < 500 and status not in (408, 429)


def _cut_of(error: Exception, url: str) -> StreamCut:
    if isinstance(error, aiohttp.ClientConnectorError):
        return StreamCut("refused", f"{url} does not accept connections: {error}")
    if isinstance(error, TimeoutError):
        return StreamCut("stalled", f"{url} was silent for too long")
    return StreamCut("reset", f"{url} broke the stream: {error or type(error).__name__}")


def _said(error: Exception, timeout_s: float) -> str:
    return str(error) or (
        f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else type(error).__name__
    )
