"""The version contract of a session: what happens when no engine serves its version."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gateway.core.fleet.pinned import PinnedVersions
from gateway.core.fleet.refresh import refresh_decisions
from gateway.core.fleet.state import FleetState, Wanted
from gateway.core.placing.scheduler import (
    Admission,
    Demand,
    Lost,
    Placement,
    Refusals,
    Wait,
    place,
    wanted_versions,
)
from gateway.core.sessions import SessionState
from gateway.core.types import (
    EngineName,
    SamplingParams,
    SessionId,
    TurnId,
    TurnRecord,
    TurnRequest,
    Version,
    VersionPolicy,
)
from tests.support.quick import examples
from tests.unit.gateway_core.helpers import admit, engine, fleet, session

FREE = Admission(running=0, buffered=0, reader_batch=None, staleness_max=0)
POLICIES: tuple[VersionPolicy, ...] = ("segment", "strict", "fail")


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
    assert "version 1: it is loaded once an engine is free whose relay holds it" in outcome.reason
    assert wanted_versions([demand], state) == {1: Wanted(1, 100)}
    state.engines[EngineName("e0")].loadable = frozenset({Version(2)})
    outcome = place(demand, state, FREE)
    assert isinstance(outcome, Lost)
    assert "no relay holds it" in outcome.reason
    served = place(demand, fleet(engine("e0", 2), engine("e1", 1)), FREE)
    assert isinstance(served, Placement)
    assert served.engine == "e1"


def test_what_is_wanted_counts_sessions_once_and_only_who_insists() -> None:
    one, other = lost_one("strict"), lost_one("strict", name="s2")
    asked = [one, one, other, lost_one("segment"), lost_one("fail"), lost_one("strict", 2)]
    assert wanted_versions(asked, fleet()) == {1: Wanted(2, 200), 2: Wanted(1, 100)}


def wanting(state: FleetState, sessions: int = 1, tokens: int = 1) -> FleetState:
    state.insisted = {Version(1): Wanted(sessions, tokens)}
    return state


def decided(state: FleetState, now: float = 1000.0) -> list[tuple[str, int]]:
    return [(d.engine, d.to_version) for d in refresh_decisions(state, now)]


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
    state.note_session(SessionId("waits-for-a-tool"), Version(3), "segment")
    assert decided(state, now=1000.0) == []
    assert decided(state, now=1050.0) == [("e0", 1)]


@pytest.mark.parametrize("why", ["no relay", "it failed just now", "the version is gone"])
def test_what_keeps_an_engine_from_loading_it(why: str) -> None:
    state = wanting(fleet(engine("e0", 3)))
    [only] = state.engines.values()
    if why == "no relay":
        only.available, only.loadable = Version(0), frozenset()
    elif why == "it failed just now":
        only.refresh_not_before = 2000.0
    else:
        only.loadable = frozenset({Version(3)})
    assert decided(state) == []


def test_a_version_is_gone_only_when_no_host_has_it() -> None:
    """One host's relay retired it: engines of the others load it."""
    state = wanting(fleet(engine("e0", 3, loadable=frozenset({Version(3)})), engine("e1", 3)))
    assert not state.gone(Version(1))
    assert decided(state) == [("e1", 1)], "not the first by name: its host has not got it"
    state.engines[EngineName("e1")].loadable = None
    assert not state.gone(Version(1)), "that relay has not told yet"
    state.engines[EngineName("e1")].loadable = frozenset()
    assert state.gone(Version(1))
    assert not fleet().gone(Version(1)), "engines may join"


def test_strict_sessions_begin_on_as_many_versions_as_relays_keep() -> None:
    state = fleet(engine("e0", 3, intake_open=True), engine("e1", 2, intake_open=True), pinned_versions_max=1)
    first = Demand(session("first", on_version_loss="strict"), 10)
    outcome = place(first, state, FREE)
    assert isinstance(outcome, Placement)
    admit(outcome, first, state)
    assert state.pinned.versions() == [3]
    e0 = state.engines[EngineName("e0")]
    e0.intake_open = False
    second = Demand(session("second", on_version_loss="strict"), 10)
    outcome = place(second, state, FREE)
    assert isinstance(outcome, Wait)
    assert "insist on versions 3 already, and at most 1 are kept" in outcome.reason
    assert isinstance(place(Demand(session("other"), 10), state, FREE), Placement), "it insists on nothing"
    told = Refusals()
    told.note(second, state, outcome)
    assert told.find(Demand(session("other"), 10), state) is None
    assert told.find(Demand(session("third", on_version_loss="strict"), 10), state) is outcome
    state.pinned.note(first.session.session_id, None)
    assert isinstance(place(second, state, FREE), Placement)


