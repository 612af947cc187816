"""Repack: which turns move where, so that whole engines become free for a newer version. Pure.

After the Laminar paper's Algorithm 1 (best fit within groups of one weight version), with what its listing misses:
a chosen destination never becomes a source in the same plan, planned inbound load counts, and every move has a price.

Invariants of a plan:
- source and destination serve the same version;
- with everything inbound and the growth expected of it, no destination exceeds C_max or B;
- no engine is both source and destination; every turn of a source moves, or none does.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.core.types import EngineName, SessionId, TurnId, Version


@dataclass(frozen=True, slots=True)
class RepackConfig:
    max_running: int  # B
    kv_max: float  # C_max, share of a destination's KV tokens
    moves_max: int = 4  # of one session in its life
    prefill_tokens_per_s: float = 1000.0  # price of moving: every token of a moved turn is computed again
    decode_tokens_per_s: float = 15.0  # of one turn: tells how long a source would still drain


@dataclass(frozen=True, slots=True)
class TurnView:
    turn_id: TurnId
    session_id: SessionId
    tokens: int
    expected_growth: int  # tokens it will probably still generate
    moves: int = 0
    remaining_s: float = 0.0  # how long its session will probably still come back, tool calls included


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine past its peak or not, as the planner sees it."""

    name: EngineName
    version: Version
    kv_capacity_tokens: int
    intake_open: bool
    queued: int
    turns: tuple[TurnView, ...]
    idle_tokens: int = 0  # of tool-waiting sessions that will come back to it

    @property
    def tokens(self) -> int:
        return sum(t.tokens for t in self.turns) + self.idle_tokens

    @property
    def grown_tokens(self) -> int:
        return self.tokens + sum(t.expected_growth for t in self.turns)


@dataclass(frozen=True, slots=True)
class Move:
    turn_id: TurnId
    session_id: SessionId
    source: EngineName
    destination: EngineName
    tokens: int  # to prefill again


@dataclass(frozen=True, slots=True)
class Plan:
    """`freed` engines are empty once the moves are done. `reasons` says, per engine looked at, why or why not."""

    version: Version
    moves: tuple[Move, ...]
    freed: tuple[EngineName, ...]
    price_s: float
    gain_s: float
    reasons: tuple[str, ...] = ()


@dataclass(slots=True)
class _Planned:
    inbound_tokens: dict[EngineName, int] = field(default_factory=dict)
    inbound_turns: dict[EngineName, int] = field(default_factory=dict)
    sources: set[EngineName] = field(default_factory=set)


def plan_repack(
    engines: Sequence[EngineView], newest: Version, config: RepackConfig, *, seed: int = 0
) -> tuple[Plan, ...]:
    """One plan per version that is behind `newest` and has more than one engine; may hold no moves, then says why."""
    counts = Counter(e.version for e in engines if e.version < newest)
    several = sorted(version for version, count in counts.items() if count > 1)
    named = sorted(engines, key=lambda e: e.name)  # whatever order they come in, a seed gives one plan
    return tuple(_plan_group([e for e in named if e.version == v], v, config, seed) for v in several)


def past_peak(engine: EngineView, config: RepackConfig) -> str:
    """Empty when the engine takes part in packing, else why it does not."""
    if engine.intake_open:
        return "its intake is open"
    if engine.queued:
        return f"{engine.queued} turns wait on it"
    if engine.tokens >= config.kv_max * engine.kv_capacity_tokens:
        return "its KV is full"
    if len(engine.turns) >= config.max_running:
        return "it runs a full batch"
    return ""


def _plan_group(group: Sequence[EngineView], version: Version, config: RepackConfig, seed: int) -> Plan:
    reasons = [f"{e.name} stays: {why}" for e in group if (why := past_peak(e, config))]
    packable = [e for e in group if not past_peak(e, config)]
    tie = random.Random(f"{seed}:{version}")
    order = sorted(packable, key=lambda e: (e.tokens, tie.random()))
    planned, moves, price, gain = _Planned(), list[Move](), 0.0, 0.0
    for source in order:
        if not source.turns:
            reasons.append(f"{source.name} stays: it is empty already")
            continue
        if source.name in planned.inbound_turns:
            continue
        destination = _best_fit(source, order, planned, config)
        why_not = _why_not(source, destination, config)
        if why_not or destination is None:
            reasons.append(f"{source.name} stays: {why_not}")
            continue
        planned.sources.add(source.name)
        planned.inbound_tokens[destination.name] = planned.inbound_tokens.get(destination.name, 0) + source.grown_tokens
        planned.inbound_turns[destination.name] = planned.inbound_turns.get(destination.name, 0) + len(source.turns)
        moves += [Move(t.turn_id, t.session_id, source.name, destination.name, t.tokens) for t in source.turns]
        price, gain = price + _price_s(source, config), gain + _gain_s(source, config)
        reasons.append(
            f"{source.name} goes to {destination.name}: {len(source.turns)} turns, "
            f"{sum(t.tokens for t in source.turns)} tokens to prefill again"
        )
    return Plan(version, tuple(moves), tuple(sorted(planned.sources)), price, gain, tuple(reasons))


def _best_fit(
    source: EngineView, order: Sequence[EngineView], planned: _Planned, config: RepackConfig
) -> EngineView | None:
    """The fullest engine that still takes all of `source`. An empty one is no destination: it is free already."""
    fitting = [
        d
        for d in order
        if d.name != source.name and d.turns and d.name not in planned.sources and _fits(source, d, planned, config)
    ]
    return max(fitting, key=lambda d: (d.tokens + planned.inbound_tokens.get(d.name, 0), d.name), default=None)


def _fits(source: EngineView, destination: EngineView, planned: _Planned, config: RepackConfig) -> bool:
    tokens = destination.grown_tokens + planned.inbound_tokens.get(destination.name, 0) + source.grown_tokens
    turns = len(destination.turns) + planned.inbound_turns.get(destination.name, 0) + len(source.turns)
    return tokens <= config.kv_max * destination.kv_capacity_tokens and turns <= config.max_running


def _why_not(source: EngineView, destination: EngineView | None, config: RepackConfig) -> str:
    if destination is None:
        return "no engine of its version has room for all of it"
    tired = [t for t in source.turns if t.moves >= config.moves_max]
    if tired:
        return f"{len(tired)} of its sessions have moved {config.moves_max} times"
    price, gain = _price_s(source, config), _gain_s(source, config)
    return f"prefilling again costs {price:.2f} s and frees only {gain:.2f} s" if gain <= price else ""


def _price_s(source: EngineView, config: RepackConfig) -> float:
    """Engine seconds spent on computing the moved tokens again, those of idle sessions when they come back."""
    return source.tokens / config.prefill_tokens_per_s


def _gain_s(source: EngineView, config: RepackConfig) -> float:
    """Engine seconds freed: how long its longest session would hold it, times the share of its batch left empty."""
    drain_s = max(max(t.expected_growth / config.decode_tokens_per_s, t.remaining_s) for t in source.turns)
    return drain_s * (1 - len(source.turns) / config.max_running)
