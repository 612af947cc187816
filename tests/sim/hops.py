"""Hops in virtual time: the stand-in for `data.fetch`, `data.tcp` and `data.server` around the same pure core.

What to ask for is `TransferState`, whom to ask is `sources` and `Bypasses`, and who is answered is decided by the
relay and its store, as in the daemons; only sockets and threads are replaced.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from paramserver.core.bypass import Bypasses
from paramserver.core.records import digest
from paramserver.core.transfer import ActiveTime, TransferState, Want
from paramserver.data.frames import HEARTBEAT_S, SILENCE_S, Greeting, LinkBroken
from paramserver.data.server import LATE_JOINERS_MAX, OPEN_WAIT_S, _check_epoch
from paramserver.data.transport import Source
from paramserver.memory.store import Snapshot
from protos.errors import Corrupt, LaminarError, NotFound, OutOfCapacity, Unavailable
from tests.sim.virtual import Clock, Process

if TYPE_CHECKING:
    from tests.sim.tier import SimRelay, World

RESEND_S = 0.2
LOOK_S = 0.1


class Network:
    """Who reaches whom between hosts, how fast, and what breaks on the way."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self.clock, self.rng = clock, rng
        self.faulty = False
        self.cut: set[tuple[str, str]] = set()  # from host, to host
        self.slow: set[str] = set()  # hosts behind slow links

    def passes(self, source: str, target: str) -> bool:
        return (source, target) not in self.cut

    def latency_s(self) -> float:
        return self.rng.expovariate(1000)

    def transit_s(self, source: str, target: str, num_bytes: int) -> float:
        rate = 4e5 * self.rng.uniform(0.9, 1.1)
        return num_bytes / (rate / 10 if {source, target} & self.slow else rate)

    def chance(self, probability: float) -> bool:
        return self.faulty and self.rng.random() < probability

    def isolate(self, host: str, others: list[str], *, inward: bool, outward: bool) -> None:
        for other in others:
            self.cut |= {(other, host)} if inward else set()
            self.cut |= {(host, other)} if outward else set()


class Hop:
    """One stripe's connection to one holder."""

    def __init__(self, world: World, process: Process, source: Source, greeting: Greeting) -> None:
        self._world, self._process, self._source, self._greeting = world, process, source, greeting
        self._held = ExitStack()
        self._snapshot: Snapshot | None = None
        self._heard = process.time()
        self._closed = False
        self.rtt_s = 0.0

    async def open(self) -> None:
        asked = self._process.time()

        def serve(server: SimRelay) -> Any:
            if server.provider is None:
                return None
            snapshot = server.provider.find(self._greeting.model, self._greeting.version, 0.0)
            if snapshot is None:
                if self._process.time() - asked > OPEN_WAIT_S:
                    raise NotFound("it did not reach this relay in time")
                return None
            _check_epoch(snapshot, self._greeting.epoch)
            late = self._greeting.name if self._greeting.late else ""
            self._held.enter_context(snapshot.linked(late, LATE_JOINERS_MAX))
            self._snapshot = snapshot
            return snapshot.manifest.epoch

        await self._ask(serve, lambda _: 0)
        self.rtt_s = self._process.time() - asked

    async def get(self, want: Want) -> tuple[bytes, bytes]:
        """(digest, rest of the chunk). LinkBroken, or what the holder refused with."""

        def serve(server: SimRelay) -> Any:
            snapshot = self._snapshot
            assert snapshot is not None
            assert server.provider is not None
            with snapshot.reading():
                known = snapshot.digest_of(want.index)
                if known is None:
                    return None
                if want.suspect:
                    try:
                        snapshot.recheck(want.index)
                    except Corrupt as error:
                        server.provider.chunk_is_bad(snapshot, error)
                        raise
                return known, bytes(snapshot.place(want.index)[want.from_byte :])

        return await self._ask(serve, lambda answer: len(answer[1]))

    def close(self) -> None:
        self._closed = True
        self._held.close()

    async def _ask(self, serve: Callable[[SimRelay], Any], size: Callable[[Any], int]) -> Any:
        world, net, here = self._world, self._world.net, self._greeting.name
        future: asyncio.Future[Any] = self._process.create_future()
        self._heard = self._process.time()

        def knock() -> None:
            server = world.listening(self._source.address)
            if self._closed or self._process.dead:
                self._held.close()
            elif not net.passes(here, self._source.name):
                world.clock.after(RESEND_S, knock)
            elif server is None:
                reply(LinkBroken("connection refused"))
            else:
                server.process.threads(lambda: attend(server))

        def attend(server: SimRelay) -> None:
            if self._closed or future.done():
                return
            try:
                answer = serve(server)
            except LaminarError as error:
                answer = error
            if answer is None:
                if net.passes(self._source.name, here):
                    self._heard = self._process.time()
                world.clock.after(HEARTBEAT_S / 2, knock)
                return
            failed = isinstance(answer, Exception)
            took = 0.0 if failed else net.transit_s(self._source.name, here, size(answer))
            world.clock.after(net.latency_s() + took, lambda: reply(answer))

        def reply(answer: Any) -> None:
            if self._closed or self._process.dead or future.done():
                return
            if net.passes(self._source.name, here):
                future.set_result(answer)
            else:
                world.clock.after(RESEND_S, lambda: reply(answer))

        world.clock.after(net.latency_s(), knock)
        while not future.done():
            await asyncio.wait([future], timeout=LOOK_S)
            if not future.done() and self._process.time() - self._heard > SILENCE_S:
                raise LinkBroken(f"{self._source.name} was silent")
        answer = future.result()
        if isinstance(answer, Exception):
            raise answer
        return answer


