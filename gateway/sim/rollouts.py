"""A simulated fleet under the gateway's own decisions, in virtual time: predicts the figures of a mode.

The decisions are those of `gateway.core`: the fleet's machine gets the events that the gateway's shells would send it.
Only engines and clocks are simulated.
Clients keep `concurrency` single-turn trajectories running. Seeded: the same settings give the same figures.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gateway.core.fleet.config import FleetConfig
from gateway.core.fleet.events import (
    Added,
    Described,
    Effect,
    Emptying,
    Event,
    Loaded,
    Placed,
    Polled,
    RelayReported,
    RoundBegan,
    SessionEnded,
    TurnEntered,
    TurnLeft,
)
from gateway.core.fleet.machine import FleetMachine
from gateway.core.fleet.modes import mode_of
from gateway.core.fleet.refresh import RefreshDecision
from gateway.core.fleet.state import EngineState, FleetState, TurnLoad
from gateway.core.packing.engine_views import EngineView, SessionLoad, engine_views, weigh
from gateway.core.packing.lengths import TurnLengths
from gateway.core.packing.planners import plan_repack
from gateway.core.packing.plans import Move, RepackConfig
from gateway.core.placing.scheduler import Admission, Demand, Placement, place
from gateway.core.sessions import SessionSpec, SessionState
from gateway.core.types import EngineName, GroupId, SessionId, TurnId, Version
from gateway.sim.engine import SimEngine, SimTurn

MOVES_AT_ONCE = 2
"""Into one engine, as `gateway.repack.mover` paces them."""
RELAY, INCARNATION = "sim", "sim"
"""All engines are beside one relay, and none restarts."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Times in seconds, lengths in tokens."""

    fleet: FleetConfig
    engines: int
    concurrency: int
    kv_capacity_tokens: int
    prompt_tokens: int
    budget_tokens: int
    decode_s: Callable[[int], float]
    prefill_tokens_per_s: float
    load_s: float
    publish_period_s: float
    repack_interval_s: float
    warm_up_s: float
    measured_s: float
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of the measured time, over all engines. A latency begins with the first placement, an answer with the
    client's request."""

    tokens_per_s: float
    kv_util: float
    running_mean: float
    idle_share: float
    trajectories: int
    latency_mean_s: float
    latency_p99_s: float
    latency_max_s: float
    answer_mean_s: float
    answer_p99_s: float
    refreshes: int
    moves: int
    pause_mean_s: float
    pause_p99_s: float
    prefilled_again_tokens: int
    staleness_mean: float
    mixed: int


@dataclass(slots=True)
class _Samples:
    latencies: list[float] = field(default_factory=list)
    answers: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    refreshes: int = 0
    again: int = 0
    mixed: int = 0

    def add(self, later: _Samples) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(later, name))


