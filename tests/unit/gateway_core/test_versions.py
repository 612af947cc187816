"""The version contract of a session: what happens when no engine serves its version."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gateway.core.fleet import FleetState, Wanted
from gateway.core.scheduler import Admission, Demand, Lost, Placement, Wait, admit, place, wanted_versions
from gateway.core.sessions import SessionState
from gateway.core.types import EngineName, SamplingParams, SessionId, TurnId, TurnRecord, TurnRequest, Version
from tests.unit.gateway_core.helpers import engine, fleet, session

FREE = Admission(running=0, buffered=0, reader_batch=None, staleness_max=0)


def lost_one(policy: str, version: int = 1, **spec: Any) -> Demand:
    """A turn of a session that has had a turn under `version`."""
    state = session(version=version, on_version_loss=policy, **spec)
    asked = TurnRequest(TurnId("t0"), SessionId("s"), 0, (1,), SamplingParams(max_tokens=1))
    state.begin_turn(asked, 1.0)
    state.end_turn(TurnRecord(asked, [2], [-1.0], [], "stop"), 2.0)
    return Demand(state, 100, turn_id=TurnId("t1"))


def pinned(version: int, policy: str = "strict") -> Demand:
    state = session(on_version_loss=policy)
    spec = dataclasses.replace(state.spec, version=Version(version))
    return Demand(SessionState(spec, 1.0, 1.0, version=Version(version)), 100)


def test_segment_goes_on_under_the_newest_and_the_change_is_on_record() -> None:
    state, demand = fleet(engine("e0", 2), engine("e1", 3)), lost_one("segment")
    outcome = place(demand, state, FREE)
    assert isinstance(outcome, Placement)
    admit(outcome, demand, state)
    [change] = demand.session.version_changes
    assert (change.turn, change.turn_id, change.from_version, change.to_version) == (1, "t1", 1, 3)
    assert "no engine serves version 1 any more; going on under version 3" in change.reason
    admit(outcome, demand, state)
    assert len(demand.session.version_changes) == 1, "under its version nothing changes"


def test_fail_gives_up() -> None:
    outcome = place(lost_one("fail"), fleet(engine("e0", 2)), FREE)
    assert isinstance(outcome, Lost)
    assert "no engine serves version 1" in outcome.reason
    assert isinstance(place(lost_one("fail", 2), fleet(engine("e0", 2)), FREE), Placement)


@pytest.mark.parametrize("demand", [lost_one("strict"), pinned(1), pinned(1, "segment"), pinned(1, "fail")])
def test_strict_and_a_session_that_names_its_version_wait_for_it(demand: Demand) -> None:
    state = fleet(engine("e0", 2))
    outcome = place(demand, state, FREE)
    assert isinstance(outcome, Wait)
    assert "version 1: it is loaded when an engine is free" in outcome.reason
    assert wanted_versions([demand]) == {1: Wanted(1, 100)}
    state.gone.add(Version(1))
    outcome = place(demand, state, FREE)
    assert isinstance(outcome, Lost)
    assert "no relay holds it" in outcome.reason
    served = place(demand, fleet(engine("e0", 2), engine("e1", 1)), FREE)
    assert isinstance(served, Placement)
    assert served.engine == "e1"


def test_what_is_wanted_counts_sessions_once_and_only_who_insists() -> None:
    one, other = lost_one("strict"), lost_one("strict", name="s2")
    asked = [one, one, other, lost_one("segment"), lost_one("fail"), lost_one("strict", 2)]
    assert wanted_versions(asked) == {1: Wanted(2, 200), 2: Wanted(1, 100)}


def wanting(state: FleetState, sessions: int = 1, tokens: int = 1) -> FleetState:
    state.insisted = {Version(1): Wanted(sessions, tokens)}
    return state


def decided(state: FleetState, now: float = 1000.0) -> list[tuple[str, int]]:
    return [(d.engine, d.to_version) for d in state.refresh_decisions(now)]


def test_an_empty_engine_loads_the_version_again_once() -> None:
    state = wanting(fleet(engine("e0", 3, [5]), engine("e1", 3), engine("e2", 3, intake_open=True)))
    assert decided(state) == [("e1", 1)], "not the busy one, nor the one that takes new sessions"
    assert decided(state) == [], "it is on its way"
    state.engines[EngineName("e1")].to("serving")
    state.engines[EngineName("e1")].version = Version(1)
    assert decided(state) == [], "it is kept for those who wait"


@pytest.mark.parametrize(
    ("sessions", "tokens", "pays"), [(1, 10, False), (2, 10, True), (1, 99, False), (1, 100, True)]
)
def test_it_is_loaded_when_sessions_or_tokens_pay_for_it(sessions: int, tokens: int, pays: bool) -> None:
    state = fleet(engine("e0", 3), strict_sessions_min=2, strict_tokens_min=100)
    assert bool(decided(wanting(state, sessions, tokens))) is pays


def test_no_engine_is_taken_that_others_need_unless_they_had_their_time() -> None:
    state = wanting(fleet(engine("e0", 3, intake_closed_at=990.0), version_hold_s=60.0))
    state.session_versions[SessionId("waits-for-a-tool")] = Version(3)
    assert decided(state, now=1000.0) == []
    assert decided(state, now=1050.0) == [("e0", 1)]


@pytest.mark.parametrize("why", ["no relay", "it failed just now", "the version is gone"])
def test_what_keeps_an_engine_from_loading_it(why: str) -> None:
    state = wanting(fleet(engine("e0", 3)))
    [only] = state.engines.values()
    if why == "no relay":
        only.available = Version(0)
    elif why == "it failed just now":
        only.refresh_not_before = 2000.0
    else:
        state.gone.add(Version(1))
    assert decided(state) == []


def test_when_nobody_needs_it_any_more_the_engine_goes_back_to_the_newest() -> None:
    state = fleet(engine("e0", 1, available=Version(3)))
    state.session_versions[SessionId("s")] = Version(1)
    assert decided(state, now=100.0) == []
    del state.session_versions[SessionId("s")]
    assert decided(state, now=100.0) == [("e0", 3)]
