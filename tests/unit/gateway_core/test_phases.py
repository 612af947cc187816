"""What a session does, in one word."""

from __future__ import annotations

from typing import Any

from gateway.core.endings import Finish, Unrewarded
from gateway.core.phases import PHASES, Phase, session_row
from gateway.core.sessions import SessionSpec, SessionState
from gateway.core.types import (
    EngineName,
    GroupId,
    SamplingParams,
    SegmentCause,
    SessionId,
    TurnId,
    TurnRecord,
    TurnRequest,
    Version,
)
from protos.trajectories import Segment

E0, E1 = EngineName("e0"), EngineName("e1")
TOUCHED, STARTED = 1000.0, 1001.5


def session(**fields: Any) -> SessionState:
    return SessionState(SessionSpec(SessionId("s"), GroupId("g")), 990.0, TOUCHED, **fields)


def turn(tokens: int = 0, *segments: tuple[str, int]) -> TurnRecord:
    """`segments`: each an engine, and the token at which it began there."""
    request = TurnRequest(TurnId("t"), SessionId("s"), 0, (1, 2), SamplingParams(max_tokens=9))
    record = TurnRecord(request, token_ids=[7] * tokens)
    causes: list[SegmentCause] = ["start", "move"]
    record.segments = [
        Segment(
            turn=0,
            engine=engine,
            incarnation="i",
            version=3,
            start=at,
            end=at,
            cause=causes[min(number, 1)],
            started_unix_s=STARTED,
            ended_unix_s=STARTED,
        )
        for number, (engine, at) in enumerate(segments)
    ]
    return record


def phase(*running: tuple[TurnRecord, EngineName | None], **fields: Any) -> Phase:
    return session_row(session(**fields), running).phase


def test_each_phase_of_a_turn() -> None:
    assert phase((turn(), None)) == "queue"
    assert phase((turn(0, ("e0", 0)), E0)) == "prefill"
    assert phase((turn(1, ("e0", 0)), E0)) == "decode"
    assert phase((turn(4, ("e0", 0)), None)) == "move"
    assert phase((turn(4, ("e0", 0), ("e1", 4)), E1)) == "prefill"
    assert phase((turn(5, ("e0", 0), ("e1", 4)), E1)) == "decode"


def test_without_a_turn_it_waits_for_its_agent_or_its_reward() -> None:
    assert phase() == "tool"
    assert phase(unrewarded=Unrewarded(Finish(), TOUCHED)) == "reward"


def test_a_session_that_nothing_keeps_is_idle_and_not_at_its_tools() -> None:
    gone = session_row(session(), (), idle=True)
    assert (gone.phase, gone.since_unix_s) == ("idle", TOUCHED)
    ended = session(unrewarded=Unrewarded(Finish(), TOUCHED))
    assert session_row(ended, (), idle=True).phase == "reward"
    assert session_row(session(), [(turn(), None)], idle=True).phase == "queue"


def test_of_several_turns_the_busiest_counts_in_whatever_order() -> None:
    several = [(turn(), None), (turn(1, ("e1", 0)), E1), (turn(0, ("e0", 0)), E0)]
    for running in (several, several[::-1]):
        row = session_row(session(engine=E0), running)
        assert (row.phase, row.engine) == ("decode", "e1")


def test_the_row_has_where_since_when_and_under_what() -> None:
    prefill = session_row(session(engine=E1, version=Version(3), moves=2), [(turn(0, ("e0", 0)), E0)])
    assert (prefill.engine, prefill.version, prefill.since_unix_s, prefill.moves) == ("e0", 3, STARTED, 2)
    waits = session_row(session(engine=E1), [(turn(), None)])
    assert (waits.engine, waits.since_unix_s) == ("e1", TOUCHED), "its prefix is there"
    fresh = session_row(session(), [(turn(), None)])
    assert (fresh.engine, fresh.version) == ("", None)
    assert session_row(session(), [(turn(1, ("e0", 0)), E0)]).since_unix_s == 0, "when its first token came is not kept"


def test_every_phase_is_in_the_order() -> None:
    assert set(PHASES) == set(Phase.__args__)  # type: ignore[attr-defined]