class SimFetch:
    """Stands where `data.fetch.Fetch` does."""

    def __init__(
        self,
        sink: Snapshot,
        greeting: Greeting,
        sources: Callable[[], list[list[Source]]],
        dial: Callable[..., Any],
        *,
        num_stripes: int = 2,
    ) -> None:
        process = asyncio.get_running_loop()
        assert isinstance(process, Process)
        self._process, self._world = process, process.world
        self._sink, self._greeting, self._sources = sink, greeting, sources
        missing = set(sink.missing())
        self._state = TransferState(sink.chunks, [i for i in range(sink.chunks.num_chunks) if i not in missing])
        self._bypasses = Bypasses()
        self._cancelled = False
        self._progress_at = process.time()
        self._active, self._active_bytes = ActiveTime(), 0
        self.upstream, self.rtt_s, self.num_stripes, self.transport = "", 0.0, num_stripes, "tcp"

    @property
    def bytes_done(self) -> int:
        return self._state.bytes_here

    @property
    def idle_s(self) -> float:
        return self._process.time() - self._progress_at

    @property
    def rate_bytes_s(self) -> float:
        return self._active_bytes / self._active.seconds if self._active.seconds else 0.0

    def bypassed(self) -> set[str]:
        return self._bypasses.at(self._process.time())

    def cancel(self) -> None:
        self._cancelled = True

    async def run(self) -> bool:
        async with asyncio.TaskGroup() as stripes:
            for number in range(self.num_stripes):
                stripes.create_task(self._stripe(number))
        return self._state.complete

    def _over(self) -> bool:
        return self._state.complete or self._cancelled

    async def _stripe(self, number: int) -> None:
        stripe = f"stripe-{number}"
        while not self._over():
            source = self._bypasses.pick(self._sources(), number, self._process.time())
            if source is None:
                await asyncio.sleep(LOOK_S)
                continue
            try:
                await self._use(source, stripe)
            except OutOfCapacity:
                self._state.broken(stripe)
                self._bypasses.busy(source.name, self._process.time())
            except LaminarError:
                self._state.broken(stripe)
                self._bypasses.failed(source.name, self._process.time())

    async def _use(self, source: Source, stripe: str) -> None:
        self._world.asks(self._greeting, source)
        hop = Hop(self._world, self._process, source, self._greeting)
        try:
            await hop.open()
            self.upstream, self.rtt_s = source.name, hop.rtt_s
            while not self._over():
                want = self._state.take(stripe)
                if want is None:
                    await asyncio.sleep(LOOK_S)
                while want is not None:
                    want = await self._one(hop, want)
        finally:
            hop.close()

    async def _one(self, hop: Hop, want: Want) -> Want | None:
        """One request; what to ask of the same sender again."""
        began = self._process.time()
        known, rest = await hop.get(want)
        net, place = self._world.net, self._sink.place(want.index)
        upto = len(place)
        if rest and net.chance(0.03):
            upto = want.from_byte + net.rng.randrange(len(rest))
        place[want.from_byte : upto] = rest[: upto - want.from_byte]
        if upto > want.from_byte and net.chance(0.01):
            place[net.rng.randrange(want.from_byte, upto)] ^= 1
        self._state.received(want.index, upto)
        self._progress_at = self._process.time()
        if self._cancelled:
            raise Unavailable("the transfer was cancelled")
        if upto < len(place):
            raise LinkBroken("the connection broke")
        if digest(place) != known:
            again = self._state.recheck(want.index)
            if again is None:
                self._state.mismatched(want.index)
                raise Corrupt(f"chunk {want.index} came with a wrong digest")
            return again
        self._sink.present(want.index, known)
        self._state.verified(want.index)
        self._active.add(began, self._process.time())
        self._active_bytes += len(rest)
        return None
