"""`make bench-core`: what decisions cost in a fleet of 1,024 engines with 20,480 turns. In-process, in processor time.

- `place`: a turn's engine, among turns that come, grow and end, and beside it what booking and ends cost;
- `publish`: what is decided when a version arrives everywhere at once: intakes, refreshes, and the plan of moves; in
  all, and the longest without a pause for other tasks;
- `scale`: how both, a turn's end and an admission grow with the fleet, from 64 to 4,096 engines.

Writes bench-results/core.json.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from gateway.core.fleet.events import RelayReported, RoundBegan
from gateway.core.fleet.intake import IntakeChange
from gateway.core.fleet.order import Pool
from gateway.core.fleet.refresh import RefreshDecision
from gateway.core.packing.lengths import KEPT, SessionDurations, TurnLengths
from gateway.core.placing.scheduler import Wait, place
from gateway.core.types import Version
from gateway.repack.loop import Repacker
from tests.bench.core.scale import scale_figures
from tests.bench.core.scene import FREE, NEWEST, ONE, SEVERAL, Scene, scene
from tests.bench.figures import ROUNDS, Figure, keep, median, show
from tests.bench.repack.trace import lengths

Outcome = TypeVar("Outcome")

PLACEMENTS = 1_000
"""Of a round."""
GROWN, GROWN_TOKENS = 64, 8
"""Events between two placements, and the tokens of each: turns of 50 tokens/s and ten seconds."""
PLACE_MS, PUBLISH_MS = 0.3, 10.0
"""The bars: at 2,000 placements a second they leave the gateway most of its core; a publish is not to hold streams up
for longer than an event of theirs takes."""


@contextmanager
def timed(into: list[float]) -> Iterator[None]:
    """Adds the milliseconds of processor time that the block took."""
    began = time.process_time()
    try:
        yield
    finally:
        into.append((time.process_time() - began) * 1e3)


# -- placements


def placements(made: Scene) -> tuple[list[float], list[float]]:
    """Milliseconds of each placement, and of each booking together with the end of another turn."""
    placed: list[float] = []
    booked: list[float] = []
    for number in range(PLACEMENTS):
        made.grow(GROWN, GROWN_TOKENS)
        demand = made.demand(new=number % 2 == 0)
        with timed(placed):
            found = made.place(demand)
        with timed(booked):
            made.book(demand, found)
            made.end_one()
    return placed, booked


def refusals(made: Scene) -> list[float]:
    """The same where no engine with an open intake has room for a turn so long."""
    told: list[float] = []
    for _ in range(PLACEMENTS):
        made.grow(GROWN, GROWN_TOKENS)
        demand = made.too_long()
        with timed(told):
            found = place(demand, made.fleet, FREE)
        assert isinstance(found, Wait), found
    return told


def place_figures() -> Iterator[Figure]:
    for name, versions in (("place", SEVERAL), ("place_one_version", ONE)):
        made = scene(versions)
        gc.freeze()
        rounds = [placements(made) for _ in range(ROUNDS)]
        placed, booked = [r[0] for r in rounds], [r[1] for r in rounds]
        where = f"{len(made.turns):,} turns on {len(made.fleet.engines):,} engines of {len(versions)} version(s)"
        what = f"a placement, {where}: median of {PLACEMENTS:,}"
        each = [statistics.median(r) for r in placed]
        yield median(f"{name}_ms", what, each, bar=PLACE_MS, unit="ms")
        yield median(f"{name}_p99_ms", "the same, p99", [p99(r) for r in placed], bar=PLACE_MS, unit="ms")
        what = "booking it, and the end of another turn: mean"
        yield median(f"{name}_booked_ms", what, [statistics.fmean(r) for r in booked], better="reported", unit="ms")
        told = [statistics.median(refusals(made)) for _ in range(ROUNDS)]
        yield median(
            f"{name}_refused_ms", "a turn too long for the KV that is left: median", told, better="reported", unit="ms"
        )
        gc.unfreeze()


def p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[-1]


# -- a version arrives


def publish_figures() -> Iterator[Figure]:
    rounds = [publish(seed) for seed in range(ROUNDS)]
    what = "all that is decided when a version arrives everywhere: intakes, refreshes, plan of moves"
    details = {f"{part}_ms": round(statistics.median(sum(r[part]) for r in rounds), 3) for part in DECIDED}
    whole = [sum(sum(r[part]) for part in DECIDED) for r in rounds]
    yield median("publish_ms", what, whole, bar=PUBLISH_MS, unit="ms", details=details)
    fleet = [sum(sum(r[part]) for part in FLEET) for r in rounds]
    yield median("publish_fleet_ms", "of it, without the plan", fleet, better="reported", unit="ms")
    plan = [sum(r["plan"]) for r in rounds]
    yield median("publish_plan_ms", "of it, the plan and what it sees", plan, better="reported", unit="ms")
    holds = [max(whole, *r["plan"]) for r, whole in zip(rounds, fleet, strict=True)]
    moves = [sum(r["moves"]) for r in rounds]
    yield median("publish_moves_ms", "beside it, the list of all moves", moves, better="reported", unit="ms")
    yield median("publish_hold_ms", "of it, the longest without a pause", holds, bar=PUBLISH_MS, unit="ms")


FLEET = ("arrived", "round")
"""Parts that follow each other without a pause."""
DECIDED = (*FLEET, "plan")


def publish(seed: int) -> Mapping[str, Sequence[float]]:
    """Milliseconds of each part, and of the plan from each pause to the next."""
    made, newer = scene(SEVERAL, seed=seed), Version(NEWEST + 1)
    repacker, parts = planner(made), defaultdict[str, list[float]](list)
    gc.collect()
    gc.freeze()
    with timed(parts["arrived"]):
        for relay in list(made.fleet.beside):
            made.machine.handle(RelayReported(relay, newer, frozenset({newer})), 1000.0)
    with timed(parts["round"]):
        effects = made.machine.handle(RoundBegan(), 1000.0)
    changes = [effect for effect in effects if isinstance(effect, IntakeChange)]
    going = [effect for effect in effects if isinstance(effect, RefreshDecision)]
    plans = paused(repacker.plan(), parts["plan"])
    for plan in plans:
        with timed(parts["moves"]):
            moves = plan.moves
        assert len(moves) == plan.num_moves
    gc.unfreeze()
    assert len(changes) == len(list(made.fleet.serving(Pool(NEWEST)))), "every open intake closes"
    assert going, "those that are empty load it"
    assert sum(len(plan.freed) for plan in plans) > 0, "some engines can be emptied"
    return parts


def paused(work: Coroutine[Any, Any, Outcome], steps: list[float]) -> Outcome:
    """The result of what waits for nothing, but pauses; with the milliseconds of each step."""
    while True:
        try:
            with timed(steps):
                work.send(None)
        except StopIteration as end:
            return cast(Outcome, end.value)


def _durations() -> SessionDurations:
    found = SessionDurations()
    found.ended(60.0)
    return found


def planner(made: Scene) -> Repacker:
    """The gateway's own, over the turns of the scene."""
    learnt = TurnLengths()
    for length in lengths(KEPT):
        learnt.ended(length)
    sessions: Any = SimpleNamespace(running={}, lengths=learnt, live=())
    config: Any = SimpleNamespace(fleet=made.fleet.config, prefill_tokens_per_s=1000.0, seed=0, planner="priced")
    fleet: Any = SimpleNamespace(state=made.fleet)
    return Repacker(config, fleet, sessions, _durations(), None)  # type: ignore[arg-type]


PARTS = {"place": place_figures, "publish": publish_figures, "scale": scale_figures}


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="make bench-core ARGS=...", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help=f"any of: {', '.join(PARTS)} (default: all)")
    for part in parser.parse_args(arguments).parts or list(PARTS):
        figures = list(PARTS[part]())
        show(part, figures)
        keep("core", figures)


if __name__ == "__main__":
    main(sys.argv[1:])