def test_a_constrained_turn_goes_to_an_engine_that_can() -> None:
    state = fleet(engine("e0", 1, intake_open=True, kind="embedded"), engine("e1", 1, [5], intake_open=True))
    demand = Demand(session("new"), 10, kinds=frozenset({"vllm"}))
    outcome = place(demand, state, FREE)
    assert isinstance(outcome, Placement)
    assert outcome.engine == "e1", "though it is fuller"
    for wanted in (demand, Demand(session("old", version=1), 10, kinds=frozenset({"vllm"}))):
        state.engines[EngineName("e1")].kind = "embedded"
        outcome = place(wanted, state, FREE)
        assert isinstance(outcome, Wait)
        assert "cannot sample or constrain an answer so" in outcome.reason
    assert isinstance(place(Demand(session("plain"), 10), state, FREE), Placement)


def test_a_session_is_on_no_older_version_than_it_may() -> None:
    engines = engine("e0", 2, intake_open=True), engine("e1", 3, [1] * 5, intake_open=True)
    state, demand = fleet(*engines), Demand(session("new", min_version=Version(3)), 10)
    outcome = place(demand, state, FREE)
    assert isinstance(outcome, Placement)
    assert outcome.engine == "e1", "though it is fuller"
    state.engines[EngineName("e1")].close_intake(1.0)
    outcome = place(demand, state, FREE)
    assert isinstance(outcome, Wait)
    assert "no engine with an open intake serves version 3 or a newer one" in outcome.reason
    told = Refusals()
    told.note(demand, state, outcome)
    assert told.find(Demand(session("other"), 10), state) is None, "another may go to the older one"
    state.group_versions.note(demand.session.spec.group_id, Version(2))
    assert isinstance(place(demand, state, FREE), Wait), "nor to the older one of its group"
    lost = lost_one("segment", 4, min_version=Version(3))
    outcome = place(lost, state, FREE)
    assert isinstance(outcome, Placement)
    assert outcome.engine == "e1"
    state.remove(EngineName("e1"))
    assert isinstance(place(lost, state, FREE), Wait)


def test_a_new_session_is_on_no_newer_version_than_it_may() -> None:
    engines = engine("e0", 2, [1] * 5, intake_open=True), engine("e1", 3, intake_open=True)
    state, demand = fleet(*engines), Demand(session("new", max_version=Version(2)), 10)
    outcome = place(demand, state, FREE)
    assert isinstance(outcome, Placement)
    assert outcome.engine == "e0", "though it is fuller, and older"
    state.engines[EngineName("e0")].close_intake(1.0)
    outcome = place(demand, state, FREE)
    assert outcome == Wait("no engine with an open intake serves version 2 or an older one")
    told = Refusals()
    told.note(demand, state, outcome)
    assert told.find(Demand(session("other"), 10), state) is None, "another may go to the newer one"
    state.group_versions.note(demand.session.spec.group_id, Version(3))
    assert isinstance(place(demand, state, FREE), Wait), "nor to the newer one of its group"
    state.engines[EngineName("e0")].version = Version(3)
    outcome = place(demand, state, FREE)
    assert isinstance(outcome, Lost), "engines do not go back for it"
    assert outcome.reason == "every engine is past version 2, the newest that it may be on"
    assert "name a `version`, which is loaded again" in outcome.hint
    assert isinstance(place(demand, fleet(), FREE), Wait), "engines may join"


def test_a_session_whose_version_is_lost_goes_on_under_no_newer_one_than_it_may() -> None:
    for version, least, goes in ((3, 0, "e1"), (4, 0, "e1"), (5, 0, "e2"), (4, 4, ""), (9, 5, "e2")):
        state = fleet(engine("e0", 1), engine("e1", 3), engine("e2", 5))
        demand = lost_one("segment", 2 if least == 0 else 4, min_version=Version(least), max_version=Version(version))
        outcome = place(demand, state, FREE)
        assert (outcome.engine if isinstance(outcome, Placement) else "") == goes, (version, least)


def test_one_that_may_be_on_nothing_that_is_served_waits_for_its_own_version_or_is_told() -> None:
    """Engines do not go back by themselves: its version is loaded again, while there is a relay that has it."""
    state, demand = fleet(engine("e0", 3), engine("e1", 4)), lost_one("segment", 2, max_version=Version(2))
    assert place(demand, state, FREE) == Wait(
        "no engine serves version 2: it is loaded once an engine is free whose relay holds it", cause="version"
    )
    wanted = wanted_versions([demand, lost_one("segment", 2), lost_one("fail", 2, max_version=Version(2))], state)
    assert wanted == {2: Wanted(1, 100)}, "others go on, or fail"
    state.insisted = wanted
    assert decided(state) == [("e0", 2)]
    state.engines[EngineName("e0")].to("serving")
    state.engines[EngineName("e0")].version = Version(2)
    assert isinstance(place(demand, state, FREE), Placement)
    assert wanted_versions([demand], state) == {}
    state = fleet(engine("e0", 3, loadable=frozenset({Version(3)})))
    outcome = place(demand, state, FREE)
    assert outcome == Lost(
        "no engine serves version 2, and no relay holds it any more", "it may be on no version newer than 2"
    )
    outcome = place(lost_one("fail", 2, max_version=Version(2)), state, FREE)
    assert isinstance(outcome, Lost)
    assert "to fail then" in outcome.reason


