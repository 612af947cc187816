"""Clients of a gateway under virtual time: siblings, retries, cuts, give-ups and sweeps, by seed.

What runs is the gateway's own code from `TurnService` down to the drivers of turns, over engines and a store that take
virtual time. An engine's tokens depend on the turn that it says them for, so an answer tells whose it is.

Held after every seed: each request got an answer; no two requests got one turn's; each answer is its turn's, whole; no
turn was ever streamed by two drivers, nor a token asked for twice; in the end nothing runs, and nothing is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from gateway.config import EngineSpec, GatewayConfig
from gateway.core.fleet.config import FleetConfig
from gateway.core.fleet.machine import FleetMachine
from gateway.core.fleet.state import FleetState
from gateway.core.retries import Call, choice_id
from gateway.core.types import SamplingParams, SessionId, TokenDelta, TurnId, TurnOrigin, TurnRequest
from gateway.engines.base import EngineChunk, EngineLimits, EngineReport, StreamCut, TakeChunk
from gateway.experience import ExperienceBuffer
from gateway.fleet.fleet import Fleet
from gateway.ports import SessionIdentity
from gateway.runtime.clock import unix_s
from gateway.sessions.known_groups import KnownGroups
from gateway.sessions.registry import SessionRegistry
from gateway.sessions.trainer import Trainer
from gateway.sessions.turn_service import TurnService
from gateway.store import PartialResponsePool, Timeline
from gateway.store.sessions import SessionStore
from gateway.turns.running import RunningTurn
from protos.errors import OutOfCapacity, Unavailable
from tests.sim.virtual import Clock, Process
from tests.support.adapters import lent
from tests.support.watched_fleet import install

install()

PROMPT = (11, 12, 13)
BUDGET = 12
WINDOW_S = 10.0
ATTEMPTS = 4
"""The last one waits for its answer, and is let have it."""
END_S = 2000.0
LAST_BYTES_S = 0.02
"""From an answer's last token to its last byte, in the mean."""


class Violation(AssertionError):
    """What must never be."""


def token(turn_id: str, index: int) -> int:
    return 3 + zlib.crc32(f"{turn_id}:{index}".encode()) % 1000


