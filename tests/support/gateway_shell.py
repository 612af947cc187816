"""The gateway without its doors: fleet, sessions and pool over cutting engines, put together as `gateway.app` does."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.app import assemble, open_stores
from gateway.config import EngineSpec, GatewayConfig
from gateway.core.fleet.config import FleetConfig
from gateway.core.sessions import SessionSpec, SessionState
from gateway.core.types import EngineName, GroupId, SamplingParams, SessionId, TokenDelta, TurnId, TurnRequest
from gateway.fleet.fleet import Fleet
from gateway.repack.loop import Repacker
from gateway.sessions.endings import Endings
from gateway.sessions.recovery import recover
from gateway.sessions.trainer import Trainer
from gateway.sessions.turn_service import TurnService
from gateway.store import Database, PartialResponsePool, Timeline
from gateway.turns.running import RunningTurn
from protos.telemetry.spans import Tracer
from tests.support.reading import heard
from tests.support.scripted_engine import MODEL, ScriptedEngine, scripted, until
from tests.support.watched_fleet import install

install()

PROMPT = (11, 12, 13)
BUDGET = 12
STALL_S = 60.0


@dataclass
class Shell:
    fleet: Fleet
    sessions: TurnService
    endings: Endings
    trainer: Trainer
    pool: PartialResponsePool
    timeline: Timeline
    repacker: Repacker
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def session(self, name: str = "", **spec: Any) -> SessionState:
        name = name or f"s{next(self._numbers)}"
        return self.sessions.live.create(SessionSpec(SessionId(name), GroupId(name), **spec))[0]

    def run(self, session: SessionState | None = None, budget: int = BUDGET, **sampling: Any) -> RunningTurn:
        """A turn of `session`, not yet started; its prompt is the session's record and `PROMPT`."""
        session = session or self.session()
        prompt = (*session.token_ids, *PROMPT)
        turn_id = TurnId(f"t{next(self._numbers)}")
        params = SamplingParams(max_tokens=budget, **sampling)
        newest = session.tree.newest
        parent, depth = (None, 0) if newest is None else (newest.turn_id, newest.depth + 1)
        return self.sessions.start(TurnRequest(turn_id, session.session_id, depth, prompt, params, parent))

    def status(self, engine: ScriptedEngine) -> str:
        return self.fleet.state.engines[EngineName(engine.name)].status

    def turns_on(self, engine: ScriptedEngine) -> list[str]:
        return list(self.fleet.state.engines[EngineName(engine.name)].turns)

    async def taken(self, length: int) -> None:
        """Until the only turn's prompt and generated ids are `length`: before a cut, lest the reset take them along."""
        await until(lambda: self.pool.statistics().appended_tokens >= length - len(PROMPT), f"{length} ids taken")

    async def outcome(self, run: RunningTurn) -> tuple[list[int], list[float], list[tuple[str, int, int]]]:
        """What the partial-response pool has of a turn: ids, logprobs, segments."""
        await self.pool.flush()
        kept = [k.record for k in await self.pool.kept_turns(run.request.session_id)]
        [record] = [r for r in kept if r.request.turn_id == run.request.turn_id]
        return record.token_ids, record.logprobs, [(s.engine, s.start, s.end) for s in record.segments]


@contextlib.asynccontextmanager
async def shell(
    directory: Path,
    *engines: ScriptedEngine,
    relay: str | None = None,
    fleet: FleetConfig | None = None,
    broken: Sequence[ScriptedEngine] = (),
    tracer: Tracer | None = None,
    **config: Any,
) -> AsyncIterator[Shell]:
    """Engines are looked at when they come and when a stream breaks, else not: no test waits for a poll.

    `engines` serve when this yields; `broken` ones are members that never will.
    """
    quick = {
        "disconnect_grace_s": 0.0,
        "poll_interval_s": 30.0,
        "dead_after_polls": 1,
        "stall_timeout_s": STALL_S,
        "placement_timeout_s": 60.0,
        "probe": False,
    }
    config = {**quick, "fleet": fleet or FleetConfig(), **config}
    specs = tuple(EngineSpec(e.name, "vllm", e.url, relay) for e in (*engines, *broken))
    settings = GatewayConfig(model=MODEL, tokenizer=directory, data=directory, engines=specs, **config)
    async with contextlib.AsyncExitStack() as stack:
        database = await stack.enter_async_context(Database(directory / "gateway.sqlite"))
        stores = await open_stores(database, stack)
        parts = assemble(settings, stores, tracer=tracer)
        await recover(parts.sessions, stores.sessions, stores.pool)
        await parts.fleet.__aenter__()
        stack.push_async_callback(parts.fleet.close)
        stack.push_async_callback(parts.endings.close)
        found = Shell(
            parts.fleet,
            parts.sessions,
            parts.endings,
            parts.trainer,
            stores.pool,
            stores.timeline,
            parts.repacker,
        )
        await until(lambda: all(found.status(e) == "serving" for e in engines), "serving engines")
        yield found


async def read(run: RunningTurn) -> list[TokenDelta]:
    """The whole turn."""
    async with run:
        return await heard(run)


def check_whole(run: RunningTurn, deltas: list[TokenDelta], budget: int = BUDGET) -> None:
    """The client's tokens, the record and the session are the uncut turn's, and deltas fit their segments."""
    ids, logprobs = scripted(run.request.prompt_ids, budget)
    assert [t for d in deltas for t in d.token_ids] == run.record.token_ids == ids
    assert [p for d in deltas for p in d.logprobs] == run.record.logprobs == logprobs
    assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert run.session.token_ids[-len(PROMPT) - budget :] == [*PROMPT, *ids]
    assert [s.start for s in run.segments] == [0, *(s.end for s in run.segments)][:-1]
    assert all(d.engine == run.segments[d.segment].engine for d in deltas if d.token_ids)


def check_at_rest(shell: Shell) -> None:
    """Nothing is left of any turn, and every turn that began ended in one way."""
    counters = shell.sessions.counters
    assert {name: list(e.turns) for name, e in shell.fleet.state.engines.items() if e.turns} == {}
    assert not shell.sessions.running
    assert shell.pool.statistics().in_flight == 0
    assert counters.turns_started == sum(
        (counters.turns_completed, counters.turns_lost, counters.turns_version_lost, counters.turns_aborted)
    )
