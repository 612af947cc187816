"""The repack loop: every few seconds, and right after a version arrives, plans, and has the plan carried out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from gateway.config import GatewayConfig
from gateway.core.curves import SECONDS_PER_TOKEN
from gateway.core.fleet import EngineState, TurnLoad
from gateway.core.lengths import SessionDurations
from gateway.core.receipts import ReceiptBook
from gateway.core.repack import EngineView, Plan, RepackConfig, SessionLoad, plan_repack, turn_load
from gateway.core.sessions import SessionState
from gateway.core.types import EngineName, Version
from gateway.fleet.fleet import Fleet
from gateway.repack.mover import TurnMover
from gateway.sessions.service import TurnService
from gateway.store import Timeline
from gateway.turns.running import RunningTurn

log = logging.getLogger(__name__)

Waiting = Mapping[tuple[EngineName, Version], Sequence[SessionState]]
"""Sessions that wait for a tool, by engine and version."""


class Repacker:
    """Owns the plans and their history. `last` is the newest plan of each version looked at."""

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
        self._round = 0

    @property
    def book(self) -> ReceiptBook:
        return self._mover.book

    async def run(self) -> None:
        """Until cancelled; moves that are under way then go on, up to `close`."""
        while True:
            try:
                async with asyncio.timeout(self._config.repack_interval_s):
                    await self._fleet.version_available.wait()
            except TimeoutError:
                pass  # the periodic check
            self._fleet.version_available.clear()
            self.repack()

    async def close(self) -> None:
        await self._mover.close()

    def plan(self) -> tuple[Plan, ...]:
        """What would be done now; nothing is changed."""
        rate = self.prefill_tokens_per_s
        seed = self._config.seed + self._round
        return plan_repack(self._views(), self._fleet.state.newest, RepackConfig(prefill_tokens_per_s=rate), seed=seed)

    @property
    def prefill_tokens_per_s(self) -> float:
        """As the last moves measured it; as configured before there were enough."""
        return self.book.prefill_tokens_per_s(self._config.prefill_tokens_per_s)

    def repack(self) -> tuple[Plan, ...]:
        """Plans, and begins to carry out what pays."""
        self._round += 1
        self._fleet.state.prefill_tokens_per_s = self.prefill_tokens_per_s
        self.last = self.plan()
        for plan in self.last:
            if plan.moves:
                self._carry_out(plan)
        return self.last

    def _carry_out(self, plan: Plan) -> None:
        self._sessions.counters.repacks += 1
        reason = "; ".join(plan.reasons)
        log.info("repack of version %d: %d moves: %s", plan.version, len(plan.moves), reason)
        self._timeline.add(
            "repack",
            version=plan.version,
            moves=[asdict(move) for move in plan.moves],
            freed=[freed.engine for freed in plan.freed],
            price_s=plan.price_s,
            gain_s=plan.gain_s,
            reason=reason,
        )
        self._mover.start(plan)

    # -- what the planner sees

    def _views(self) -> list[EngineView]:
        all_serving = self._serving()
        serving = [e for e in all_serving if e.kv_capacity_tokens]
        newest = self._fleet.state.newest
        waiting, contexts = self._sessions.waiting(), _smallest_contexts(all_serving)
        held = {
            e.name: [] if e.intake_open or e.version >= newest else self._loads(e, waiting, contexts) for e in serving
        }
        inbound: dict[EngineName, list[SessionLoad]] = {e.name: [] for e in serving}
        for load in (load for loads in held.values() for load in loads):
            there = self._mover.inbound.get(load.key)
            if there in inbound and load not in held[there]:
                inbound[there].append(load)
        return [self._view(e, held[e.name], inbound[e.name]) for e in serving]

    def _view(self, engine: EngineState, held: list[SessionLoad], inbound: list[SessionLoad]) -> EngineView:
        return EngineView(
            name=engine.name,
            version=engine.version,
            kv_capacity_tokens=engine.kv_capacity_tokens,
            batch_max=engine.curve.roofline_batch(self._config.fleet.max_running),
            kv_max=self._fleet.state.kv_ceiling(engine).value,
            intake_open=engine.intake_open,
            queued=engine.waiting_reported,
            sessions=tuple(held),
            inbound=tuple(inbound),
            leaving=engine.leaving,
        )

    def loads(self, engine: EngineState) -> list[SessionLoad]:
        """What lies on one engine, as the planner sees it."""
        return self._loads(engine, self._sessions.waiting(), _smallest_contexts(self._serving()))

    def _serving(self) -> list[EngineState]:
        return [e for e in self._fleet.state.sorted_engines() if e.status == "serving"]

    def _loads(self, engine: EngineState, all_waiting: Waiting, contexts: Mapping[Version, int]) -> list[SessionLoad]:
        each_s = engine.curve.seconds_per_token(len(engine.turns)) or SECONDS_PER_TOKEN
        back_s = self._durations.typical_s / 2
        runs = [(load, self._sessions.running.get(load.turn_id)) for load in engine.turns.values()]
        smallest = contexts.get(engine.version, 0)
        running = [self._running(load, run, each_s, back_s, smallest) for load, run in runs if run is not None]
        relayed = [
            SessionLoad(t.session_id, t.turn_id, t.tokens, stays=True) for t in engine.turns.values() if t.relayed
        ]
        waiting = (self._waiting(s, back_s) for s in all_waiting.get((engine.name, engine.version), ()))
        return [*running, *relayed, *waiting]

    def _running(self, load: TurnLoad, run: RunningTurn, each_s: float, back_s: float, smallest: int) -> SessionLoad:
        """`smallest`: context of the version's engines; what may outgrow it stays where it is."""
        return turn_load(
            load,
            generated=len(run.record.token_ids),
            moves=run.session.moves,
            ends_session=run.session.spec.ephemeral,
            lengths=self._sessions.lengths,
            each_s=each_s,
            back_s=back_s,
            stays=run.request.sampling.in_place or 0 < smallest < load.tokens_max,
            expected=run.session.spec.expected_output_tokens,
        )

    def _waiting(self, session: SessionState, back_s: float) -> SessionLoad:
        return SessionLoad(
            session.session_id,
            None,
            session.tokens,
            remaining_s=back_s,
            moves=session.moves,
        )


def _smallest_contexts(serving: Sequence[EngineState]) -> Mapping[Version, int]:
    """Of each version's engines, where they told theirs."""
    found: dict[Version, int] = {}
    for engine in serving:
        if engine.context_tokens:
            found[engine.version] = min(engine.context_tokens, found.get(engine.version, engine.context_tokens))
    return found
