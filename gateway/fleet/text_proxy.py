"""Requests relayed as text (`--relay-text`): given to an engine's own text route, its answer's bytes passed on.

Nothing of them is recorded, so nothing is resumed: what an engine failed on before its first byte is asked of another
one, and what breaks off later is an error.

Invariants:
- a relayed request is a running turn of its engine from when it was placed to when it has left it, however it ends;
- a client that hears nothing for `KEEP_ALIVE_S` of an engine that has its request is told that it has it, and under
  which version; from then on it is asked of engines of that version only;
- a client that does not read its answer for `UNREAD_MAX_S` loses it: nothing is recorded that it could read later, and
  an engine's place is others', too;
- an engine that is to load, that died, was restarted or taken out keeps no relayed request: who reads gets the cut.

Owner of the requests under way.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from gateway.core.text_requests import BYTES_PER_TOKEN, TEXT_ROUTES, TRIES_MAX, TextApi, TextDemand
from gateway.core.types import EngineName, TurnId, Version
from gateway.engines.base import PassedAnswer, StreamCut
from gateway.engines.http import ERROR_SHOWN, refuses
from gateway.fleet.fleet import Fleet
from gateway.ports import KEEP_ALIVE_S
from protos.errors import Unavailable

log = logging.getLogger(__name__)

ANSWER_BYTES_MAX = 64 << 20
"""Of an answer that is not streamed, which is held until it is whole; as much as a request's body may have."""
TAIL_BYTES = 16
"""Of a stream: enough for its `[DONE]`, without which it was cut."""
UNREAD_MAX_S = 30.0
"""An engine that is held back so long, since its client takes nothing, is given up by it."""
WHOLE_TIMEOUT_S = 3600.0
"""An answer that is not streamed is silent until it is whole. Engines that die or hang are noticed by looks at them."""


@dataclass(frozen=True, slots=True)
class TextProxyStatistics:
    running: int
    relayed: int
    retried: int
    failed: int


class Client(Protocol):
    """Who asked, while it waits."""

    @property
    def told(self) -> Version | None:
        """The version that its answer's head names, once that is out."""
        ...

    async def keep_alive(self, version: Version) -> None:
        """Shows that an engine of `version` works on the answer. Waits for nothing, not for a slow client either."""
        ...

    def hang_up(self) -> None:
        """It does not read: its connection is closed."""
        ...


@dataclass(slots=True)
class _UnderWay:
    """One request on one engine. `answer`: once it was sent there. `kept_at`: when its client was last told of it."""

    engine: EngineName
    incarnation: str
    version: Version
    client: Client
    answer: PassedAnswer | None = None
    kept_at: float = 0.0
    cut: StreamCut | None = None  # it is to leave
    unread_since: float | None = None  # the engine is held back, for its client takes nothing

    def interrupt(self) -> None:
        """Its engine is needed: it is asked of another one, or, once its answer has begun, broken off."""
        self.leave(f"engine {self.engine} has to load a version")

    def leave(self, why: str) -> None:
        self.cut = StreamCut("abort", why)
        if self.answer is not None:
            self.answer.cut(self.cut)


@dataclass(frozen=True, slots=True)
class Relayed:
    """An answer: its status and kind, who gave it, and its bytes: the first part, and what follows."""

    status: int
    content_type: str
    engine: EngineName
    version: Version
    first: bytes
    rest: AsyncIterator[bytes]


