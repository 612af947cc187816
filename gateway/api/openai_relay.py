"""Which requests may be relayed as text, by a glance at their bytes, and their answers to clients.

Relayed is only what asks for nothing that the token path alone can give: no session in any form, no idempotency key, no
token ids or versions, no field that is this gateway's own. All other fields are the engine's to take or to refuse.

An answer that breaks off after its first byte is an error that no client takes for an end: in a stream an error event
where events stand whole, else a connection that is cut.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from aiohttp import hdrs, web

from gateway.api.openai_errors import error_body
from gateway.api.openai_identity import KEY_HEADER, SESSION_HEADERS
from gateway.core.relaying import TextApi
from gateway.engines.base import StreamCut
from gateway.ports import Turns
from gateway.relaying import Relayed, TextRelay

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

    @property
    def wants_tokens(self) -> bool:
        named = self.user is not None or self.session_id is not None or (self.metadata or {}).get("session_id")
        own = self.history is not None or self.separate_reasoning is not None
        return bool(named or own or self.return_token_ids or self.return_weight_versions)


_glance = msgspec.json.Decoder(Glance).decode


class TextDoor:
    """`glance` says whether a request is relayed; `answer` relays it."""

    def __init__(self, relay: TextRelay, turns: Turns, model: str) -> None:
        self._relay, self._turns, self._model = relay, turns, model

    def glance(self, request: web.Request, body: bytes) -> Glance | None:
        """None: the token path takes it, or says what is wrong with it."""
        headers = request.headers
        if "sid" in request.match_info or any(name.lower() in TOKENS_ONLY for name in headers):
            return None
        scheme, _, key = headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        if scheme.lower() == "bearer" and self._turns.session_of_key(key.strip()) is not None:
            return None
        try:
            seen = _glance(body)
        except msgspec.DecodeError:
            return None
        return None if seen.model != self._model or seen.wants_tokens else seen

    async def answer(self, request: web.Request, body: bytes, api: TextApi, seen: Glance) -> web.StreamResponse:
        async with self._relay.ask(api, body, streamed=bool(seen.stream)) as relayed:
            if seen.stream and relayed.status == 200:
                return await _stream(request, relayed)
            return web.Response(body=relayed.first, status=relayed.status, headers=_headers(relayed))


async def _stream(request: web.Request, relayed: Relayed) -> web.StreamResponse:
    response = web.StreamResponse(headers=_headers(relayed))
    try:
        await response.prepare(request)
        await response.write(tail := relayed.first)
        try:
            async for data in relayed.rest:
                tail = tail[-EVENT_END_BYTES:] + data
                await response.write(data)
        except StreamCut as cut:
            log.warning("%s %s: cut after its first byte: %s", request.method, request.path, cut)
            if not tail.endswith(EVENT_ENDS):
                if request.transport is not None:
                    request.transport.abort()
                return response
            await response.write(b"data: " + msgspec.json.encode(error_body(cut)) + b"\n\n")
        await response.write_eof()
    except ConnectionError:  # the client is gone: there is nobody to tell
        pass
    return response


def _headers(relayed: Relayed) -> dict[str, str]:
    return {
        hdrs.CONTENT_TYPE: relayed.content_type,
        VERSION_HEADER: str(relayed.version),
        ENGINE_HEADER: relayed.engine,
    }
