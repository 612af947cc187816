"""Which requests may be relayed as text, by a glance at their bytes, and their answers to clients.

Relayed is only what asks for nothing that the token path alone can give: no session in any form, no idempotency key, no
token ids or versions, no field that is this gateway's own. All other fields are the engine's to take or to refuse.

Invariants:
- an answer that breaks off after its first byte is an error that no client takes for an end: in a stream an error event
  where events stand whole, else a connection that is cut;
- an answer that is silent for long is kept alive once an engine has its request: comments between a stream's events,
  spaces before the body of a whole answer. Its head is out then: the status is 200 and the version is told, the engine
  is not, since another one of that version may yet have to answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import hdrs, web

from gateway.api.errors import error_body
from gateway.api.openai.identity import KEY_HEADER, SESSION_HEADERS
from gateway.api.openai.shapes import KEEP_ALIVE
from gateway.core.text_requests import TextApi
from gateway.core.types import Version
from gateway.fleet.text_proxy import Relayed, TextProxy
from gateway.ports import SESSION_KEY_PREFIX, Turns
from protos.errors import LaminarError

log = logging.getLogger(__name__)

VERSION_HEADER = "X-Laminar-Weight-Version"
ENGINE_HEADER = "X-Laminar-Engine"
TOKENS_ONLY = frozenset(header.lower() for header in (*SESSION_HEADERS, KEY_HEADER))  # lower case, as they are compared
EVENT_ENDS, EVENT_END_BYTES = (b"\n\n", b"\r\n\r\n"), 4


class Glance(msgspec.Struct):
    """What of a body decides its path. The names below the first two are those that keep it on the token path."""

    model: str
    stream: bool | None = None
    user: Any = None
    session_id: Any = None
    metadata: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    history: Any = None
    separate_reasoning: Any = None

    def wants_tokens(self, *, session_from_user: bool) -> bool:
        by_user = session_from_user and bool(self.user)
        named = by_user or self.session_id is not None or (self.metadata or {}).get("session_id")
        own = self.history is not None or self.separate_reasoning is not None
        return bool(named or own or self.return_token_ids or self.return_weight_versions)


_glance = msgspec.json.Decoder(Glance).decode


class TextRoutes:
    """`glance` says whether a request is relayed; `answer` relays it."""

    def __init__(self, relay: TextProxy, turns: Turns, model: str, *, session_from_user: bool = True) -> None:
        self._relay, self._turns, self._model = relay, turns, model
        self._session_from_user = session_from_user

    def glance(self, request: web.Request, body: bytes) -> Glance | None:
        """None: the token path takes it, or says what is wrong with it."""
        headers = request.headers
        if "sid" in request.match_info or any(name.lower() in TOKENS_ONLY for name in headers):
            return None
        scheme, _, key = headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        if scheme.lower() == "bearer" and (
            key.strip().startswith(SESSION_KEY_PREFIX) or self._turns.session_of_key(key.strip()) is not None
        ):
            return None  # also of a session that has ended: nothing of the call would be recorded
        try:
            seen = _glance(body)
        except msgspec.DecodeError:
            return None
        if seen.model != self._model or seen.wants_tokens(session_from_user=self._session_from_user):
            return None
        return seen

    async def answer(self, request: web.Request, body: bytes, api: TextApi, seen: Glance) -> web.StreamResponse:
        client = _Client(request, streamed=bool(seen.stream))
        try:
            async with self._relay.ask(api, body, client, streamed=client.streamed) as relayed:
                return await client.answer(relayed)
        except LaminarError as error:
            if client.told is None:
                raise
            return await client.fail(error)


class _Client:
    """Who asked, and what it was sent. Implements `gateway.fleet.text_proxy.Client`."""

    def __init__(self, request: web.Request, *, streamed: bool) -> None:
        self.streamed = streamed
        self.told: Version | None = None
        self._request = request
        self._response: web.StreamResponse | None = None  # once its head is out, or on its way
        self._starting = asyncio.Lock()
        self._tail = b""  # of what was sent
        self._over = False

    async def keep_alive(self, version: Version) -> None:
        if self._over or self._request.protocol.writing_paused or not self._between_events:
            return
        kind = "text/event-stream" if self.streamed else "application/json"
        try:
            response = await self._begin({hdrs.CONTENT_TYPE: kind, VERSION_HEADER: str(version)}, version)
            await response.write(KEEP_ALIVE if self.streamed else b" ")
        except ConnectionError:  # the client is gone, as its handler is told
            pass

    def hang_up(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()

    @property
    def _between_events(self) -> bool:
        return not self._tail or self._tail.endswith(EVENT_ENDS)

    async def _begin(self, headers: Mapping[str, str], version: Version) -> web.StreamResponse:
        async with self._starting:
            if self._response is None:
                self._response = web.StreamResponse(headers=headers)
                self.told = version
                await self._response.prepare(self._request)
            return self._response

    async def answer(self, relayed: Relayed) -> web.StreamResponse:
        if self.streamed and relayed.status == 200:
            return await self._stream(relayed)
        if self.told is None:
            return web.Response(body=relayed.first, status=relayed.status, headers=_headers(relayed))
        if relayed.status != 200:
            return await self._say_error(b" ".join(relayed.first.splitlines()))
        return await self._end(relayed.first)

    async def _stream(self, relayed: Relayed) -> web.StreamResponse:
        try:
            response = await self._begin(_headers(relayed), relayed.version)
            self._tail = relayed.first
            await response.write(relayed.first)
            async for data in relayed.rest:
                self._tail = self._tail[-EVENT_END_BYTES:] + data
                await response.write(data)
        except ConnectionError:  # the client is gone: there is nobody to tell
            self._over = True
            assert self._response is not None
            return self._response
        return await self._end(b"")

    async def fail(self, error: LaminarError) -> web.StreamResponse:
        """After the head: an error that no client takes for an end."""
        log.warning("%s %s: failed after its answer began: %s", self._request.method, self._request.path, error)
        return await self._say_error(msgspec.json.encode(error_body(error)))

    async def _say_error(self, body: bytes) -> web.StreamResponse:
        assert self._response is not None
        if self.streamed and self._between_events:
            return await self._end(b"data: " + body + b"\n\n")
        self._over = True
        if self._request.transport is not None:
            self._request.transport.abort()
        return self._response

    async def _end(self, last: bytes) -> web.StreamResponse:
        assert self._response is not None
        self._over = True
        try:
            if last:
                await self._response.write(last)
            await self._response.write_eof()
        except ConnectionError:  # the client is gone: there is nobody to tell
            pass
        return self._response


def _headers(relayed: Relayed) -> dict[str, str]:
    return {
        hdrs.CONTENT_TYPE: relayed.content_type,
        VERSION_HEADER: str(relayed.version),
        ENGINE_HEADER: relayed.engine,
    }
