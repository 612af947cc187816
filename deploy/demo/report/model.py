"""From a recording to what the page draws. Pure; all times are seconds since the end of the set-up.

Invariants:
- two segments on one lane of an engine never overlap: a lane is one slot of its batch;
- every jump joins two segments of the same turn, in order of time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from deploy.demo.recording import (
    EngineChange,
    EngineStatus,
    GatewayStatus,
    Note,
    Publish,
    Recording,
    Refresh,
    RelaySeen,
    Repack,
    Segment,
    SessionChange,
    Step,
)
from deploy.demo.report.summary import Summary, finished_rewards

OVERLAP_TOLERANCE_S = 1e-6


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """A segment, placed: `lane` is a slot of `engine`."""

    session: str
    group: str
    turn: int
    engine: str
    lane: int
    version: int
    t0: float
    t1: float
    tokens: int
    cause: str
    end: str


class Jump(msgspec.Struct, frozen=True, array_like=True):
    """A turn that went on elsewhere: indices of bars."""

    source: int
    target: int
    cause: str  # "move" | "cut"


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Some time of one engine in which it did not generate."""

    engine: str
    kind: str  # "refresh" | "dead"
    t0: float
    t1: float
    label: str


class VersionTravel(msgspec.Struct, frozen=True, kw_only=True):
    """When a version got where; None or absent: not seen there."""

    version: int
    step: int | None
    began: float | None  # the trainer called publish
    copied: float | None  # its tensors might change again
    sealed: float | None
    held: dict[str, float]  # by relay
    loaded: dict[str, float]  # by engine, the first time


