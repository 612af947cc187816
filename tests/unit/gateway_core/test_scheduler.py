"""Where a turn runs: its version first, then its prefix, then load; and why it waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.fleet.state import EngineState, FleetState
from gateway.core.placing.scheduler import Admission, Demand, Placement, Wait, place
from gateway.core.sessions import SessionState
from gateway.core.types import EngineName, GroupId, Version
from tests.support.quick import examples
from tests.unit.gateway_core.helpers import admit, engine, fleet, session

FREE = Admission(running=0, buffered=0, reader_batch=None, staleness_max=0)
FULL = Admission(running=5, buffered=3, reader_batch=4, staleness_max=1)


def demand(of: SessionState, prompt_tokens: int = 1, avoid: Sequence[str] = ()) -> Demand:
    return Demand(of, prompt_tokens, frozenset(EngineName(name) for name in avoid))


def placed(of: Demand, state: FleetState, admission: Admission = FREE) -> str:
    """The name of the engine that takes it, or why it waits."""
    outcome = place(of, state, admission)
    return outcome.engine if isinstance(outcome, Placement) else outcome.reason


# -- a session that has its version


def test_a_refusal_says_how_many_sessions_nobody_uses_and_what_ends_them() -> None:
    full = Admission(85, 3, 88, 0, silent=2, idle=84, idle_after_s=60.0)
    assert full.reason == (
        "85 running and 3 buffered trajectories reach the bound of 88; 86 of 169 sessions had no request for 60 s: "
        "84 do not count (`gateway sessions --idle-s 60 --abandon` ends them), "
        "2 count for a runner, a child or their reward (`gateway sessions --idle-s 60` lists them)"
    )
    assert (full.over, full.full) == (0, True)


def test_its_version_comes_before_load_and_newness() -> None:
    state = fleet(engine("e0", 1, [10] * 5), engine("e1", 2), engine("e2", 0))
    assert place(demand(session(version=1)), state, FREE) == Placement(EngineName("e0"), "least loaded of 1")
    assert placed(demand(session(version=0)), state) == "e2", "0 is a version"


def test_the_holder_of_its_prefix_comes_before_load() -> None:
    state = fleet(engine("e0", 1), engine("e1", 1, [10] * 5))
    outcome = place(demand(session(version=1, on="e1")), state, FREE)
    assert outcome == Placement(EngineName("e1"), "holds its prefix")
    state.engines[EngineName("e1")].turns |= engine("e2", 1, [200] * 4).turns
    assert placed(demand(session(version=1, on="e1"), 100), state) == "e0", "the holder has no room"


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        ([[1, 1], [500]], "e1"),
        ([[30], [20]], "e1"),
        ([[20], [20]], "e0"),
        ([[20], []], "e1"),
    ],
    ids=["fewest turns", "then fewest tokens", "then by name", "an empty one"],
)
def test_else_the_least_loaded_takes_it(loads: list[list[int]], chosen: str) -> None:
    engines = [engine(f"e{i}", 1, turns) for i, turns in enumerate(loads)]
    assert placed(demand(session(version=1)), fleet(*reversed(engines))) == chosen


def test_sessions_that_come_one_by_one_do_not_all_stay_with_the_first_engine() -> None:
    state = fleet(*(engine(f"e{i}", 1, intake_open=True) for i in range(4)))
    for number in range(40):  # each has ended its turn, and waits for a tool, before the next one comes
        asked = demand(session(f"s{number}"))
        outcome = place(asked, state, FREE)
        assert isinstance(outcome, Placement)
        admit(outcome, asked, state)
    assert [e.admitted for e in state.sorted_engines()] == [10] * 4


def test_it_is_placed_whatever_the_intake_and_the_trainer_say() -> None:
    assert placed(demand(session(version=1)), fleet(engine(intake_open=False, available=2)), FULL) == "e0"


@pytest.mark.parametrize(
    ("turns", "prompt", "capacity", "room"),
    [
        ([1] * 3, 1, 1000, True),
        ([1] * 4, 1, 1000, False),
        ([300], 200, 1000, True),
        ([300], 201, 1000, False),
        ([], 5000, 1000, True),
        ([1] * 3, 5000, 0, True),
        ([1] * 4, 1, 0, False),
    ],
    ids=["below B", "at B", "up to C_max", "beyond C_max", "an empty engine takes any", "unknown capacity", "B holds"],
)
def test_an_engine_has_room(turns: list[int], prompt: int, capacity: int, room: bool) -> None:
    state = fleet(engine("e0", 1, turns, kv_capacity_tokens=capacity), max_running=4, kv_max=0.5)
    assert state.has_room(state.sorted_engines()[0], prompt) is room
    expected = "e0" if room else "engines of version 1 are full"
    assert placed(demand(session(version=1), prompt), state) == expected


def test_a_session_whose_version_is_full_waits_although_others_are_empty() -> None:
    state = fleet(engine("e0", 1, [900]), engine("e1", 2))
    assert place(demand(session(version=1), 50), state, FREE) == Wait("engines of version 1 are full")


@pytest.mark.parametrize(
    ("engines", "outcome"),
    [
        ([engine("e0", 2), engine("e1", 3)], ("e1", 3)),
        ([engine("e0", 2), engine("e1", 3, [900])], ("e0", 2)),
        ([engine("e0", 1, status="refreshing"), engine("e1", 2)], ("e1", 2)),
        ([engine("e0", 2, [900])], "no engine serves version 1 any more, and no other engine has room"),
        ([engine("e0", 1, status="dead"), engine("e1", 2, status="fenced")], "no engine serves"),
        ([], "no engine serves"),
    ],
    ids=["the newest", "the newest with room", "not where it is left", "all full", "none serves", "no engine"],
)
def test_a_session_whose_version_is_lost_goes_on_under_another(
    engines: list[EngineState], outcome: tuple[str, int] | str
) -> None:
    found = place(demand(session(version=1), 50), fleet(*engines), FREE)
    if isinstance(outcome, str):
        assert found == Wait(outcome)
    else:
        reason = f"no engine serves version 1 any more; going on under version {outcome[1]}"
        assert found == Placement(EngineName(outcome[0]), reason, version_changed=True)


def test_an_engine_that_just_cut_it_is_avoided_where_another_serves_its_version() -> None:
    state = fleet(engine("e0", 1), engine("e1", 1, [10] * 3), engine("e2", 2))
    of = session(version=1, on="e0")
    assert placed(demand(of), state) == "e0"
    assert placed(demand(of, avoid=["e0"]), state) == "e1"
    assert placed(demand(of, avoid=["e0", "e1"]), state) == "e0", "rather the same again than another version"


# -- a new session


def opened(name: str, version: int, turns: Sequence[int] = (), **fields: Any) -> EngineState:
    return engine(name, version, turns, intake_open=True, **fields)


@pytest.mark.parametrize(
    ("engines", "outcome"),
    [
        ([opened("e0", 1), opened("e1", 2, [10] * 3)], "e1"),
        ([opened("e0", 1), engine("e1", 2)], "e0"),
        ([opened("e0", 1), opened("e1", 2, [900])], "e0"),
        ([opened("e0", 2, [10]), opened("e1", 2)], "e1"),
        ([opened("e0", 1, [900]), engine("e1", 2)], "open intakes are full"),
        ([engine("e0", 1)], "every intake is closed"),
        ([opened("e0", 1, status="fenced")], "every intake is closed"),
    ],
    ids=["the newest version", "open", "with room", "least loaded", "full", "closed", "serving"],
)
def test_a_new_session_goes_to_the_newest_open_intake(engines: list[EngineState], outcome: str) -> None:
    assert placed(demand(session(), 50), fleet(*engines)) == outcome


def test_a_group_stays_on_the_version_of_its_first() -> None:
    state = fleet(opened("e0", 1))
    first, second, third = (session(name, "g", group_size=3) for name in "abc")
    admit(Placement(EngineName("e0"), ""), demand(first), state)
    for more in (engine("e1", 1), opened("e2", 2)):
        state.add(more)
    state.engines[EngineName("e0")].close_intake(1.0)
    state.engines[EngineName("e0")].turns = engine("e0", 1, [10]).turns
    assert placed(demand(second), state) == "e1", "neither the closed intake nor the newer version sways it"
    state.engines[EngineName("e1")].turns = engine("e1", 1, [900]).turns
    state.engines[EngineName("e0")].turns = engine("e0", 1, [900]).turns
    assert placed(demand(third, 50), state) == "engines of its group's version 1 are full"
    for name in ("e0", "e1"):
        state.engines[EngineName(name)].to("dead")
    assert placed(demand(third, 50), state) == "e2", "its version is lost"


@pytest.mark.parametrize(
    ("running", "buffered", "batch", "bound", "full"),
    [
        (10**6, 10**6, None, 0, False),
        (3, 0, 4, 0, False),
        (4, 0, 4, 0, True),
        (0, 4, 4, 0, True),
        (8, 3, 4, 2, False),
        (8, 4, 4, 2, True),
    ],
)
def test_the_trainer_is_given_no_more_than_its_bound_lets_it_use(
    running: int, buffered: int, batch: int | None, bound: int, full: bool
) -> None:
    assert Admission(running, buffered, batch, bound).full is full


@pytest.mark.parametrize(
    ("spec", "waits"),
    [
        ({}, True),
        ({"split": "eval"}, False),
        ({"train": False}, False),
        ({"split": "eval", "train": False}, False),
        ({"parent_session_id": "p"}, True),
        ({"parent_session_id": "p", "blocks_parent": True}, False),  # who runs already, and waits for it
    ],
)
def test_only_sessions_for_the_trainer_wait_for_it(spec: dict[str, Any], waits: bool) -> None:
    reason = "5 running and 3 buffered trajectories reach the bound of 8"
    assert placed(demand(session(**spec)), fleet(opened("e0", 1)), FULL) == (reason if waits else "e0")


def test_the_rest_of_an_admitted_group_does_not_wait_for_the_trainer() -> None:
    state = fleet(opened("e0", 1))
    admit(Placement(EngineName("e0"), ""), demand(session("a", "g", group_size=2)), state)
    assert placed(demand(session("b", "g", group_size=2)), state, FULL) == "e0"


# -- booking


def test_a_group_is_booked_once_and_whole() -> None:
    state = fleet(opened("e0", 3), opened("e1", 3))
    members = [session(name, "g", group_size=4) for name in "abc"]
    for member, name in zip(members, ["e0", "e0", "e1"], strict=True):
        admit(Placement(EngineName(name), ""), demand(member), state)
    assert [e.admitted for e in state.sorted_engines()] == [4, 0]
    assert state.group_versions.get(GroupId("g")) == 3
    assert state.session_versions == {"a": 3, "b": 3, "c": 3}
    assert [(m.version, m.engine) for m in members] == [(3, "e0"), (3, "e0"), (3, "e1")]


def test_a_session_that_goes_on_is_booked_under_its_new_version_and_not_admitted_again() -> None:
    state = fleet(engine("e0", 2))
    state.group_versions.note(GroupId("g"), Version(1))
    of = session("a", "g", version=1, on="e9")
    admit(Placement(EngineName("e0"), "", version_changed=True), demand(of), state)
    assert (of.version, of.engine, state.session_versions) == (2, "e0", {"a": 2})
    assert (state.sorted_engines()[0].admitted, state.group_versions.get(GroupId("g"))) == (0, 1)


def test_a_group_whose_version_is_lost_goes_on_together() -> None:
    state = fleet(opened("e0", 2), opened("e1", 3))
    state.group_versions.note(GroupId("g"), Version(1))
    first, second = session("a", "g", group_size=4), session("b", "g", group_size=4)
    admit(Placement(EngineName("e0"), ""), demand(first), state)
    assert (state.group_versions.get(GroupId("g")), state.engines[EngineName("e0")].admitted) == (2, 4)
    assert placed(demand(second), state) == "e0", "though e1 is newer"


def test_a_lost_version_avoids_who_just_cut_it_and_owes_nothing_to_a_stale_prefix() -> None:
    state = fleet(engine("e0", 2, [10] * 3), engine("e1", 2))
    of = session(version=1, on="e0")
    assert placed(demand(of), state) == "e1", "its prefix in e0 is of another version"
    assert placed(demand(of, avoid=["e1"]), state) == "e0"


@pytest.mark.parametrize("kind", ["ephemeral", "unnamed"])
def test_a_session_that_no_call_named_holds_no_version(kind: str) -> None:
    state = fleet(opened("e0", 3))
    of = session(**{kind: True})
    admit(Placement(EngineName("e0"), ""), demand(of), state)
    assert (of.version, state.session_versions, state.sorted_engines()[0].admitted) == (3, {}, 1)


ENGINES = st.lists(
    st.tuples(
        st.sampled_from(["serving", "serving", "fenced"]),
        st.integers(1, 3),
        st.lists(st.integers(1, 500), max_size=3),
        st.booleans(),
    ),
    max_size=5,
)


@given(ENGINES, st.sampled_from([None, 1, 2, 3]), st.sampled_from(["", "e0", "e1"]), st.integers(1, 600))
@examples(200)
def test_whatever_the_fleet_a_place_has_room_and_a_version_changes_only_when_lost(
    drawn: list[tuple[str, int, list[int], bool]], version: int | None, on: str, prompt: int
) -> None:
    engines = [engine(f"e{i}", v, turns, status=s, intake_open=o) for i, (s, v, turns, o) in enumerate(drawn)]
    state = fleet(*engines, max_running=3, kv_max=0.9)
    outcome = place(demand(session(version=version, on=on), prompt), state, FREE)
    same = [e for e in engines if e.status == "serving" and e.version == version]
    allowed = [e for e in engines if e.intake_open] if version is None else same or engines
    roomy = [e for e in allowed if e.status == "serving" and state.has_room(e, prompt)]
    if isinstance(outcome, Wait):
        assert not roomy
        assert outcome.reason
        return
    chosen = state.engines[outcome.engine]
    assert chosen in roomy
    assert outcome.version_changed == (version is not None and not same)
    assert chosen.version == max(e.version for e in roomy)