class TextProxy:
    """`ask` for each request; `watch` runs beside them."""

    def __init__(self, fleet: Fleet) -> None:
        self.draining = False
        self._fleet, self._config = fleet, fleet.config
        self._under_way: dict[TurnId, _UnderWay] = {}
        self._numbers = itertools.count()
        self._idle = asyncio.Event()
        self._relayed = self._retried = self._failed = 0

    def statistics(self) -> TextProxyStatistics:
        return TextProxyStatistics(len(self._under_way), self._relayed, self._retried, self._failed)

    async def idle(self) -> None:
        """Until no request is under way."""
        while self._under_way:
            self._idle.clear()
            await self._idle.wait()

    @asynccontextmanager
    async def ask(self, api: TextApi, body: bytes, client: Client, *, streamed: bool) -> AsyncIterator[Relayed]:
        """The answer of the first engine that gives one: whole, or (`streamed`) with its first bytes.

        Raises OutOfCapacity, Unavailable when engines fail it, and StreamCut while what follows the first is read.
        """
        if self.draining:
            raise Unavailable("the gateway is shutting down", hint="ask again soon")
        demand = TextDemand(TurnId(f"text-{next(self._numbers)}"), api, len(body) // BYTES_PER_TOKEN)
        tries = 0
        while True:
            engine = (await self._fleet.place(demand, resumed=tries > 0, timeout_s=self._config.queue_timeout_s)).engine
            try:
                try:
                    relayed = await self._begin(engine, demand, body, client, streamed)
                except StreamCut as cut:
                    tries += 1
                    demand = replace(self._after(cut, engine, demand, tries), version=client.told)
                    continue
                self._relayed += 1
                yield relayed
                return
            finally:
                self._end(engine, demand.turn_id)

    async def _begin(
        self, engine: EngineName, demand: TextDemand, body: bytes, client: Client, streamed: bool
    ) -> Relayed:
        member = self._fleet.members.get(engine)
        if member is None or member.state.status != "serving":
            raise StreamCut("refused", f"engine {engine} is gone")
        state = member.state
        under_way = _UnderWay(engine, state.incarnation, state.version, client)
        self._under_way[demand.turn_id] = under_way
        self._fleet.occupy(demand.turn_id, under_way)
        stall_s = self._config.stall_timeout_s if streamed else WHOLE_TIMEOUT_S
        try:
            path = TEXT_ROUTES[state.kind][demand.api]
            answer = under_way.answer = await member.adapter.pass_on(path, body, stall_timeout_s=stall_s)
            if under_way.cut is not None:
                raise under_way.cut
            status, content_type = await answer.head()
            first = await (answer.some() if streamed and status == 200 else _whole(answer))
            if streamed and status == 200 and not first:
                raise StreamCut("early_end", f"engine {engine} ended the stream before its first byte")
            if status >= 400 and not refuses(status):
                raise StreamCut("server_error", f"{state.url} answered {status}: {_shown(first)}")
        except StreamCut as cut:
            self._suspect(under_way, cut)
            raise
        return Relayed(status, content_type, engine, under_way.version, first, self._rest(under_way, answer, first))

    async def _rest(self, under_way: _UnderWay, answer: PassedAnswer, first: bytes) -> AsyncIterator[bytes]:
        tail = first[-TAIL_BYTES:]
        try:
            while data := await answer.some():
                tail = (tail + data)[-TAIL_BYTES:]
                yield data
            if not tail.rstrip().endswith(b"[DONE]"):
                raise StreamCut("early_end", f"engine {under_way.engine} ended the stream before its end")
        except StreamCut as cut:
            self._failed += 1
            self._suspect(under_way, cut)
            raise

    def _suspect(self, under_way: _UnderWay, cut: StreamCut) -> None:
        """Its engine, unless the cut was made here."""
        if cut is not under_way.cut:
            self._fleet.suspect(under_way.engine)

    def _after(self, cut: StreamCut, engine: EngineName, demand: TextDemand, tries: int) -> TextDemand:
        """What to ask for next. Raises Unavailable when it was tried often enough."""
        log.warning("a request relayed to %s failed before its first byte: %s", engine, cut)
        if tries >= TRIES_MAX:
            self._failed += 1
            raise Unavailable(
                f"{tries} engines failed it, last {engine}: {cut}", hint="send the request again"
            ) from cut
        self._retried += 1
        return replace(demand, avoid=demand.avoid | {engine})

    def _end(self, engine: EngineName, turn_id: TurnId) -> None:
        """It leaves its engine, however far it came."""
        under_way = self._under_way.pop(turn_id, None)
        if under_way is not None and under_way.answer is not None:
            under_way.answer.close()
        self._fleet.leave(engine, turn_id)
        if not self._under_way:
            self._idle.set()

    async def watch(self) -> None:
        """Breaks off what is on engines that died or were restarted, and keeps alive what is silent; until cancelled.

        One task for all requests: each alone costs nothing while its engine speaks.
        """
        while True:
            await asyncio.sleep(self._config.poll_interval_s)
            now = asyncio.get_running_loop().time()
            for under_way in list(self._under_way.values()):
                state = self._fleet.state.engines.get(under_way.engine)
                if state is None or state.status in ("dead", "joining") or state.incarnation != under_way.incarnation:
                    under_way.leave(f"engine {under_way.engine} died")
                try:
                    self._check_read(under_way, now)
                    await self._keep_alive(under_way, now)
                except Exception as e:
                    log.exception("a client that waits for engine %s cannot be kept alive", under_way.engine)
                    under_way.leave(f"its client cannot be kept alive: {e!r}")

    def _check_read(self, under_way: _UnderWay, now: float) -> None:
        if under_way.answer is None or not under_way.answer.paused:
            under_way.unread_since = None
        elif under_way.unread_since is None:
            under_way.unread_since = now
        elif now - under_way.unread_since >= UNREAD_MAX_S and under_way.cut is None:
            under_way.leave(f"its client read nothing for {UNREAD_MAX_S:g} s")
            under_way.client.hang_up()

    async def _keep_alive(self, under_way: _UnderWay, now: float) -> None:
        if under_way.answer is None or under_way.cut is not None:
            return
        if now - max(under_way.kept_at, under_way.answer.heard_at) >= KEEP_ALIVE_S:
            under_way.kept_at = now
            await under_way.client.keep_alive(under_way.version)


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