class Rollouts:
    """One simulation of answers with these `lengths`, one after the other: `run` it, or run it in `stretches`."""

    def __init__(self, settings: Settings, lengths: Sequence[int]) -> None:
        self.settings = settings
        self.now = 0.0
        self._machine = FleetMachine(FleetState(settings.fleet))
        self.state = self._machine.state
        self.engines: dict[EngineName, SimEngine] = {}
        self._lengths, self._next, self._learnt = lengths, 0, TurnLengths()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._due: dict[EngineName, int] = {}
        self._requested = deque([0.0] * settings.concurrency)  # when each waiting client sent its request
        self._resuming: deque[SimTurn] = deque()
        self._turns: dict[TurnId, SimTurn] = {}
        self._to_move: dict[EngineName, deque[Move]] = {}
        self._moving: dict[EngineName, set[TurnId]] = {}
        self._rounds = 0
        self._samples = _Samples()
        for i in range(settings.engines):
            self._add(EngineName(f"e{i:04d}"))
        self._publish_version(1)

    def _add(self, name: EngineName) -> None:
        s = self.settings
        state = EngineState(name, "sim", f"sim://{name}", RELAY)
        self._send(Added(state))
        self._send(Described(name, 0.0, INCARNATION, "1", 0, s.kv_capacity_tokens))
        self.engines[name] = SimEngine(state, self._send, s.decode_s, s.prefill_tokens_per_s)
        self._to_move[name], self._moving[name] = deque(), set()

    def _send(self, event: Event) -> Sequence[Effect]:
        return self._machine.handle(event, self.now)

    def _publish_version(self, version: int) -> None:
        self._send(RelayReported(RELAY, Version(version), frozenset({Version(version)})))

    def run(self) -> Figures:
        found, _ = self.stretches(1)
        return found

    def stretches(self, count: int) -> tuple[Figures, list[Figures]]:
        """The figures of `count` consecutive stretches of `measured_s` after the warm-up: of all as one, and of each. A
        trajectory counts in the stretch in which it ends."""
        s = self.settings
        self._at(s.publish_period_s, self._publish)
        if mode_of(s.fleet).packs:
            self._at(s.repack_interval_s, self._repack_again)
        self._changed()
        self._until(s.warm_up_s)
        whole, begun, found = _Samples(), self._totals(), list[Figures]()
        for n in range(count):
            self._samples, before = _Samples(), self._totals()
            self._until(s.warm_up_s + (n + 1) * s.measured_s)
            found.append(self._figures(self._samples, before))
            whole.add(self._samples)
        return self._figures(whole, begun), found

    # -- time

    def _at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), what))

    def _until(self, end: float) -> None:
        while self._events and self._events[0][0] <= end:
            self.now, _, what = heapq.heappop(self._events)
            what()
        self.now = end
        for name in self.engines:
            self._sync(name)

    def _sync(self, name: EngineName) -> SimEngine:
        """Advances the engine to this moment, through every event that is due."""
        engine = self.engines[name]
        while (due := engine.next_at()) is not None and due < self.now - 1e-9:
            self._happened(engine, engine.advance(due))
        self._happened(engine, engine.advance(self.now))
        return engine

    def _schedule(self, name: EngineName) -> None:
        due = self.engines[name].next_at()
        number = self._due[name] = next(self._numbers)
        if due is not None:
            self._at(max(due, self.now), lambda: self._wake(name, number))

    def _wake(self, name: EngineName, number: int) -> None:
        if self._due[name] == number:
            self._sync(name)
            self._changed()
            self._schedule(name)

    def _happened(self, engine: SimEngine, turns: list[SimTurn]) -> None:
        for turn in turns:
            if turn.turn_id in engine.running:
                self._prefilled(engine, turn)
            else:
                self._ended(engine, turn)

    # -- turns

    def _changed(self) -> None:
        for effect in self._send(RoundBegan(everything=True)):
            if isinstance(effect, RefreshDecision):
                self._load(effect)
        self._serve()

    def _load(self, decision: RefreshDecision) -> None:
        for turn_id in decision.interrupted:
            self._leave(self._turns[turn_id])
            self._resuming.append(self._turns[turn_id])
        self._at(self.now + self.settings.load_s, lambda: self._loaded(decision.engine, decision.to_version))

    def _serve(self) -> None:
        for _ in range(len(self._resuming)):
            turn = self._resuming.popleft()
            found = place(Demand(turn.session, turn.load.tokens), self.state, Admission(0, 0, None, 0))
            if isinstance(found, Placement):
                self._enter(turn, found)
            else:
                self._resuming.append(turn)
        while self._requested:
            turn = self._new_turn()
            found = place(Demand(turn.session, turn.load.tokens), self.state, Admission(0, 0, None, 0))
            if not isinstance(found, Placement):
                return
            self._next += 1
            turn.requested_at = self._requested.popleft()
            self._turns[turn.turn_id] = turn
            self._enter(turn, found)

    def _new_turn(self) -> SimTurn:
        number, s = next(self._numbers), self.settings
        length = self._lengths[self._next % len(self._lengths)]
        spec = SessionSpec(SessionId(f"s{number}"), GroupId(f"s{number}"), ephemeral=True, train=False)
        tokens_max = s.prompt_tokens + s.budget_tokens
        load = TurnLoad(TurnId(f"t{number}"), spec.session_id, s.prompt_tokens, tokens_max, ends_session=True)
        return SimTurn(load, SessionState(spec, self.now, self.now), length, self.now, float(length))

    def _enter(self, turn: SimTurn, found: Placement) -> None:
        if turn.session.version not in (None, self.state.engines[found.engine].version):
            self._samples.mixed += 1
        self._send(Placed(found.engine, turn.session, None, reason=found.reason))
        self._send(SessionEnded(turn.session, forgotten=True))
        self._arrive(turn, found.engine)

    def _arrive(self, turn: SimTurn, name: EngineName) -> None:
        engine = self._sync(name)
        turn.engine = turn.session.engine = name
        self._send(TurnEntered(name, turn.load))
        if turn.left_at:
            self._samples.again += turn.load.tokens
        engine.enter(turn)
        self._schedule(name)

    def _leave(self, turn: SimTurn) -> None:
        assert turn.engine is not None
        engine = self._sync(turn.engine)
        engine.leave(turn)
        self._send(TurnLeft(turn.engine, turn.turn_id))
        turn.left_at = self.now
        self._schedule(turn.engine)

    def _prefilled(self, engine: SimEngine, turn: SimTurn) -> None:
        if turn.turn_id in self._moving[engine.state.name]:
            self._moving[engine.state.name].discard(turn.turn_id)
            self._samples.pauses.append(engine.now - turn.left_at)
            self._at(engine.now, lambda: self._move_on(engine.state.name))

    def _ended(self, engine: SimEngine, turn: SimTurn) -> None:
        self._send(TurnLeft(engine.state.name, turn.turn_id))
        del self._turns[turn.turn_id]
        self._learnt.ended(turn.length)
        self._samples.latencies.append(engine.now - turn.started_at)
        self._samples.staleness.append(self.state.newest - engine.state.version)
        self._samples.answers.append(engine.now - turn.requested_at)
        self._requested.append(engine.now)

    # -- versions

    def _publish(self) -> None:
        self._publish_version(self.state.newest + 1)
        for name in self.engines:
            self._sync(name)
        self._changed()
        if mode_of(self.settings.fleet).packs:
            self._repack()
        self._at(self.now + self.settings.publish_period_s, self._publish)

    def _loaded(self, name: EngineName, version: Version) -> None:
        self._sync(name)
        self._send(Loaded(name, version))
        self._samples.refreshes += 1
        self._changed()
        self._schedule(name)

    # -- repack

    def _repack_again(self) -> None:
        for name in self.engines:
            self._sync(name)
        self._changed()
        self._repack()
        self._at(self.now + self.settings.repack_interval_s, self._repack_again)

    def _repack(self) -> None:
        self._rounds += 1
        config = RepackConfig(prefill_tokens_per_s=self.settings.prefill_tokens_per_s)
        seed = self.settings.seed + self._rounds
        for plan in plan_repack(self._views(), self.state.newest, config, seed=seed):
            for freed in plan.freed:
                self._send(Emptying(freed.engine, True))
            for move in plan.moves:
                self._to_move[move.destination].append(move)
            for name in {m.destination for m in plan.moves}:
                self._move_on(name)

    def _move_on(self, name: EngineName) -> None:
        queue = self._to_move[name]
        while queue and len(self._moving[name]) < MOVES_AT_ONCE:
            move = queue.popleft()
            turn = self._turns.get(move.turn_id) if move.turn_id is not None else None
            if turn is not None and turn.engine == move.source:
                self._leave(turn)
                turn.session.moves += 1
                turn.load = replace(turn.load, generated=int(turn.generated), moves=turn.session.moves)
                self._moving[name].add(turn.turn_id)
                self._arrive(turn, name)
            if not any(m.source == move.source for moves in self._to_move.values() for m in moves):
                self._send(Emptying(move.source, False))
        self._changed()

    def _views(self) -> list[EngineView]:
        engines = [e for e in self.state.sorted_engines() if e.status == "serving"]
        for engine in engines:
            usage = min(1.0, engine.tokens / engine.kv_capacity_tokens)
            self._send(Polled(engine.name, self.now, INCARNATION, usage, len(engine.turns), 0))
        inbound = {engine.name: self._inbound(engine.name) for engine in engines}
        return engine_views(engines, self.state, self._learnt, waiting={}, inbound=inbound, back_s=0.0, context=0)

    def _inbound(self, name: EngineName) -> list[SessionLoad]:
        loads = [turn.load for m in self._to_move[name] if (turn := self._turns.get(m.turn_id or TurnId("")))]
        return weigh(loads, lengths=self._learnt, each_s=np.zeros(len(loads)), back_s=0.0, context=0).sessions()

    # -- figures

    def _totals(self) -> tuple[float, ...]:
        engines = self.engines.values()
        decoded, kv = sum(e.decoded_tokens for e in engines), sum(e.kv_share_s for e in engines)
        return decoded, kv, sum(e.running_s for e in engines), sum(e.idle_s for e in engines), self.now

    def _figures(self, samples: _Samples, before: tuple[float, ...]) -> Figures:
        """The figures since the totals were as `before`."""
        decoded, kv, running, idle, seconds = (b - a for a, b in zip(before, self._totals(), strict=True))
        latencies, pauses = sorted(samples.latencies), sorted(samples.pauses)
        each = seconds * len(self.engines)
        return Figures(
            tokens_per_s=decoded / seconds,
            kv_util=kv / each,
            running_mean=running / each,
            idle_share=idle / each,
            trajectories=len(latencies),
            latency_mean_s=statistics.fmean(latencies) if latencies else 0.0,
            latency_p99_s=_quantile(latencies, 0.99),
            latency_max_s=latencies[-1] if latencies else 0.0,
            answer_mean_s=statistics.fmean(samples.answers) if samples.answers else 0.0,
            answer_p99_s=_quantile(sorted(samples.answers), 0.99),
            refreshes=samples.refreshes,
            moves=len(pauses),
            pause_mean_s=statistics.fmean(pauses) if pauses else 0.0,
            pause_p99_s=_quantile(pauses, 0.99),
            prefilled_again_tokens=samples.again,
            staleness_mean=statistics.fmean(samples.staleness) if samples.staleness else 0.0,
            mixed=samples.mixed,
        )


def _quantile(values: list[float], q: float) -> float:
    return values[min(len(values) - 1, int(q * len(values)))] if values else 0.0
