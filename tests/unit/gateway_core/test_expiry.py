"""When a session is over without a word of its client, and what keeps it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.endings import Finish, Unrewarded
from gateway.core.expiry import why_over
from gateway.core.sessions import SessionState
from gateway.core.types import SamplingParams, SessionId, TurnId, TurnRequest
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


FLAGS = st.fixed_dictionaries({name: st.booleans() for name in ("finishing", "blocked", "parent_ended")})
AGE_S = st.floats(0, 1000)


@given(AGE_S, st.none() | AGE_S, FLAGS, st.sampled_from(["live", "finished", "abandoned"]), st.none() | AGE_S)
@settings(max_examples=300, deadline=None)
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
