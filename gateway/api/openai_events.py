"""A server-sent event stream whose HTTP status is decided as late as can be.

Invariants:
- nothing is sent before the first event, so an error until then is an HTTP error;
- after `KEEP_ALIVE_S` of silence a comment is sent, headers included: a queue, a prefill or a move never looks dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from aiohttp import web

from gateway.api.openai_shapes import KEEP_ALIVE

KEEP_ALIVE_S = 15.0


class EventStream:
    """`async with EventStream(request, headers) as events`: `send` events, then `end`."""

    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        self._request = request
        self.response = web.StreamResponse(
            headers={**headers, "Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        self._starting = asyncio.Lock()
        self._sent = False
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._keeper = asyncio.create_task(self._keep_alive(), name="sse-keep-alive")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._keeper is not None
        self._keeper.cancel()
        await asyncio.wait([self._keeper])
        failure = None if self._keeper.cancelled() else self._keeper.exception()
        if failure is not None and not isinstance(failure, ConnectionError):  # a client that left is no failure
            raise failure

    @property
    def started(self) -> bool:
        """Whether the status line is out."""
        return self.response.prepared

    async def send(self, event: bytes) -> None:
        """Raises ConnectionError when the client is gone."""
        if not self.response.prepared:
            async with self._starting:
                if not self.response.prepared:
                    await self.response.prepare(self._request)
        self._sent = True
        await self.response.write(event)

    async def end(self) -> web.StreamResponse:
        await self.response.write_eof()
        return self.response

    async def _keep_alive(self) -> None:
        while True:
            self._sent = False
            await asyncio.sleep(KEEP_ALIVE_S)
            if not self._sent:
                await self.send(KEEP_ALIVE)
