"""The registry under faults: requests and answers that travel, get lost or come late, outages, and a watch that lags.

A transaction is applied when it arrives, which may be after its caller has given up: then the outcome is in doubt.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Literal, TypeVar

from paramserver.membership.memory import MemoryRegistry, MemoryStore
from paramserver.membership.registry import Event, Guard, Outcome, State, Write
from protos.errors import Unavailable
from tests.sim.virtual import Clock, Process

T = TypeVar("T")

CALL_TIMEOUT_S = 2.0  # as with etcd
RELIST_S = 0.3
Mode = Literal["up", "down", "hung"]


class RegistryServer:
    """The one registry of a world. `applied` hears of every event with the instance that caused it ("": a lease)."""

    def __init__(self, clock: Clock, rng: random.Random, applied: Callable[[Event, str], None]) -> None:
        self.clock, self.rng, self._applied = clock, rng, applied
        self.faulty = False
        self.mode: Mode = "up"
        self.generation = 0  # counts what makes every watch begin anew
        self.unreachable_for: set[str] = set()  # names of processes
        self.connections: list[SimRegistry] = []
        self._held: list[Callable[[], None]] = []
        self._told = 0
        self.store = self._new_store(0)
        self._tick()

    def _new_store(self, last_lease: int) -> MemoryStore:
        return MemoryStore(lambda: self.clock.now, last_lease=last_lease)

    def _tick(self) -> None:
        """Leases end by themselves, while the registry runs."""
        if self.mode == "up":
            self.store.expire()
            self.spread("")
        self.clock.after(0.25, self._tick)

    def spread(self, by: str) -> None:
        """Tells what was applied since: the world at once, watches when their news has travelled."""
        if self._told == len(self.store.log):
            return
        for _, event in self.store.log[self._told :]:
            self._applied(event, by)
        self._told = len(self.store.log)
        for connection in self.connections:
            if connection.news.is_set():
                continue
            lag = self.rng.expovariate(100)
            if self.faulty and self.rng.random() < 0.02:
                lag += self.rng.uniform(0, 3)
            self.clock.after(lag, connection.wake)

    # ---- faults

    def fail(self, mode: Mode) -> None:
        self.mode = mode

    def come_back(self) -> None:
        """After an outage or a stop; what was sent to one that hung is done only now."""
        if self.mode == "down" and self.rng.random() < 0.7:  # a restarted one gives every lease its time again
            for lease in self.store.leases.values():
                lease.expires_at = self.clock.now + lease.ttl_s
        self.mode = "up"
        self.generation += 1
        self._wake_all()
        held, self._held = self._held, []
        self.rng.shuffle(held)  # streams of their own have no order among them
        for what in held:
            self.clock.after(self.rng.expovariate(100), what)

    def compact(self) -> None:
        """Watches lose their place and list again."""
        self.generation += 1
        self._wake_all()

    def replace(self) -> None:
        """An empty one in its place."""
        self.store, self._told = self._new_store(self.store.last_lease), 0
        self.compact()

    def reach(self, name: str) -> None:
        self.unreachable_for.discard(name)
        self._wake_all()

    def _wake_all(self) -> None:
        for connection in self.connections:
            self.clock.after(self.rng.expovariate(20), connection.wake)

    # ---- calls

    def arrive(self, connection: SimRegistry, work: Callable[[], Any], answer: Callable[[Any], None]) -> None:
        if connection.process.name in self.unreachable_for or connection.process.dead:
            return
        if self.mode == "hung":
            self._held.append(lambda: self.arrive(connection, work, answer))
        elif self.mode == "down":
            answer(Unavailable("the registry is down"))
        else:
            result = work()
            self.spread(connection.process.name)
            answer(result)


class SimRegistry:
    """One process's connection."""

    def __init__(self, server: RegistryServer, process: Process) -> None:
        self._server, self.process = server, process
        self.news = asyncio.Event()
        server.connections.append(self)

    def wake(self) -> None:
        if not self.process.dead and self.process.name not in self._server.unreachable_for:
            self.news.set()

    async def _call(self, work: Callable[[MemoryRegistry], Coroutine[Any, Any, T]]) -> T:
        server, rng = self._server, self._server.rng
        future: asyncio.Future[Any] = self.process.create_future()
        luck = rng.random() if server.faulty else 1.0
        there, back = rng.expovariate(200), rng.expovariate(200)
        if luck < 0.02:
            there += rng.uniform(0, 2 * CALL_TIMEOUT_S)  # may arrive after its caller gave up

        def answer(result: Any) -> None:
            if luck < 0.04 and luck >= 0.02:
                return
            server.clock.after(back, lambda: _settle(self.process, future, result))

        if not 0.04 <= luck < 0.05:
            server.clock.after(there, lambda: server.arrive(self, lambda: _at_once(work, server.store), answer))
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                result = await future
        except TimeoutError as error:
            raise Unavailable("the registry did not answer") from error
        if isinstance(result, Exception):
            raise result
        return result

    async def list(self, prefix: str) -> State:
        return await self._call(lambda registry: registry.list(prefix))

    async def transact(self, guards: Sequence[Guard], writes: Sequence[Write]) -> Outcome:
        return await self._call(lambda registry: registry.transact(guards, writes))

    async def grant(self, ttl_s: float) -> int:
        return await self._call(lambda registry: registry.grant(ttl_s))

    async def keep_alive(self, lease: int) -> bool:
        return await self._call(lambda registry: registry.keep_alive(lease))

    async def revoke(self, lease: int) -> None:
        await self._call(lambda registry: registry.revoke(lease))

    async def watch(self, prefix: str) -> AsyncIterator[Event]:
        while True:
            generation = self._server.generation
            try:
                state = await self.list(prefix)
            except Unavailable:
                await asyncio.sleep(RELIST_S)
                continue
            yield state
            store, position = self._server.store, 0
            while position < len(store.log) and store.log[position][0] <= state.revision:
                position += 1
            while generation == self._server.generation and store is self._server.store:
                for _, event in store.log[position:]:
                    position += 1
                    if _name(event).startswith(prefix):
                        yield event
                    if self.process.name in self._server.unreachable_for:
                        break
                if position == len(store.log) or self.process.name in self._server.unreachable_for:
                    self.news.clear()
                    await self.news.wait()

    async def close(self) -> None:
        """The server belongs to the world."""


def _at_once(work: Callable[[MemoryRegistry], Coroutine[Any, Any, T]], store: MemoryStore) -> T | Exception:
    """The in-memory registry never waits in a call."""
    try:
        work(MemoryRegistry(store)).send(None)
    except StopIteration as done:
        return done.value
    except Unavailable as error:
        return error
    raise AssertionError("a call on the registry in memory waited")


def _settle(process: Process, future: asyncio.Future[Any], result: Any) -> None:
    if not process.dead and not future.done():
        future.set_result(result)


def _name(event: Event) -> str:
    entry = getattr(event, "entry", None)
    return entry.key if entry is not None else event.key
