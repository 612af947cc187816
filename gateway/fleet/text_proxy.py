"""The text proxy (`--relay-text`): forwards requests to an engine's own text route, and the response's bytes back.

Nothing of them is recorded, so nothing is resumed: a request that an engine failed before its first byte is sent to
another engine, and a response that breaks off later is an error.

Invariants:
- a forwarded request is a running turn of its engine from its placement until it has left the engine, however it ends;
- once a client's response is kept alive, its head names the version of the engine that has the request: from then on
  the request is sent to engines of that version only;
- a client that does not read its response for `UNREAD_MAX_S` loses it: nothing is recorded that it could read later,
  and other requests need the engine's place;
- an engine that is to load, that died, was restarted or removed keeps no forwarded request: the reader gets the cut.

Owner of the running requests.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from gateway.core.fleet.events import TurnEndedWell
from gateway.core.placing.text_requests import BYTES_PER_TOKEN, TEXT_ROUTES, TRIES_MAX, TextApi, TextDemand
from gateway.core.types import EngineName, TurnId, Version
from gateway.engines.base import PassedAnswer, StreamCut
from gateway.engines.http import ERROR_SHOWN, cut_reason
from gateway.fleet.fleet import Fleet
from protos.errors import OutOfCapacity, Unavailable

log = logging.getLogger(__name__)

ANSWER_BYTES_MAX = 64 << 20
"""The longest response that is not streamed, since it is held until it is whole; as long as a request's body."""
TAIL_BYTES = 16
"""Kept of a stream: enough for its `[DONE]`, without which it was cut."""
UNREAD_MAX_S = 30.0
"""For which an engine's stream is held back by a client that reads nothing; then the request is cut."""
WHOLE_TIMEOUT_S = 3600.0
"""A response that is not streamed is silent until it is whole. Polls find engines that die or hang."""


@dataclass(frozen=True, slots=True)
class TextProxyStatistics:
    running: int
    relayed: int
    retried: int
    failed: int


class Client(Protocol):
    """The client of one request, while it waits."""

    @property
    def version(self) -> Version | None:
        """The version in the head of its response, once the head was sent."""
        ...

    def on_engine(self, version: Version) -> None:
        """An engine of `version` has the request: from now on the response may be kept alive."""
        ...

    def off_engine(self) -> None:
        """No engine has the request: nothing more may be sent that names a version."""
        ...

    def cut(self) -> object:
        """Aborts the connection of a client that does not read."""
        ...


@dataclass(slots=True)
class _Forwarded:
    """One request on one engine. `answer`: set once the request was sent there."""

    engine: EngineName
    incarnation: str
    version: Version
    client: Client
    answer: PassedAnswer | None = None
    cut: StreamCut | None = None  # once it has to leave
    unread_since: float | None = None  # the engine is held back, because the client reads nothing

    def interrupt(self) -> None:
        """Its engine is needed: it is sent to another one, or, once its response has begun, cut."""
        self.leave(f"engine {self.engine} has to load a version")

    def leave(self, why: str) -> None:
        self.cut = StreamCut("abort", why)
        if self.answer is not None:
            self.answer.cut(self.cut)


@dataclass(frozen=True, slots=True)
class Relayed:
    """A response: status, content type, engine and version, its first bytes, and the rest."""

    status: int
    content_type: str
    engine: EngineName
    version: Version
    first: bytes
    rest: AsyncIterator[bytes]