class Lanes(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's place on the timeline."""

    name: str
    lanes: int


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the run was, for the page's head."""

    title: str
    started_unix_s: float
    wall_s: float
    setup_s: float
    seed: int
    ok: bool
    verdict: str
    facts: dict[str, str] = {}
    processes: tuple[dict[str, Any], ...] = ()


class ReportModel(msgspec.Struct, frozen=True, kw_only=True):
    """Everything on the page."""

    run: RunInfo
    summary: dict[str, float | int]
    duration_s: float
    engines: tuple[Lanes, ...]
    bars: tuple[Bar, ...]
    sessions: dict[str, dict[str, Any]]  # environment, state, reward
    jumps: tuple[Jump, ...]
    spans: tuple[Span, ...]
    repacks: tuple[dict[str, Any], ...]
    versions: tuple[VersionTravel, ...]
    relays: tuple[str, ...]
    steps: tuple[dict[str, Any], ...]
    rewards: tuple[tuple[float, str, float], ...]  # (t, environment, reward) of finished trajectories
    load: dict[str, tuple[tuple[float, int, float], ...]]  # by engine: (t, running, KV use)
    staleness: dict[str, dict[str, int]]
    notes: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class _Clock:
    """Unix seconds to seconds of the run."""

    zero: float

    def at(self, unix_s: float) -> float:
        return round(unix_s - self.zero, 3)

    def maybe(self, unix_s: float | None) -> float | None:
        return None if unix_s is None else self.at(unix_s)


def report_model(recording: Recording, run: RunInfo, summary: Summary) -> ReportModel:
    """What the page draws."""
    clock = _Clock(run.started_unix_s)
    bars = place(recording.of(Segment), clock.zero)
    spans = _spans(recording, clock, run.wall_s)
    names = sorted({bar.engine for bar in bars} | {span.engine for span in spans} | set(_engine_names(recording)))
    ends = [bar.t1 for bar in bars] + [run.wall_s]
    return ReportModel(
        run=run,
        summary={field: getattr(summary, field) for field in Summary.__slots__},
        duration_s=round(max(ends), 3),
        engines=tuple(Lanes(name=name, lanes=_num_lanes(bars, name)) for name in names),
        bars=bars,
        sessions=_sessions(recording),
        jumps=jumps(bars),
        spans=spans,
        repacks=tuple(_repack(seen, clock) for seen in recording.of(Repack)),
        versions=travels(recording, clock.zero),
        relays=tuple(sorted({seen.relay for seen in recording.of(RelaySeen)})),
        steps=tuple({**msgspec.to_builtins(step), "t": clock.at(step.t)} for step in recording.of(Step)),
        rewards=tuple((clock.at(t), environment, reward) for t, environment, reward in finished_rewards(recording)),
        load=_load(recording, clock),
        staleness=(recording.last(GatewayStatus) or GatewayStatus()).staleness,
        notes=_notes(recording, clock),
    )


def place(segments: Sequence[Segment], zero: float) -> tuple[Bar, ...]:
    """Gives every segment a lane of its engine: the one its session had before if that is free, else the lowest."""
    free_at: dict[str, list[float]] = defaultdict(list)
    last_lane: dict[tuple[str, str], int] = {}
    bars = []
    for segment in sorted(segments, key=lambda seen: (seen.started_unix_s, seen.session_id, seen.turn)):
        ends = free_at[segment.engine]
        lane = _free_lane(ends, segment.started_unix_s, last_lane.get((segment.engine, segment.session_id)))
        ends[lane] = max(segment.ended_unix_s, segment.started_unix_s)
        last_lane[segment.engine, segment.session_id] = lane
        bars.append(
            Bar(
                session=segment.session_id,
                group=segment.group_id,
                turn=segment.turn,
                engine=segment.engine,
                lane=lane,
                version=segment.version,
                t0=round(segment.started_unix_s - zero, 3),
                t1=round(max(segment.ended_unix_s, segment.started_unix_s) - zero, 3),
                tokens=segment.tokens,
                cause=segment.cause,
                end=segment.end,
            )
        )
    return tuple(bars)


def jumps(bars: Sequence[Bar]) -> tuple[Jump, ...]:
    """Joins the segments of every turn that has more than one."""
    turns: dict[tuple[str, int], list[int]] = defaultdict(list)
    for index, bar in enumerate(bars):
        turns[bar.session, bar.turn].append(index)
    pairs = (pair for parts in turns.values() for pair in pairwise(parts))
    return tuple(Jump(source, target, bars[target].cause) for source, target in pairs)


def travels(recording: Recording, zero: float) -> tuple[VersionTravel, ...]:
    """Every version's way: from the trainer over the relays into the engines."""
    clock = _Clock(zero)
    published = {seen.version: seen for seen in recording.of(Publish)}
    held: dict[int, dict[str, float]] = defaultdict(dict)
    sealed: dict[int, float] = {}
    for seen in recording.of(RelaySeen):
        if seen.kind == "available":
            held[seen.version].setdefault(seen.relay, clock.at(seen.t))
        if seen.sealed_unix_s is not None:
            sealed.setdefault(seen.version, clock.at(seen.sealed_unix_s))
    loaded: dict[int, dict[str, float]] = defaultdict(dict)
    for refresh in recording.of(Refresh):
        loaded[refresh.to_version].setdefault(refresh.engine, clock.at(refresh.t_unix_s))
    versions = sorted(set(published) | set(held) | set(loaded))
    return tuple(
        _travel(version, published.get(version), sealed.get(version), held[version], loaded[version], clock)
        for version in versions
    )


def _travel(
    version: int,
    publish: Publish | None,
    sealed: float | None,
    held: dict[str, float],
    loaded: dict[str, float],
    clock: _Clock,
) -> VersionTravel:
    began = None if publish is None else publish.began_unix_s
    return VersionTravel(
        version=version,
        step=None if publish is None else publish.step,
        began=clock.maybe(began),
        copied=None if began is None or publish is None else clock.at(began + publish.stall_s),
        sealed=sealed if sealed is not None or publish is None else clock.at(publish.began_unix_s + publish.sealed_s),
        held=dict(sorted(held.items())),
        loaded=dict(sorted(loaded.items())),
    )


def _free_lane(ends: list[float], start: float, preferred: int | None) -> int:
    """Index of a lane that is free from `start` on; a new one is added when none is."""
    candidates: list[int] = [] if preferred is None else [preferred]
    candidates.extend(range(len(ends)))
    free = [lane for lane in candidates if ends[lane] <= start + OVERLAP_TOLERANCE_S]
    if free:
        return free[0]
    ends.append(start)
    return len(ends) - 1


def _num_lanes(bars: Iterable[Bar], engine: str) -> int:
    lanes = [bar.lane for bar in bars if bar.engine == engine]
    return max(lanes, default=0) + 1


def _sessions(recording: Recording) -> dict[str, dict[str, Any]]:
    """The last known state of every session."""
    known: dict[str, dict[str, Any]] = {}
    for seen in recording.of(SessionChange):
        before = known.get(seen.session_id, {})
        environment = seen.environment or before.get("environment", "")
        known[seen.session_id] = {"environment": environment, "state": seen.state, "reward": seen.reward}
    return known


def _engine_names(recording: Recording) -> list[str]:
    last = recording.last(GatewayStatus)
    return [] if last is None else [engine.name for engine in last.engines]


def _spans(recording: Recording, clock: _Clock, wall_s: float) -> tuple[Span, ...]:
    refreshes = [
        Span(
            engine=seen.engine,
            kind="refresh",
            t0=clock.at(seen.t_unix_s - seen.seconds),
            t1=clock.at(seen.t_unix_s),
            label=f"v{seen.from_version} to v{seen.to_version} in {seen.seconds:.2f} s",
        )
        for seen in recording.of(Refresh)
    ]
    return tuple(sorted([*refreshes, *_deaths(recording, clock, wall_s)], key=lambda span: (span.t0, span.engine)))


def _deaths(recording: Recording, clock: _Clock, wall_s: float) -> list[Span]:
    """From each kill until the engine's next refresh, or until it serves again, whichever is first."""
    spans = []
    for kill in recording.of(Note):
        if kill.kind != "kill":
            continue
        back = [seen.t_unix_s - seen.seconds for seen in recording.of(Refresh) if seen.engine == kill.engine]
        back += [
            seen.t_unix_s
            for seen in recording.of(EngineChange)
            if seen.engine == kill.engine and seen.state == "serving"
        ]
        end = min((t for t in back if t > kill.t), default=clock.zero + wall_s)
        label = f"killed at {clock.at(kill.t):.1f} s, away for {end - kill.t:.1f} s"
        spans.append(Span(engine=kill.engine, kind="dead", t0=clock.at(kill.t), t1=clock.at(end), label=label))
    return spans


def _repack(seen: Repack, clock: _Clock) -> dict[str, Any]:
    return {**msgspec.to_builtins(seen), "t": clock.at(seen.t_unix_s)}


def _load(recording: Recording, clock: _Clock) -> dict[str, tuple[tuple[float, int, float], ...]]:
    series: dict[str, list[tuple[float, int, float]]] = defaultdict(list)
    for status in recording.of(GatewayStatus):
        for engine in status.engines:
            series[engine.name].append((clock.at(status.t), *_use(engine)))
    return {name: tuple(points) for name, points in sorted(series.items())}


def _use(engine: EngineStatus) -> tuple[int, float]:
    return engine.running, round(engine.kv_usage, 3)


def _notes(recording: Recording, clock: _Clock) -> tuple[dict[str, Any], ...]:
    """The demo's notes and the gateway's events, in order of time."""
    lines = [(seen.t, seen.kind, seen.text) for seen in recording.of(Note)]
    lines += [
        (
            seen.t_unix_s,
            "repack",
            f"v{seen.version}: {len(seen.moves)} moves free {', '.join(seen.freed)}. {seen.reason}",
        )
        for seen in recording.of(Repack)
    ]
    lines += [
        (seen.t_unix_s, "refresh", f"{seen.engine}: v{seen.from_version} to v{seen.to_version} in {seen.seconds:.2f} s")
        for seen in recording.of(Refresh)
    ]
    lines += [
        (
            seen.t_unix_s,
            "engine",
            f"{seen.engine} is {seen.state}: {seen.reason}" if seen.reason else f"{seen.engine} is {seen.state}",
        )
        for seen in recording.of(EngineChange)
    ]
    return tuple({"t": clock.at(t), "kind": kind, "text": text} for t, kind, text in sorted(lines))
