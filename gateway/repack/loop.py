"""The repack loop: plans every few seconds, and when a version arrives, and passes the plans to the mover.

The event loop that plans also carries every token of the fleet. So a round works in steps that are bounded however
large the fleet is, and other tasks run in between: `STEP_SESSIONS` sessions are read at a time, and each part of a plan
(`plan_parts`) starts its moves before the next part is made. What changes meanwhile costs at most a move that fails,
because its turn has ended or its engine is gone. Moves take seconds, so that happens anyway.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec
import numpy as np

from gateway.config import GatewayConfig
from gateway.core.fleet.events import Learnt
from gateway.core.fleet.state import EngineState, TurnLoad
from gateway.core.packing.engine_views import EngineView, Loads, SessionLoad, engine_views, steady, weigh
from gateway.core.packing.lengths import SessionDurations
from gateway.core.packing.planners import PLANNERS, behind
from gateway.core.packing.plans import Plan, RepackConfig, whole
from gateway.core.packing.receipts import ReceiptBook
from gateway.core.sessions import SessionState
from gateway.core.types import EngineName, SessionId, TurnId, Version
from gateway.fleet.fleet import Fleet
from gateway.repack.mover import TurnMover
from gateway.sessions.turn_service import TurnService
from gateway.store import Timeline

log = logging.getLogger(__name__)

STEP_SESSIONS = 4096
"""Sessions read without a pause: some two milliseconds."""
Waiting = Mapping[tuple[EngineName, Version], Sequence[SessionState]]
"""Sessions that wait for a tool, by the engine that holds their prefix and their version."""


class Repacker:
    """Owner of the plans and their receipts. `last`: the newest plan of each version."""

    def __init__(
        self,
        config: GatewayConfig,
        fleet: Fleet,
        sessions: TurnService,
        durations: SessionDurations,
        timeline: Timeline,
    ) -> None:
        self.last: tuple[Plan, ...] = ()
        self._config, self._fleet, self._timeline = config, fleet, timeline
        self._sessions, self._durations = sessions, durations
        self._mover = TurnMover(fleet, sessions)
        self._planner = PLANNERS[config.planner]
        self._round, self._planning = 0, asyncio.Lock()

    @property
    def book(self) -> ReceiptBook:
        return self._mover.book

    async def run(self) -> None:
        """Until cancelled; moves in progress then continue until `close`."""
        while True:
            try:
                async with asyncio.timeout(self._config.repack_interval_s):
                    await self._fleet.version_available.wait()
            except TimeoutError:
                pass  # the periodic check
            self._fleet.version_available.clear()
            await self.repack()

    async def close(self) -> None:
        await self._mover.close()

    async def plan(self) -> tuple[Plan, ...]:
        """The plans that would be made now; changes nothing."""
        return await self._plans(carry_out=False)

    async def repack(self) -> tuple[Plan, ...]:
        """Plans, and starts the moves. One round at a time: a plan counts what earlier ones sent."""
        async with self._planning:
            self._round += 1
            self._fleet.send(Learnt(prefill_tokens_per_s=self.prefill_tokens_per_s))
            self.last = await self._plans(carry_out=True)
        return self.last

    async def _plans(self, *, carry_out: bool) -> tuple[Plan, ...]:
        """One plan for each version that can be packed."""
        config = RepackConfig(prefill_tokens_per_s=self.prefill_tokens_per_s)
        seed, plans = self._config.seed + self._round, list[Plan]()
        waiting = await self._sessions_that_wait()
        serving = self._serving()
        for version in behind((e.version for e in serving if e.kv_capacity_tokens), self._fleet.state.newest):
            group = [e for e in serving if e.version == version]
            views, parts = await self._views(version, group, waiting), list[Plan]()
            for part in self._planner(views, version, config, seed=seed):
                parts.append(part)
                if carry_out and part.freed:
                    self._carry_out(part)
                await asyncio.sleep(0)
            plans.append(whole(parts))
        return tuple(plans)

    @property
    def prefill_tokens_per_s(self) -> float:
        """As the last moves measured it; as configured before there were enough."""
        return self.book.prefill_tokens_per_s(self._config.prefill_tokens_per_s)

    def _carry_out(self, plan: Plan) -> None:
        self._sessions.counters.repacks += 1
        reason = "; ".join(plan.reasons)
        log.info("repack of version %d: %d moves: %s", plan.version, plan.num_moves, reason)
        self._timeline.add(
            "repack",
            version=plan.version,
            moves=[msgspec.structs.asdict(move) for move in plan.moves],
            freed=[freed.engine for freed in plan.freed],
            price_s=plan.price_s,
            gain_s=plan.gain_s,
            reason=reason,
        )
        self._mover.start(plan)

    # -- what the planner sees

    async def _views(self, version: Version, group: Sequence[EngineState], waiting: Waiting) -> list[EngineView]:
        """The views of those engines of a version whose KV is known."""
        context, inbound = _smallest_context(group), self._inbound(group)
        views: list[EngineView] = []
        async for step in _in_steps([e for e in group if e.kv_capacity_tokens]):
            engines = [e for e in step if e.takes_turns and e.version == version]  # still
            views += self._view(engines, waiting, inbound, context)
        return views

    def _view(
        self, engines: Sequence[EngineState], waiting: Waiting, inbound: Loads, context: int
    ) -> Sequence[EngineView]:
        """`context`: the smallest of the version's engines."""
        back_s = self._durations.typical_s / 2  # how long a session probably goes on after its turn
        return engine_views(
            engines,
            self._fleet.state,
            self._sessions.lengths,
            waiting={e.name: found for e in engines if (found := _idle(e, waiting, back_s))} if waiting else {},
            inbound=inbound,
            back_s=back_s,
            context=context,
        )

    async def loads(self, engine: EngineState) -> Sequence[SessionLoad]:
        """The sessions on one engine, as the planner sees them."""
        context = _smallest_context([e for e in self._serving() if e.version == engine.version])
        [found] = self._view([engine], await self._sessions_that_wait(), {}, context)
        return found.list_sessions()

    def _serving(self) -> list[EngineState]:
        return [e for e in self._fleet.state.sorted_engines() if e.takes_turns]

    async def _sessions_that_wait(self) -> Waiting:
        found = defaultdict[tuple[EngineName, Version], list[SessionState]](list)
        live = list(self._sessions.live)
        for begin in range(0, len(live), STEP_SESSIONS):
            for state in live[begin : begin + STEP_SESSIONS]:
                if state.engine is not None and state.version is not None and not state.running and state.tokens:
                    found[state.engine, state.version].append(state)
            await asyncio.sleep(0)
        return found

    def _inbound(self, group: Sequence[EngineState]) -> Loads:
        """What earlier plans move from one engine of the group to another, and has not arrived."""
        if not self._mover.inbound:
            return {}
        engines = {engine.name: engine for engine in group}
        found = defaultdict[EngineName, list[SessionLoad]](list)
        turns, to = list[TurnLoad](), list[EngineName]()
        for key, there in self._mover.inbound.items():
            if there not in engines or key in engines[there].turns:
                continue
            turn, session = self._sessions.running.get(TurnId(key)), self._sessions.live.find(SessionId(key))
            if turn is not None and turn.engine is not None and turn.engine in engines:
                turns.append(engines[turn.engine].turns[turn.request.turn_id])
                to.append(there)
            elif session is not None and session.engine != there:
                found[there].append(SessionLoad(session.session_id, None, steady(session.tokens)))
        loads = weigh(turns, lengths=self._sessions.lengths, each_s=np.zeros(len(turns)), back_s=0.0, context=0)
        for there, load in zip(to, loads.sessions(), strict=True):
            found[there].append(load)
        return found


def _idle(engine: EngineState, waiting: Waiting, back_s: float) -> list[SessionLoad]:
    still = [s for s in waiting.get((engine.name, engine.version), ()) if not s.running]
    return [SessionLoad(s.session_id, None, steady(s.tokens), back_s, s.moves) for s in still]


async def _in_steps(engines: Sequence[EngineState]) -> AsyncIterator[Sequence[EngineState]]:
    """As many engines at a time as have some `STEP_SESSIONS` turns; other tasks run in between."""
    step, num = list[EngineState](), 0
    for engine in engines:
        step.append(engine)
        num += 1 + len(engine.turns)
        if num >= STEP_SESSIONS:
            yield step
            await asyncio.sleep(0)
            step, num = [], 0
    yield step


def _smallest_context(engines: Sequence[EngineState]) -> int:
    """The smallest context that an engine reports; 0 if none does."""
    return min((engine.context_tokens for engine in engines if engine.context_tokens), default=0)
