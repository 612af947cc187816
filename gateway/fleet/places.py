"""Places on engines for turns: assigned at once, or waited for in one bounded queue, and returned.

Invariants:
- a place counts on its engine from when it is assigned, not from when the turn's task comes to run: two turns decided
  in one round of the event loop would otherwise both get the last place;
- turns that were cut are served first, then turns of sessions that have begun, then new sessions; within a class by the
  session's priority, then in order of arrival;
- new sessions have a bound of their own in the queue: they never displace a session that has begun;
- a turn that has waited for room for `RESERVE_AFTER_S` gets what comes free on one engine: no later turn of its class
  or of a lower one is placed there before it;
- a turn that stops waiting returns a place that it was assigned meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from gateway.core.fleet.events import Event, TurnEntered, TurnLeft
from gateway.core.fleet.state import FleetState, TurnLoad, Wanted
from gateway.core.placing.reasons import closed_reasons
from gateway.core.placing.retry_after import Pace, retry_for_a_place
from gateway.core.placing.scheduler import (
    Admission,
    Demand,
    Lost,
    Placement,
    Refusals,
    Wait,
    place,
    reservable,
    wanted_versions,
)
from gateway.core.placing.text_requests import TextDemand, Unable, place_text
from gateway.core.types import EngineName, TurnId, Version
from protos.errors import LaminarError, OutOfCapacity, Unavailable, VersionLost

REASONS_MAX = 8
"""Different reasons in the statistics of the queue."""

Outcome = Placement | Wait | Lost | Unable


RESERVE_AFTER_S = 5.0
"""A long prompt waits for more room than short ones. They may be placed before it for so long."""

UNBOUNDED = Admission(0, 0, None, 0)
"""For a session that has begun: the trainer's bound applies to new ones alone."""

Rank = Literal[0, 1, 2]
"""The class of a turn in the queue. 0: cut, so that its client has waited already; 1: its session has begun; 2: new."""


def _rank(demand: Demand | TextDemand, *, resumed: bool) -> Rank:
    if resumed:
        return 0
    return 1 if isinstance(demand, Demand) and demand.session.engine is not None else 2


@dataclass(slots=True, eq=False)
class _Waiter:
    """A turn in the queue, compared by identity."""

    demand: Demand | TextDemand
    rank: Rank
    placed: asyncio.Future[Placement]
    since: float
    wait: Wait | None = None  # the last refusal


class Occupant(Protocol):
    """Runs on an engine, and can be interrupted."""

    def interrupt(self) -> None:
        """The engine is needed for something else: leaves it for any other place. Does nothing when it cannot."""
        ...


class Owner(Protocol):
    """The fleet, which decides what follows from a change here."""

    def send(self, event: Event) -> None:
        """Takes an event to the machine."""
        ...

    def decide_soon(self) -> None:
        """The queue is to be served."""
        ...