def test_it_holds_no_place_on_an_engine_that_went_past_it() -> None:
    state = fleet(engine("e0", 3), mode="inflight")
    demand = Demand(session(version=2, on="e0", max_version=Version(2)), 10)
    assert isinstance(place(demand, state, FREE), Wait)
    assert isinstance(place(Demand(session(version=2, on="e0"), 10), state, FREE), Placement)


def test_it_holds_no_place_on_an_engine_that_lacks_what_its_turn_needs() -> None:
    state = fleet(engine("e0", 2), engine("e1", 2, [5], kind="embedded"), mode="inflight")
    demand = Demand(session(version=2, on="e0"), 10, kinds=frozenset({"embedded"}))
    outcome = place(demand, state, FREE)
    assert isinstance(outcome, Placement)
    assert outcome.engine == "e1", "though its prefix is on the other"


VERSIONS = st.integers(1, 5)
SOME = st.lists(st.tuples(VERSIONS, st.booleans(), st.sampled_from(["serving", "serving", "fenced"])), max_size=4)


@given(SOME, VERSIONS, st.none() | VERSIONS, st.integers(0, 4), st.none() | VERSIONS, st.sampled_from(POLICIES))
@examples(300)
def test_whatever_the_fleet_a_session_is_within_its_bounds(
    drawn: list[tuple[int, bool, str]],
    grouped: int,
    on: int | None,
    least: int,
    most: int | None,
    policy: VersionPolicy,
) -> None:
    engines = [engine(f"e{i}", v, intake_open=o, status=s) for i, (v, o, s) in enumerate(drawn)]
    state = fleet(*engines)
    bounds: dict[str, Any] = {"min_version": Version(least), "max_version": None if most is None else Version(most)}
    of = session(version=on, on_version_loss=policy, **bounds)
    assume(on is None or of.spec.allows(Version(on)))
    state.group_versions.note(of.spec.group_id, Version(grouped))
    asked = Demand(of, 10)
    outcome = place(asked, state, FREE)
    if isinstance(outcome, Placement):
        there = state.engines[outcome.engine].version
        assert least <= there <= (most or there)
        assert on in (None, there) or policy == "segment"
        return
    assert outcome.reason
    within = [e for e in engines if e.status == "serving" and of.spec.allows(e.version)]
    takes = [e for e in within if (e.intake_open if on is None else policy == "segment" or e.version == on)]
    assert takes == [], "there was a place"
    if isinstance(outcome, Wait) and on is not None and most is not None:
        assert list(wanted_versions([asked], state)) == [on], "nobody waits for what nobody brings"
    if isinstance(outcome, Lost) and on is not None and policy != "fail":
        assert state.gone(Version(on))


def test_a_session_that_named_its_version_lets_go_of_it_once_it_began_unless_it_is_strict() -> None:
    for policy, kept in (("segment", []), ("strict", [1])):
        state, demand = fleet(engine("e0", 1)), pinned(1, policy)
        state.pinned.note(demand.session.session_id, Version(1))
        request = TurnRequest(TurnId("t0"), demand.session.session_id, 0, (1,), SamplingParams(max_tokens=1))
        demand.session.begin_turn(request, 1.0)
        demand.session.end_turn(TurnRecord(request, [2], [-1.0], [], "stop"), 2.0)
        outcome = place(demand, state, FREE)
        assert isinstance(outcome, Placement)
        admit(outcome, demand, state)
        assert state.pinned.versions() == kept


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.none() | st.integers(0, 6)), max_size=40), st.integers(0, 3))
def test_kept_versions_are_bounded_and_end_with_their_sessions(
    notes: list[tuple[str, int | None]], versions_max: int
) -> None:
    kept, model = PinnedVersions(versions_max), dict[str, int]()
    for name, version in notes:
        kept.note(SessionId(name), None if version is None else Version(version))
        model.pop(name, None)
        if version:
            model[name] = version
        assert len(kept.versions()) == min(versions_max, len(set(model.values())))
        assert set(kept.versions()) <= set(model.values())
        for wanted in range(7):
            fits = not wanted or wanted in model.values() or len(set(model.values())) < versions_max
            assert kept.room_for(Version(wanted)) is fits


def test_when_nobody_needs_it_any_more_the_engine_goes_back_to_the_newest() -> None:
    state = fleet(engine("e0", 1, available=Version(3)))
    state.note_session(SessionId("s"), Version(1), "segment")
    assert decided(state, now=100.0) == []
    state.forget_session(SessionId("s"))
    assert decided(state, now=100.0) == [("e0", 3)]