class SimDatabase:
    """The store's thread: one operation after another, each after a while."""

    failure = ""

    def __init__(self, connection: sqlite3.Connection, rng: random.Random) -> None:
        self._connection = connection
        self._order, self._rng = asyncio.Lock(), rng
        self._posted: set[asyncio.Task[Any]] = set()

    def check(self) -> None:
        return None

    def post_owed(self, operation: Callable[[sqlite3.Connection], Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(self._do(operation))
        self._posted.add(task)
        task.add_done_callback(self._posted.discard)
        return task

    async def run(self, operation: Callable[[sqlite3.Connection], Any]) -> Any:
        return await asyncio.shield(self.post_owed(operation))

    owe = run

    async def synced(self) -> None:
        await asyncio.sleep(self._rng.expovariate(200))

    async def _do(self, operation: Callable[[sqlite3.Connection], Any]) -> Any:
        async with self._order:
            await asyncio.sleep(self._rng.expovariate(20))
            return operation(self._connection)


@dataclass
class SimEngine:
    """Says a turn's own tokens at its own pace, and breaks off by chance. Watches that each turn has one stream."""

    rng: random.Random
    streaming: set[str] = field(default_factory=set)
    asked: dict[str, int] = field(default_factory=dict)

    @contextlib.asynccontextmanager
    async def generate(
        self,
        prompt_ids: tuple[int, ...],
        sampling: SamplingParams,
        request_id: str,
        session_id: str,
        traceparent: str = "",
    ) -> AsyncIterator[SimEngine]:
        turn_id = request_id.rpartition("-")[0]
        begin = BUDGET - sampling.max_tokens
        if turn_id in self.streaming:
            raise Violation(f"turn {turn_id} has two drivers")
        if list(prompt_ids) != [*PROMPT, *(token(turn_id, i) for i in range(begin))]:
            raise Violation(f"turn {turn_id} goes on from what it never said")
        self.streaming.add(turn_id)
        try:
            yield _SimStream(self.rng, turn_id, begin)  # type: ignore[misc]
        finally:
            self.streaming.discard(turn_id)

    async def report(self) -> EngineReport:
        return EngineReport("i", 0.0, 0, 0)

    async def limits(self) -> EngineLimits:
        return EngineLimits(4096, 0, "default")

    async def dtype(self) -> str:
        return ""

    async def weight_version(self) -> str:
        return "default"

    async def close(self) -> None:
        return None


@dataclass
class _SimStream:
    rng: random.Random
    turn_id: str
    position: int

    async def deliver(self, take: TakeChunk) -> None:
        pace = self.rng.choice((1.0, 8.0, 40.0))
        while self.position < BUDGET:
            await asyncio.sleep(self.rng.expovariate(pace))
            if self.rng.random() < 0.04:
                raise StreamCut("reset", "the engine broke off")
            end = min(BUDGET, self.position + self.rng.randint(1, 3))
            ids = tuple(token(self.turn_id, i) for i in range(self.position, end))
            self.position = end
            held = take(EngineChunk(ids, (-1.0,) * len(ids), None, "length" if end == BUDGET else None))
            if held is not None:
                await held


@dataclass
class Request:
    """One that an agent makes, with all its attempts. `digest`: siblings have the same."""

    number: int
    session: SessionId | None
    digest: str
    choices: int
    key: str | None
    marked: bool
    begins_s: float
    answer: dict[str, tuple[int, ...]] | None = None


@dataclass
class World:
    seed: int
    sessions: TurnService
    engine: SimEngine
    rng: random.Random
    last_bytes_s: float
    _numbers: int = 0
    violations: list[str] = field(default_factory=list)
    handlers: set[asyncio.Task[Any]] = field(default_factory=set)

    async def ask(self, request: Request) -> None:
        """A client: attempts until it has an answer."""
        await asyncio.sleep(request.begins_s)
        for attempt in range(100):
            last = attempt >= ATTEMPTS
            call = Call(
                request.digest,
                request.session,
                request.key,
                retried=request.marked and attempt > 0,
                attempt=attempt if request.marked else 0,
            )
            handler = asyncio.ensure_future(self._handle(call, request.choices))
            self.handlers.add(handler)
            handler.add_done_callback(self._over)
            how = "stays" if last else self.rng.choice(("stays", "stays", "hangs up", "is cut off", "answer is lost"))
            if how in ("hangs up", "is cut off"):
                await asyncio.wait([handler], timeout=self.rng.expovariate(1.5))
                if how == "hangs up":
                    handler.cancel()  # the gateway notices; else it writes on to nobody
            else:
                await asyncio.wait([handler])
            if handler.done() and not handler.cancelled():
                error = handler.exception()
                if error is None and how == "stays":
                    request.answer = handler.result()
                    return
                if error is not None and not isinstance(error, (OutOfCapacity, Unavailable)):
                    self.violations.append(f"request {request.number}: {error!r}")
                    return
            pause_s = self.rng.choice((0.0, self.rng.expovariate(20), self.rng.expovariate(2)))
            await asyncio.sleep(pause_s + last)  # one that comes again and again comes later
        self.violations.append(f"request {request.number} never got an answer")

    def _over(self, handler: asyncio.Task[Any]) -> None:
        self.handlers.discard(handler)
        if not handler.cancelled():
            handler.exception()  # told to a client that stayed

    async def _handle(self, call: Call, choices: int) -> dict[str, tuple[int, ...]]:
        """As the HTTP handlers do."""
        runs = await self.sessions.join(call, choices)
        if runs is None:
            try:
                view = await self.sessions.open_session(SessionIdentity(call.session_id, "body"), choices)
            except (OutOfCapacity, Unavailable):
                self.sessions.refused(call)
                raise
            self._numbers += 1
            name = TurnId(f"t{self._numbers}")
            origin = TurnOrigin(call.digest, call.session_id is None, call.idempotency_key)
            runs = [
                self.sessions.start(
                    TurnRequest(
                        choice_id(name, i),
                        view.session_id,
                        0,
                        PROMPT,
                        SamplingParams(max_tokens=BUDGET),
                        choice=i,
                        origin=origin,
                    )
                )
                for i in range(choices)
            ]
        over: list[RunningTurn] = []
        try:
            async with asyncio.TaskGroup() as group:
                read = [group.create_task(_read(run, over)) for run in runs]
            await asyncio.sleep(self.rng.expovariate(1 / self.last_bytes_s))
            for run in runs:
                run.delivered()
        except ExceptionGroup as failed:  # no `except*`: Python 3.11.2 wraps what is raised in it in a group again
            raise failed.exceptions[0] from None
        finally:
            for run in over:
                run.left()
        return {run.request.turn_id: task.result() for run, task in zip(runs, read, strict=True)}

    async def sweep(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            await self.sessions.sweep()


async def _read(run: RunningTurn, over: list[RunningTurn]) -> tuple[int, ...]:
    """Its tokens. `over`: gets it, once it is read to its end."""
    ids: list[int] = []

    def take(delta: TokenDelta) -> None:
        ids.extend(delta.token_ids)

    async with run:
        await run.read(take)
        over.append(run)
    return tuple(ids)


def _requests(rng: random.Random) -> list[Request]:
    """Some groups of siblings: in a session or without, with one choice or two, with keys or none, marked or not."""
    found: list[Request] = []
    for group in range(rng.randint(2, 5)):
        session = SessionId(f"s{group}") if rng.random() < 0.6 else None
        choices = rng.choice((1, 1, 2))
        keyed, marked = rng.random() < 0.2, rng.random() < 0.7
        for _ in range(rng.randint(1, 4)):
            number = len(found)
            key = f"k{number}" if keyed else None
            begins_s = rng.choice((0.0, rng.expovariate(1.0)))
            found.append(Request(number, session, f"d{group}", choices, key, marked, begins_s))
    return found


def run(seed: int, last_bytes_s: float = LAST_BYTES_S) -> list[Request]:
    """One world by its seed; raises Violation, naming it."""
    rng, clock = random.Random(seed), Clock()
    process = Process(clock, rng, "gateway")
    with _virtual_time(clock):
        try:
            life = process.create_task(_live(seed, rng, last_bytes_s))
            clock.run(END_S)
            if not life.done():
                raise Violation(f"seed {seed}: something waits for ever")
            requests = life.result()
            if process.crash is not None:
                raise Violation(f"seed {seed}: {process.crash!r}") from process.crash
        finally:
            process.kill()  # a life that failed, too: its loop would be closed, with a warning, in another test
    return requests


async def _live(seed: int, rng: random.Random, last_bytes_s: float) -> list[Request]:
    engine = SimEngine(rng)
    fleet_config = FleetConfig(max_running=rng.choice((2, 4, 64)), staleness_max=9)
    config = GatewayConfig(
        model="policy",
        tokenizer=Path("none"),
        engines=tuple(EngineSpec(f"e{i}", "vllm", f"http://e{i}:1", None) for i in range(2)),
        fleet=fleet_config,
        queue_max=rng.choice((0, 2, 64)),
        queue_timeout_s=rng.choice((0.2, 30.0)),
        placement_timeout_s=30.0,
        disconnect_grace_s=rng.choice((0.0, 0.05, 1.0)),
        idempotency_window_s=WINDOW_S,
        probe=False,
    )
    with (
        mock.patch("gateway.fleet.fleet.connect", return_value=engine),
        mock.patch("gateway.fleet.watcher.until_broken", _never),
        contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection,
    ):
        database: Any = SimDatabase(connection, rng)
        pool, buffer, timeline = PartialResponsePool(database), ExperienceBuffer(database), Timeline(database)
        store = SessionStore(database)
        for part in (pool, timeline, buffer, store):
            await part.open()
        machine = FleetMachine(FleetState(fleet_config))
        live = SessionRegistry(config, machine, store, timeline, KnownGroups())
        trainer = Trainer(config, machine.state, live, buffer)
        async with contextlib.AsyncExitStack() as stack:
            fleet = await Fleet(config, machine, timeline, trainer.admission, lent()).__aenter__()
            stack.push_async_callback(fleet.close)
            sessions = TurnService(config, live, fleet, trainer, pool=pool, timeline=timeline)
            await fleet.polled()
            world = World(seed, sessions, engine, rng, last_bytes_s)
            requests = _requests(rng)
            sweeping = asyncio.ensure_future(world.sweep())
            await asyncio.gather(*(world.ask(request) for request in requests))
            while world.handlers or sessions.running:  # noqa: ASYNC110 (virtual time)
                await asyncio.sleep(1.0)
            await asyncio.sleep(WINDOW_S + 2.0)
            sweeping.cancel()
            _check(world, requests, pool)
        await pool.close()
        await timeline.close()
    return requests


def _check(world: World, requests: list[Request], pool: PartialResponsePool) -> None:
    wrong = list(world.violations)
    whose: dict[str, int] = {}
    for request in requests:
        for turn_id, ids in (request.answer or {}).items():
            if (other := whose.setdefault(turn_id, request.number)) != request.number:
                wrong.append(f"requests {other} and {request.number} have one turn, {turn_id}")
            if list(ids) != [token(turn_id, i) for i in range(BUDGET)]:
                wrong.append(f"request {request.number} got what turn {turn_id} never said")
        if request.answer is None or len(request.answer) != request.choices:
            wrong.append(f"request {request.number} got {request.answer}")
    counters = world.sessions.counters
    ended = counters.turns_completed + counters.turns_lost + counters.turns_version_lost + counters.turns_aborted
    if (
        world.engine.streaming
        or world.sessions.running
        or pool.statistics().in_flight
        or counters.turns_started < ended
    ):
        wrong.append("something is left")
    if any(s.running or s.spec.ephemeral for s in world.sessions.live):
        wrong.append("a session is left")
    if world.sessions.joinable._buckets or world.sessions.joinable._over:
        wrong.append("a turn is kept beyond its window")
    if wrong:
        raise Violation(f"seed {world.seed}: {'; '.join(wrong)}")


async def _never(url: str, tls: object) -> bool:
    await asyncio.Event().wait()
    return True


@contextlib.contextmanager
def _virtual_time(clock: Clock) -> Iterator[None]:
    told = SimpleNamespace(monotonic=lambda: clock.now, time=lambda: 1e9 + clock.now, perf_counter=lambda: clock.now)
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("gateway.") and getattr(module, "time", None) is time:
                stack.enter_context(mock.patch.object(module, "time", told))
            if name.startswith("gateway.") and getattr(module, "unix_s", None) is unix_s:
                stack.enter_context(mock.patch.object(module, "unix_s", told.time))
        yield
