"""The text routes: which requests are forwarded as text, decided by a glance at their bytes, and their responses.

Only a request that wants nothing of the token path is forwarded: no session in any form, no idempotency key, no token
ids or versions, no field that is this gateway's own. All other fields are the engine's to accept or to refuse.

Invariants:
- a response that breaks off after its first byte is an error that no client takes for an end: in a stream an error
  event after the last whole event, else a connection that is cut;
- a response is kept alive while an engine has its request (`gateway.api.calls.events`). Once a filler is out, the
  status is 200 and the head names the version, but no engine: another engine of that version may yet have to answer.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from aiohttp import hdrs, web

from gateway.api.access import api_keys, caller_of
from gateway.api.bodies import within
from gateway.api.calls.answer import VERSION_HEADER
from gateway.api.calls.events import KEEP_ALIVE, KeptAlive
from gateway.api.calls.identity import KEY_HEADER, SESSION_HEADERS
from gateway.api.errors import error_body
from gateway.core.access import owner_of
from gateway.core.key_bounds import KeyBounds
from gateway.core.placing.text_requests import TextApi
from gateway.core.types import Version
from gateway.fleet.text_proxy import Relayed, TextProxy
from gateway.ports import SESSION_KEY_PREFIX, Turns
from protos.errors import LaminarError
from protos.foreign_text import quoted

log = logging.getLogger(__name__)

ENGINE_HEADER = "X-Laminar-Engine"
TOKENS_ONLY = frozenset(header.lower() for header in (*SESSION_HEADERS, KEY_HEADER))  # lower case, as they are compared
EVENT_ENDS, EVENT_END_BYTES = (b"\n\n", b"\r\n\r\n"), 4


class Glance(msgspec.Struct):
    """The fields of a body that decide its path; those below the first two keep it on the token path."""

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
    """`glance` decides whether a request is forwarded as text; `answer` forwards it."""

    def __init__(
        self,
        relay: TextProxy,
        turns: Turns,
        model: str,
        bounds: KeyBounds | None = None,
        *,
        session_from_user: bool = True,
    ) -> None:
        self._relay, self._turns, self._model = relay, turns, model
        self._bounds = KeyBounds() if bounds is None else bounds
        self._session_from_user = session_from_user

    async def glance(self, request: web.Request, body: bytes) -> Glance | None:
        """None: the request takes the token path, where it is also refused if anything is wrong with it."""
        headers = request.headers
        if "sid" in request.match_info or any(name.lower() in TOKENS_ONLY for name in headers):
            return None
        if any(
            key.startswith(SESSION_KEY_PREFIX) or self._turns.session_of_key(key) is not None
            for key in api_keys(request)
        ):
            return None  # also of a session that has ended: nothing of the call would be recorded
        try:
            seen = await within(request, body, lambda: _glance(body))
        except msgspec.DecodeError:
            return None
        if seen.model != self._model or seen.wants_tokens(session_from_user=self._session_from_user):
            return None
        return seen

    async def answer(self, request: web.Request, body: bytes, api: TextApi, seen: Glance) -> web.StreamResponse:
        owner = owner_of(caller_of(request))
        self._bounds.check_turns(owner, 1)
        self._bounds.turn_began(owner)
        try:
            return await self._answer(request, body, api, seen)
        finally:
            self._bounds.turn_ended(owner)

    async def _answer(self, request: web.Request, body: bytes, api: TextApi, seen: Glance) -> web.StreamResponse:
        async with _RelayedAnswer(request, streamed=bool(seen.stream)) as client:
            try:
                async with self._relay.forward(api, body, client, streamed=client.streamed) as relayed:
                    return await client.answer(relayed)
            except LaminarError as error:
                if not client.started:
                    raise
                log.warning("%s %s: failed after its response began: %s", request.method, quoted(request.path), error)
                return await client.fail(msgspec.json.encode(error_body(error)))
            except ConnectionError:  # the client is gone: nobody is left to notify
                return client.response


class _RelayedAnswer(KeptAlive):
    """The response to a client, of an engine's own bytes. Implements `gateway.fleet.text_proxy.Client`."""

    def __init__(self, request: web.Request, *, streamed: bool) -> None:
        kind, self.filler = ("text/event-stream", KEEP_ALIVE) if streamed else ("application/json", b" ")
        super().__init__(request, {hdrs.CONTENT_TYPE: kind})
        self.streamed = streamed
        self._version: Version | None = None
        self._tail = b""  # the last bytes sent

    @property
    def version(self) -> Version | None:
        return self._version if self.started else None

    def on_engine(self, version: Version) -> None:
        self._version = version
        self.set_header(VERSION_HEADER, str(version))
        self.begin()

    def off_engine(self) -> None:
        self._begun = False  # a filler now would name the version of the engine that failed, and bind the retry to it

    @property
    def _fills(self) -> bool:
        return self._begun and super()._fills and self._between_events

    @property
    def _between_events(self) -> bool:
        """The engine's bytes come as they come: a comment within an event would break it."""
        return not self._tail or self._tail.endswith(EVENT_ENDS)

    async def answer(self, relayed: Relayed) -> web.StreamResponse:
        if self.streamed and relayed.status == 200:
            return await self._stream(relayed)
        if not self.started:
            return web.Response(body=relayed.first, status=relayed.status, headers=_headers(relayed))
        if relayed.status != 200:
            return await self.fail(b" ".join(relayed.first.splitlines()))
        return await self.end_with(relayed.first)

    async def _stream(self, relayed: Relayed) -> web.StreamResponse:
        for name, value in _headers(relayed).items():
            self.set_header(name, value)
        self._tail = relayed.first[-EVENT_END_BYTES:]
        await self.send(relayed.first)
        async for data in relayed.rest:
            self._tail = (self._tail + data[-EVENT_END_BYTES:])[-EVENT_END_BYTES:]
            if (held := self.send_soon(data)) is not None:
                await held
        return await self.end()

    async def fail(self, error: bytes) -> web.StreamResponse:
        if self.streamed and self._between_events:
            return await self.end_with(b"data: " + error + b"\n\n")
        return self.cut()


def _headers(relayed: Relayed) -> dict[str, str]:
    return {
        hdrs.CONTENT_TYPE: relayed.content_type,
        VERSION_HEADER: str(relayed.version),
        ENGINE_HEADER: relayed.engine,
    }
