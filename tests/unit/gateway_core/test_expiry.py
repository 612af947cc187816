"""When a session is over without a word of its client, and what keeps it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.endings import Finish, Unrewarded
from gateway.core.expiry import REFUSED_IDLE_S, crowding, why_over
from gateway.core.sessions import SessionState
from gateway.core.types import EngineName, SamplingParams, SessionId, TurnId, TurnRequest
from tests.support.quick import examples
from tests.unit.gateway_core.helpers import session

LIMITS: Any = {"idle_s": 60.0, "reward_window_s": 600.0}


def touched(at: float, **spec: Any) -> SessionState:
    state = session("s", **spec)
    state.touched_unix_s = at
    return state


def running(state: SessionState) -> SessionState:
    asked = TurnRequest(TurnId("t"), SessionId("s"), 0, (1,), SamplingParams(max_tokens=1))
    state.begin_turn(asked, state.touched_unix_s)
    return state


@pytest.mark.parametrize(
    ("state", "how", "why"),
    [
        (touched(100.0), {}, ""),
        (touched(39.0), {}, "idle for 60 s"),
        (running(touched(39.0)), {}, ""),
        (touched(39.0), {"blocked": True}, ""),
        (touched(39.0), {"finishing": True}, ""),
        (touched(100.0, deadline_unix_s=99.0), {}, "its deadline is over"),
        (running(touched(100.0, deadline_unix_s=99.0)), {"blocked": True}, "its deadline is over"),
        (touched(100.0, deadline_unix_s=99.0), {"finishing": True}, ""),
        (touched(100.0, parent_session_id=SessionId("p")), {"parent_ended": True}, "its parent p has ended"),
        (running(touched(100.0)), {"blocked": True, "parent_ended": True}, "its parent None has ended"),
        (touched(100.0), {"finishing": True, "parent_ended": True}, ""),
    ],
)
def test_why_a_session_is_over(state: SessionState, how: dict[str, bool], why: str) -> None:
    assert why_over(state, 100.0, **LIMITS, **how) == why


@pytest.mark.parametrize("idle_s", [60.0, 1800.0])
def test_a_session_whose_first_turn_no_engine_took_is_over_soon(idle_s: float) -> None:
    """Its client went away for good, or would have come back within what it was told to wait."""
    limits = {**LIMITS, "idle_s": idle_s}
    soon = min(idle_s, REFUSED_IDLE_S)
    refused = touched(0.0)
    refused.last_dropped = "turn 0: no engine took the turn within 60 s; 0 tokens kept"
    assert why_over(refused, soon, **limits) == ""
    assert why_over(refused, soon + 1, **limits) == f"no engine took its first turn, and it was idle for {soon:g} s"
    assert why_over(running(refused), soon + 1, **limits) == ""
    placed = touched(0.0)
    placed.last_dropped, placed.engine = "turn 0: aborted; 5 tokens kept", EngineName("e0")
    assert why_over(placed, idle_s, **limits) == "", "its client may ask for its tokens again"
    assert why_over(touched(0.0), idle_s, **limits) == "", "who made it may still be at its first prompt"


FLAGS = st.fixed_dictionaries({name: st.booleans() for name in ("finishing", "blocked", "parent_ended")})
AGE_S = st.floats(0, 1000)


@given(AGE_S, st.none() | AGE_S, FLAGS, st.sampled_from(["live", "finished", "abandoned"]), st.none() | AGE_S)
@examples(300)
def test_whatever_it_is_each_reason_is_true_and_none_is_passed_over(
    touched_s: float, deadline: float | None, how: dict[str, bool], phase: str, reward_until: float | None
) -> None:
    now, state = 500.0, touched(touched_s, deadline_unix_s=deadline, parent_session_id=SessionId("p"))
    state.phase = phase  # type: ignore[assignment]
    if phase == "finished" and reward_until is not None:
        state.unrewarded = Unrewarded(Finish(), reward_until)
    why = why_over(state, now, **LIMITS, **how)
    rolling = phase == "live" and not how["finishing"]
    reasons = {
        "no reward came within 600 s": state.unrewarded is not None and state.unrewarded.until_unix_s < now,
        "its deadline is over": rolling and deadline is not None and deadline < now,
        "its parent p has ended": rolling and how["parent_ended"],
        "idle for 60 s": rolling and not how["blocked"] and touched_s < now - 60,
    }
    assert reasons[why] if why else not any(reasons.values())
    running(state) if phase == "live" else None
    busy = why_over(state, now, **LIMITS, **how)
    assert busy == ("" if why.startswith("idle") else why), "only idleness is kept away by a turn"


def test_of_unnamed_calls_the_longest_idle_give_room() -> None:
    states = [touched(at, unnamed=True) for at in (30.0, 10.0, 20.0)]
    others = [touched(1.0), running(touched(2.0, unnamed=True))]
    assert [state.touched_unix_s for state in crowding([*states, *others], 1)] == [10.0, 20.0]
    assert crowding(states, 3) == []
