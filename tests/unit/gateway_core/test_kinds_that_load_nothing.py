"""Engines of a kind that loads no published versions: what the fleet decides around them."""

from __future__ import annotations

import pytest

from gateway.core.fleet.intake import intake_changes
from gateway.core.fleet.refresh import refresh_decisions
from gateway.core.fleet.state import EngineStatus, FleetState, Wanted
from gateway.core.placing.reasons import closed_reason
from gateway.core.placing.scheduler import Admission, Demand, Lost, Placement, Wait, place
from gateway.core.types import Version
from tests.unit.gateway_core.helpers import engine, fleet, session

FREE = Admission(0, 0, None, 4)


def decided(state: FleetState) -> list[tuple[str, int]]:
    return [(decision.engine, decision.to_version) for decision in refresh_decisions(state, 1000.0)]


@pytest.mark.parametrize("mode", ["repack", "drain", "inflight", "barrier"])
@pytest.mark.parametrize("status", ["serving", "joining", "fenced"])
@pytest.mark.parametrize("turns", [(), (10,)])
def test_no_refresh_is_decided_for_one_whatever_is_published(
    mode: str, status: EngineStatus, turns: tuple[int, ...]
) -> None:
    """Though its state named a version at hand: an engine that loads is refreshed in the same place."""
    at_once = not turns or (mode, status) == ("inflight", "serving")
    for loads, expected in ((False, []), (True, [("e0", 3)] * at_once)):
        state = fleet(engine("e0", 0, turns, loads=loads, status=status, available=3), mode=mode)
        assert decided(state) == expected


def test_one_is_never_taken_back_to_a_version_that_sessions_insist_on() -> None:
    """The other is, though it serves more: a free engine of the first kind would be preferred."""
    fixed = engine("e0", 2, loads=False, loadable=frozenset({Version(1)}))
    loading = engine("e1", 3, loadable=frozenset({Version(1), Version(3)}), intake_open=True)
    state = fleet(fixed, loading)
    state.insisted = {Version(1): Wanted(1, 10)}
    assert decided(state) == [("e1", 1)]
    alone = fleet(engine("e0", 2, loads=False, loadable=frozenset({Version(1)})))
    alone.insisted = {Version(1): Wanted(1, 10)}
    assert decided(alone) == []


def test_a_version_that_only_they_might_load_is_gone() -> None:
    fixed = engine("e0", 0, loads=False, available=0)
    state = fleet(fixed, engine("e1", 5, loadable=frozenset({Version(5)})))
    assert state.gone(Version(2))
    lost = place(Demand(session(version=2, on_version_loss="strict"), 10), state, FREE)
    assert isinstance(lost, Lost)


def test_it_takes_new_sessions_as_ever_but_a_version_that_it_never_reaches_is_not_waited_for() -> None:
    fixed = engine("e0", 0, loads=False, available=0)
    state = fleet(fixed, engine("e1", 5))
    assert [(change.engine, change.open) for change in intake_changes(state, 1000.0)] == [("e0", True), ("e1", True)]

    def outcome(oldest: int, newest: int) -> Placement | Wait | Lost:
        return place(Demand(session(min_version=oldest, max_version=newest), 10), state, FREE)

    assert isinstance(found := outcome(0, 3), Placement)
    assert found.engine == "e0"
    assert isinstance(outcome(2, 3), Lost)
    fixed.status = "dead"
    assert isinstance(outcome(2, 3), Wait), "it may come back with another"


def test_no_barrier_waits_for_one() -> None:
    """It runs a turn and takes sessions, as an engine at the barrier would hold back the others by."""
    fixed = engine("e0", 2, [10], loads=False, available=0, intake_open=True)
    assert decided(fleet(fixed, engine("e1", 2, available=3), mode="barrier")) == [("e1", 3)]
    at_it = engine("e0", 2, [10], available=3, intake_open=True)
    assert decided(fleet(at_it, engine("e1", 2, available=3), mode="barrier")) == []


def test_one_that_is_paused_says_that_nothing_will_be_loaded_into_it() -> None:
    fixed = engine("e0", 0, loads=False, available=0, status="joining", must_load=True)
    assert "is paused: resume it" in closed_reason(fleet(fixed), fixed, 1000.0)