class TextProxy:
    """`forward` for each request; `watch` runs beside them."""

    def __init__(self, fleet: Fleet) -> None:
        self.draining = False
        self._fleet, self._config = fleet, fleet.config
        self._running: dict[TurnId, _Forwarded] = {}
        self._numbers = itertools.count()
        self._idle = asyncio.Event()
        self._relayed = self._retried = self._failed = 0

    def statistics(self) -> TextProxyStatistics:
        return TextProxyStatistics(len(self._running), self._relayed, self._retried, self._failed)

    async def idle(self) -> None:
        """Returns when no request runs."""
        while self._running:
            self._idle.clear()
            await self._idle.wait()

    @asynccontextmanager
    async def forward(self, api: TextApi, body: bytes, client: Client, *, streamed: bool) -> AsyncIterator[Relayed]:
        """The response of the first engine that gives one: whole, or (`streamed`) with its first bytes.

        Raises OutOfCapacity where engines have no room, Unavailable when they fail it, and StreamCut while the rest is
        read.
        """
        if self.draining:
            raise Unavailable("the gateway is shutting down", hint="send it again soon")
        demand = TextDemand(TurnId(f"text-{next(self._numbers)}"), api, len(body) // BYTES_PER_TOKEN)
        places, tries = self._fleet.places, 0
        while True:
            placement = await places.place(demand, resumed=tries > 0, timeout_s=self._config.queue_timeout_s)
            engine = placement.engine
            try:
                try:
                    relayed = await self._begin(engine, demand, body, client, streamed)
                except StreamCut as cut:
                    tries += 1
                    demand = replace(self._after(cut, engine, demand, tries), version=client.version)
                    continue
                self._relayed += 1
                yield relayed
                return
            finally:
                client.off_engine()
                self._end(engine, demand.turn_id)

    async def _begin(
        self, engine: EngineName, demand: TextDemand, body: bytes, client: Client, streamed: bool
    ) -> Relayed:
        handle = self._fleet.handles.get(engine)
        if handle is None or handle.state.status != "serving":
            raise StreamCut("refused", f"engine {engine} is gone")
        state = handle.state
        forwarded = _Forwarded(engine, state.incarnation, state.version, client)
        self._running[demand.turn_id] = forwarded
        self._fleet.places.occupy(demand.turn_id, forwarded)
        stall_s = self._config.stall_timeout_s if streamed else WHOLE_TIMEOUT_S
        try:
            path = TEXT_ROUTES[state.kind][demand.api]
            answer = forwarded.answer = await handle.adapter.pass_on(path, body, stall_timeout_s=stall_s)
            if forwarded.cut is not None:
                raise forwarded.cut
            client.on_engine(state.version)
            status, content_type = await answer.head()
            first = await (answer.some() if streamed and status == 200 else _whole(answer))
            if streamed and status == 200 and not first:
                raise StreamCut("early_end", f"engine {engine} ended the stream before its first byte")
            if status >= 400 and (reason := cut_reason(status)) is not None:
                raise StreamCut(reason, f"{state.url} answered {status}: {_shown(first)}")
        except StreamCut as cut:
            self._note_cut(forwarded, demand.turn_id, cut)
            raise
        if status == 200 and not streamed:  # all of it is there
            self._fleet.send(TurnEndedWell(engine))
        rest = self._rest(forwarded, demand.turn_id, answer, first)
        return Relayed(status, content_type, engine, forwarded.version, first, rest)

    async def _rest(
        self, forwarded: _Forwarded, turn_id: TurnId, answer: PassedAnswer, first: bytes
    ) -> AsyncIterator[bytes]:
        tail = first[-TAIL_BYTES:]
        try:
            while data := await answer.some():
                tail = (tail + data)[-TAIL_BYTES:]
                yield data
            if not tail.rstrip().endswith(b"[DONE]"):
                raise StreamCut("early_end", f"engine {forwarded.engine} ended the stream before its end")
            self._fleet.send(TurnEndedWell(forwarded.engine))
        except StreamCut as cut:
            self._failed += 1
            self._note_cut(forwarded, turn_id, cut)
            raise

    def _note_cut(self, forwarded: _Forwarded, turn_id: TurnId, cut: StreamCut) -> None:
        """Its engine failed it, unless the cut was made here."""
        if cut is not forwarded.cut:
            self._fleet.failed(forwarded.engine, turn_id, cut)

    def _after(self, cut: StreamCut, engine: EngineName, demand: TextDemand, tries: int) -> TextDemand:
        """What the next try needs. When there were enough of them, raises Unavailable, or OutOfCapacity where the last
        engine had no room."""
        log.warning("a request forwarded to %s failed before its first byte: %s", engine, cut)
        if tries >= TRIES_MAX:
            self._failed += 1
            kind = OutOfCapacity if cut.reason == "no_room" else Unavailable
            raise kind(f"{tries} tries failed, the last on {engine}: {cut}", hint="send the request again") from cut
        self._retried += 1
        return replace(demand, avoid=demand.avoid | {engine})

    def _end(self, engine: EngineName, turn_id: TurnId) -> None:
        """The request leaves its engine, however far it came."""
        forwarded = self._running.pop(turn_id, None)
        if forwarded is not None and forwarded.answer is not None:
            forwarded.answer.close()
        self._fleet.places.leave(engine, turn_id)
        if not self._running:
            self._idle.set()

    async def watch(self) -> None:
        """Cuts requests whose engine died or was restarted, and those whose client does not read; until cancelled."""
        while True:
            await asyncio.sleep(self._config.poll_interval_s)
            now = asyncio.get_running_loop().time()
            for forwarded in list(self._running.values()):
                state = self._fleet.state.engines.get(forwarded.engine)
                if state is None or state.status in ("dead", "joining") or state.incarnation != forwarded.incarnation:
                    forwarded.leave(f"engine {forwarded.engine} died")
                self._check_read(forwarded, now)

    def _check_read(self, forwarded: _Forwarded, now: float) -> None:
        if forwarded.answer is None or not forwarded.answer.paused:
            forwarded.unread_since = None
        elif forwarded.unread_since is None:
            forwarded.unread_since = now
        elif now - forwarded.unread_since >= UNREAD_MAX_S and forwarded.cut is None:
            forwarded.leave(f"its client read nothing for {UNREAD_MAX_S:g} s")
            forwarded.client.cut()


async def _whole(answer: PassedAnswer) -> bytes:
    found, size = [], 0
    while data := await answer.some():
        found.append(data)
        size += len(data)
        if size > ANSWER_BYTES_MAX:
            raise StreamCut("protocol", f"an answer of more than {ANSWER_BYTES_MAX >> 20} MiB")
    return found[0] if len(found) == 1 else b"".join(found)


def _shown(body: bytes) -> str:
    return body[:ERROR_SHOWN].decode(errors="replace")
