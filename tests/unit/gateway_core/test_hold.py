"""How long an empty engine stays on its version for sessions, against turns that wait; and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.fleet.hold import HOLD_WORTH_S, NAMED_MAX, held_s, hold, named, note_holds
from gateway.core.fleet.refresh import refresh_decisions
from gateway.core.fleet.state import EngineState, FleetState
from gateway.core.placing.reasons import closed_reason, closed_reasons
from gateway.core.types import NO_VERSION, SessionId, Version, VersionPolicy
from tests.unit.gateway_core.helpers import engine, fleet

HOLD_S = 120.0


def held(*more: EngineState, sessions: int = 1, policy: VersionPolicy = "segment", **config: Any) -> FleetState:
    """e0 is empty on version 1, closed at 1000.0, with version 2 at hand; live sessions are on version 1."""
    state = fleet(engine("e0", 1, available=2, intake_closed_at=1000.0), *more, version_hold_s=HOLD_S, **config)
    for number in range(sessions):
        state.note_session(SessionId(f"s{number}"), Version(1), policy)
    note_holds(state, 1000.0)
    return state


def goes(state: FleetState, now: float) -> list[str]:
    return [d.reason for d in refresh_decisions(state, now) if d.engine == "e0"]


@pytest.mark.parametrize("policy", HOLD_WORTH_S)
@pytest.mark.parametrize(("sessions", "waiting"), [(1, 1), (1, 10), (3, 1)])
def test_a_hold_ends_once_turns_have_waited_what_its_sessions_are_worth(
    policy: VersionPolicy, sessions: int, waiting: int
) -> None:
    worth_s = HOLD_WORTH_S[policy] * sessions
    ends = 1000.0 + min(HOLD_S, worth_s / waiting)
    state = held(sessions=sessions, policy=policy)
    state.waiting_since = [900.0] * waiting  # longer than it was held: that time was not the hold's
    assert goes(state, ends - 0.1) == []
    [reason] = goes(state, ends + 0.001)
    assert f"for {sessions} sessions" in reason
    assert ("turns had waited" in reason) == (worth_s / waiting < HOLD_S)


def test_without_anybody_who_waits_it_lasts_to_its_end() -> None:
    assert goes(held(), 1000.0 + HOLD_S - 0.1) == []
    assert goes(held(), 1000.0 + HOLD_S) == ["held version 1 for 120 s for 1 sessions"]


@pytest.mark.parametrize(
    ("other", "matters"),
    [
        (engine("e1", 2, available=2, intake_open=True), False),
        (engine("e1", 1, available=2, status="refreshing"), False),
        (engine("e1", 2, [10], available=3), True),
        (engine("e1", 2, status="dead"), True),
        (engine("e1", 1, available=2, status="fenced", refresh_not_before=2000.0), True),
    ],
    ids=["takes sessions", "loads", "drains", "dead", "fenced"],
)
def test_who_waits_counts_only_where_no_other_engine_could_take_it(other: EngineState, matters: bool) -> None:
    state = held(other)
    state.waiting_since = [1000.0] * 100
    assert bool(goes(state, 1001.0)) == matters


def test_the_time_that_its_sessions_use_it_is_not_held_against_them() -> None:
    """A session goes on from time to time: what counts is how long the engine stood empty for it."""
    state = held()
    [e0] = state.sorted_engines()
    turns = engine("e0", 1, [10]).turns
    state.waiting_since = [1000.0]
    note_holds(state, 1003.0)
    assert held_s(e0, 1003.0) == 3.0
    e0.turns = turns
    note_holds(state, 1003.0)
    assert held_s(e0, 1050.0) == 3.0, "a turn of it runs"
    e0.turns = {}
    assert goes(state, 1050.0) == []
    note_holds(state, 1050.0)
    assert goes(state, 1051.9) == []
    assert goes(state, 1052.0) != []


def test_a_new_batch_begins_a_new_hold() -> None:
    state = held()
    [e0] = state.sorted_engines()
    e0.open_intake(1010.0)
    note_holds(state, 1010.0)
    assert (e0.held_since, e0.held_before_s) == (None, 0.0)


@pytest.mark.parametrize(
    "of",
    [
        {"turns": engine("x", 1, [1]).turns},
        {"intake_open": True},
        {"available": 1},
        {"status": "joining"},
        {"given_up": Version(2)},
    ],
)
def test_nothing_is_held_that_could_not_load_anyway(of: dict[str, Any]) -> None:
    state = held()
    [e0] = state.sorted_engines()
    for name, value in of.items():
        setattr(e0, name, value)
    assert hold(state, e0, 1001.0) is None


def test_a_session_that_ended_holds_nothing() -> None:
    state = held(policy="fail")
    state.forget_session(SessionId("s0"))
    assert goes(state, 1001.0) == ["empty"]
    assert state.policies == {}


# -- what is said


def test_who_holds_an_engine_and_which_option_ends_it_is_said() -> None:
    state = held(sessions=2)
    [e0] = state.sorted_engines()
    assert closed_reason(state, e0, 1020.0) == (
        "stays on version 1 for sessions s0, s1: 100 s more at most (--version-hold-s 120)"
    )
    assert closed_reasons(state, 1020.0).startswith("engine e0 stays on version 1 for sessions s0, s1")


def test_many_sessions_are_counted_not_named() -> None:
    many = tuple(SessionId(f"s{number}") for number in range(NAMED_MAX + 3))
    assert named(many) == "sessions s0, s1, s2, s3 and 3 more"
    assert named(many[:1]) == "session s0"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"intake_open": True}, ""),
        ({"status": "dead", "poll_error": "GET /metrics: refused"}, "GET /metrics: refused"),
        ({"status": "refreshing", "loading": Version(7)}, "loads version 7"),
        ({"status": "fenced", "load_error": "digest", "refresh_not_before": 1012.0}, "digest; next try in 12 s"),
        ({"status": "joining", "must_load": True, "available": 0}, "relay h:1 holds no version to load yet"),
        ({"status": "joining", "must_load": True, "relay": "", "available": 0, "loadable": frozenset()}, "--relay"),
        ({"status": "joining", "loadable": None}, "relay h:1 has not reported yet which version is wanted"),
        ({"status": "joining", "available": 5}, "holds version 1, and is to load version 5"),
        ({"status": "joining", "available": 5, "load_error": "torn"}, "is to load version 5: torn"),
        ({"available": 2, "turns": engine("x", 1, [1, 1]).turns}, "loads version 2 once its 2 turns have ended"),
        ({"turns": engine("x", 1, [1] * 64).turns}, "is full: 64 turns run, of 64 at most (--max-running)"),
        ({"suspected": True, "intake_open": True}, "a connection to it broke"),
    ],
)
def test_why_an_engine_takes_no_sessions_is_said(how: dict[str, Any], said: str) -> None:
    e0 = engine("e0", 1, relay="h:1")
    for name, value in how.items():
        setattr(e0, name, value)
    told = closed_reason(fleet(e0, newest=NO_VERSION), e0, 1000.0)
    assert said in told
    assert bool(told) == bool(said)


def test_nothing_is_said_of_the_others_while_one_takes_sessions() -> None:
    closed = [engine(f"e{i}", 1, status="dead", poll_error=f"why {i}") for i in range(6)]
    assert closed_reasons(fleet(engine("x", 1, intake_open=True), *closed), 0.0) == ""
    told = closed_reasons(fleet(*closed), 0.0)
    assert told == "engine e0 why 0; engine e1 why 1; engine e2 why 2; engine e3 why 3; and 2 more"