class Places:
    """Owner of the queue and of the occupants of places. `place` and `leave` frame a turn's stay on an engine."""

    def __init__(self, state: FleetState, admission: Callable[[], Admission], owner: Owner, *, queue_max: int) -> None:
        self._state, self._admission, self._queue_max = state, admission, queue_max
        self._owner = owner
        self._occupants: dict[TurnId, Occupant] = {}
        self._queue: deque[_Waiter] = deque()
        self._left = Pace()  # turns leaving engines

    @property
    def queued(self) -> int:
        return len(self._queue)

    def wanted(self) -> Mapping[Version, Wanted]:
        """Versions that waiting turns insist on."""
        waiting = (w.demand for w in self._queue if not w.placed.done())
        return wanted_versions((d for d in waiting if isinstance(d, Demand)), self._state)

    def waiting_since(self) -> list[float]:
        """When turns began to wait that any engine with room would take."""
        return [w.since for w in self._queue if w.wait is not None and w.wait.cause == "room" and not w.placed.done()]

    def reasons(self) -> Mapping[str, int]:
        """Why turns wait, and how many for each reason; the most frequent ones."""
        reasons = Counter(w.wait.reason for w in self._queue if w.wait is not None and not w.placed.done())
        return dict(reasons.most_common(REASONS_MAX))

    def close(self) -> None:
        """Fails every turn that still waits."""
        for waiter in self._queue:
            if not waiter.placed.done():
                waiter.placed.set_exception(
                    Unavailable("the gateway is shutting down", hint="send the request again soon")
                )
        self._queue.clear()

    async def place(self, demand: Demand | TextDemand, *, resumed: bool, timeout_s: float) -> Placement:
        """An engine for the turn, booked. Waits in the queue.

        Raises OutOfCapacity when the queue is full or the wait too long, VersionLost, Unavailable.
        """
        rank = _rank(demand, resumed=resumed)
        if not any(waiter.rank <= rank for waiter in self._queue) or resumed:
            outcome = self._decide(demand)
            if isinstance(outcome, Placement):
                self._book(outcome, demand)
                return outcome
            if not isinstance(outcome, Wait):
                raise _never(outcome, demand)
        waiting = sum(waiter.rank == rank for waiter in self._queue)
        if waiting >= self._queue_max and not resumed:
            after_s = retry_for_a_place(waiting, self._left, time.monotonic())
            what = "turns" if rank == 2 else "turns of sessions that have begun"
            raise OutOfCapacity(f"{waiting} {what} wait for an engine already", retry_after_s=after_s)
        waiter = _Waiter(demand, rank, asyncio.get_running_loop().create_future(), time.monotonic())
        self._queue.append(waiter)
        self._owner.decide_soon()
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter.placed
        except TimeoutError:
            self._unbook(waiter)
            raise self._too_late(waiter, timeout_s) from None
        except asyncio.CancelledError:
            self._unbook(waiter)
            raise
        finally:
            if waiter in self._queue:
                self._queue.remove(waiter)

    def _decide(self, demand: Demand | TextDemand, admission: Admission | None = None) -> Outcome:
        if isinstance(demand, TextDemand):
            return place_text(demand, self._state)
        if admission is None:
            admission = self._admission() if demand.session.version is None else UNBOUNDED
        return place(demand, self._state, admission)

    def _too_late(self, waiter: _Waiter, timeout_s: float) -> OutOfCapacity:
        wait, now = waiter.wait or Wait("it was not its turn"), time.monotonic()
        retry_after_s = wait.retry_after_s
        if retry_after_s is None:
            retry_after_s = retry_for_a_place(len(self._queue) - 1, self._left, now)
        hint = closed_reasons(self._state, now) if wait.cause == "room" else ""
        return OutOfCapacity(
            f"no engine took the turn within {timeout_s:g} s: {wait.reason}", hint=hint, retry_after_s=retry_after_s
        )

    def _unbook(self, waiter: _Waiter) -> None:
        """A turn stops waiting. `serve` may have resolved its future in the same round of the event loop, before the
        timeout or the cancellation reached its task: that place is booked, and no turn will come to it."""
        placed, turn_id = waiter.placed, waiter.demand.turn_id
        if turn_id is not None and placed.done() and not placed.cancelled() and placed.exception() is None:
            self.leave(placed.result().engine, turn_id)

    def enter(self, engine: EngineName, load: TurnLoad) -> None:
        """The turn runs on `engine` from now on."""
        self._owner.send(TurnEntered(engine, load))

    def leave(self, engine: EngineName, turn_id: TurnId) -> None:
        """The turn does not run on `engine` any more. May be called for a turn that never did."""
        state = self._state.engines.get(engine)
        if state is not None and turn_id in state.turns:
            self._left.happened(time.monotonic())
        self._occupants.pop(turn_id, None)
        self._owner.send(TurnLeft(engine, turn_id))
        if self._queue:
            self._owner.decide_soon()

    def occupy(self, turn_id: TurnId, occupant: Occupant) -> None:
        """`occupant` is interrupted when the turn's engine is needed, until the turn leaves the engine."""
        self._occupants[turn_id] = occupant

    def interrupt(self, turn_id: TurnId) -> None:
        """The engine of the turn is needed for something else."""
        if (occupant := self._occupants.get(turn_id)) is not None:
            occupant.interrupt()

    def serve(self) -> None:
        """Assigns places to all waiting turns that can have one now."""
        if not self._queue:
            return
        admission, refusals, now = self._admission(), Refusals(), time.monotonic()
        reserved: dict[EngineName, Rank] = {}
        for waiter in sorted(self._queue, key=_by_rank):
            if waiter.placed.done():
                continue
            demand = waiter.demand
            if reserved:
                others = frozenset(name for name, rank in reserved.items() if rank <= waiter.rank)
                demand = replace(demand, reserved=others)
            refused = refusals.find(demand, self._state) if isinstance(demand, Demand) else None
            outcome = refused or self._decide(demand, admission)
            if isinstance(outcome, Wait):
                waiter.wait = outcome
                self._reserve(waiter, demand, reserved, now)
                if isinstance(demand, Demand):
                    refusals.note(demand, self._state, outcome)
                continue
            if not isinstance(outcome, Placement):
                waiter.placed.set_exception(_never(outcome, demand))
                continue
            self._book(outcome, demand)
            admission = self._admission()  # one more runs
            waiter.placed.set_result(outcome)
            self._queue.remove(waiter)

    def _reserve(
        self, waiter: _Waiter, demand: Demand | TextDemand, reserved: dict[EngineName, Rank], now: float
    ) -> None:
        """Reserves an engine for a turn that has waited long for room: short prompts would take all that comes free."""
        long = waiter.wait is not None and waiter.wait.cause == "room" and now - waiter.since >= RESERVE_AFTER_S
        if long and isinstance(demand, Demand):
            engine = reservable(demand, self._state)
            if engine is not None:
                reserved[engine.name] = waiter.rank

    def _book(self, placement: Placement, demand: Demand | TextDemand) -> None:
        self._owner.send(demand.booking(placement))


def _by_rank(waiter: _Waiter) -> tuple[int, int]:
    priority = waiter.demand.session.spec.priority if isinstance(waiter.demand, Demand) else 0
    return waiter.rank, -priority


def _never(outcome: Lost | Unable, demand: Demand | TextDemand) -> LaminarError:
    if isinstance(outcome, Unable):
        return Unavailable(outcome.reason, hint=outcome.hint)
    assert isinstance(demand, Demand), demand
    policy = demand.session.spec.on_version_loss
    return VersionLost(
        f"session {demand.session.session_id}: {outcome.reason}",
        hint=outcome.hint or f"it was made with on_version_loss={policy!r}; 'segment' goes on under another version",
    )
