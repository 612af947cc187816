"""How the cost of a decision grows with the fleet: 64 to 4,096 engines, each with 64 sessions."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gateway.config import GatewayConfig
from gateway.core.fleet.events import RelayReported, RoundBegan, SessionEnded, SessionRestored
from gateway.core.fleet.machine import FleetMachine
from gateway.core.fleet.state import FleetState
from gateway.core.placing.scheduler import Wait, place
from gateway.core.sessions import SessionSpec
from gateway.core.types import GroupId, SessionId, Version
from gateway.sessions.endings import Endings
from gateway.sessions.known_groups import KnownGroups
from gateway.sessions.registry import SessionRegistry
from gateway.sessions.trainer import Trainer
from tests.bench.core.scene import FREE, NEWEST, SEVERAL, Scene, scene
from tests.bench.figures import Figure

SIZES = (64, 256, 1024, 4096)
SESSIONS = 64
"""Of an engine."""
TRIES, LOOKS = 400, 5
FLAT, LINEAR = 0.2, 1.1
"""The bars of exponents: of what happens to one turn or session, and of what comes to every engine."""
FLAT_COSTS: Mapping[str, tuple[str, float | None]] = {
    "place": ("a placement", 40.0),
    "book": ("booking one", None),
    "refuse": ("refusing a turn that is too long for the KV that is left", None),
    "turn_end": ("the end of a turn and of its session, with the round of decisions after it", None),
    "admission": ("whether a session may begin, a trainer having sampled", 20.0),
    "admission_full": ("the same where none may", 20.0),
    "expiry": ("whether a session is over, in a look at all", None),
}
"""What is measured, and its bar at the largest size, in us."""

Costs = dict[str, list[float]]


def scale_figures() -> Iterator[Figure]:
    """Of each cost its exponent, with the cost at each size beside it."""
    at = {size: costs(size) for size in SIZES}
    for key, (what, bar) in FLAT_COSTS.items():
        us = {size: round(statistics.median(at[size][key]) * 1e6, 2) for size in SIZES}
        yield _exponent(key, what, us, FLAT, "us")
        if bar is not None:
            yield Figure(f"{key}_us_at_{SIZES[-1]}", f"{what}, {SIZES[-1]:,} engines", us[SIZES[-1]], bar, unit="us")
    ms = {size: round(min(at[size]["version_at_all_relays"]) * 1e3, 2) for size in SIZES}
    what = "what relays' reports of a version, and the round after them, cost"
    yield _exponent("version_at_all_relays", what, ms, LINEAR, "ms")
    yield Figure("version_at_1024_relays_ms", what, ms[1024], 50.0, unit="ms")


def _exponent(key: str, what: str, points: Mapping[int, float], bar: float, unit: str) -> Figure:
    """The slope of the line through the points, by the logarithms of both."""
    x, y = [math.log(size) for size in points], [math.log(max(cost, 1e-9)) for cost in points.values()]
    slope = statistics.linear_regression(x, y).slope
    details = {f"{size}_{unit}": cost for size, cost in points.items()}
    return Figure(f"{key}_exponent", f"{what}, by engines", round(slope, 2), bar, details=details)


def costs(engines: int) -> Costs:
    """Seconds of processor time, by what took them."""
    found: Costs = defaultdict(list)
    made = scene(SEVERAL, engines=engines)
    gc.collect()
    gc.freeze()
    for number in range(TRIES):
        _of_a_turn(made, found, new=number % 2 == 0)
    _of_a_version(made, found)
    gc.unfreeze()
    del made
    config = GatewayConfig(model="policy", tokenizer=Path("."))
    machine = FleetMachine(FleetState(config.fleet, newest=NEWEST))
    live = _sessions(config, machine, engines * SESSIONS)
    for key, batch in (("admission", 1 << 30), ("admission_full", 1)):
        trainer = _trainer(config, machine, live, batch)
        assert trainer.admission().full == (batch == 1)
        for _ in range(TRIES):
            began = time.process_time()
            trainer.admission()
            found[key].append(time.process_time() - began)
    endings: Any = SimpleNamespace(_live=live, _config=config, _finishing={})
    for _ in range(LOOKS):
        began = time.process_time()
        assert not any(Endings._why_over(endings, state) for state in list(live))
        found["expiry"].append((time.process_time() - began) / len(live))
    return found


def _of_a_turn(made: Scene, found: Costs, *, new: bool) -> None:
    made.grow(64, 8)
    demand, at = made.demand(new=new), time.process_time
    began = at()
    placement = made.place(demand)
    placed = at()
    made.book(demand, placement)
    booked = at()
    made.end_one()
    ended = made.idle.pop()
    made.machine.handle(SessionEnded(ended, forgotten=True), 1000.0)
    made.machine.handle(RoundBegan(), 1000.0)
    over = at()
    long = made.too_long()
    asked = at()
    assert isinstance(place(long, made.fleet, FREE), Wait)
    found["refuse"].append(at() - asked)
    found["place"].append(placed - began)
    found["book"].append(booked - placed)
    found["turn_end"].append(over - booked)


def _of_a_version(made: Scene, found: Costs) -> None:
    newer, began = Version(NEWEST + 1), time.process_time()
    for relay in list(made.fleet.beside):
        made.machine.handle(RelayReported(relay, newer, frozenset({newer})), 1000.0)
    assert made.machine.handle(RoundBegan(), 1000.0)
    found["version_at_all_relays"].append(time.process_time() - began)


def _sessions(config: GatewayConfig, machine: FleetMachine, num: int) -> SessionRegistry:
    """The gateway's own, with so many live sessions."""
    nothing: Any = None
    live = SessionRegistry(config, machine, nothing, nothing, KnownGroups())
    for number in range(num):
        state = live.restore(SessionSpec(SessionId(f"s{number}"), GroupId(f"g{number // 8}"), group_size=8))
        state.version = NEWEST
        machine.handle(SessionRestored(state), 1000.0)
    return live


def _trainer(config: GatewayConfig, machine: FleetMachine, live: SessionRegistry, batch: int) -> Trainer:
    """The gateway's own, with a reader that takes batches of groups."""
    nothing: Any = SimpleNamespace(
        num_unused=lambda bounds: 0, holds_lease=lambda reader: False, groups=lambda bounds: ({}, {})
    )
    trainer = Trainer(config, machine.state, live, nothing)
    trainer.requested(batch, NEWEST, 1, group_size=8)
    return trainer
