"""Which engine a relayed request goes to, and what that books."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.fleet.intake import intake_changes
from gateway.core.fleet.refresh import refresh_decisions
from gateway.core.fleet.state import EngineState
from gateway.core.placing.scheduler import Placement, Wait
from gateway.core.placing.text_requests import TEXT_ROUTES, TextDemand, Unable, place_text
from gateway.core.types import EngineName, TurnId, Version
from protos.engines import ENGINE_KINDS
from tests.unit.gateway_core.helpers import admit, engine, fleet

NUMBERS = itertools.count()


def demand(tokens: int = 1, avoid: tuple[str, ...] = (), **more: Any) -> TextDemand:
    turn = TurnId(f"text-{next(NUMBERS)}")
    return TextDemand(turn, more.pop("api", "chat"), tokens, frozenset(map(EngineName, avoid)), **more)


def open_engine(name: str, version: int = 1, **fields: Any) -> EngineState:
    return engine(name, version, **{"intake_open": True, **fields})


def test_routes_are_told_of_every_kind() -> None:
    assert TEXT_ROUTES.keys() == ENGINE_KINDS.keys()


def test_the_newest_version_that_has_room_comes_before_load() -> None:
    state = fleet(open_engine("e0", 1), open_engine("e1", 2, turns=[9] * 3), max_running=4)
    assert place_text(demand(), state) == Placement(EngineName("e1"), "least loaded of version 2")
    state.engines[EngineName("e1")].turns |= engine("e2", 2, [9]).turns
    assert place_text(demand(), state) == Placement(EngineName("e0"), "least loaded of version 1")


def test_one_whose_client_was_told_a_version_goes_nowhere_else() -> None:
    state = fleet(open_engine("e0", 1), open_engine("e1", 2))
    assert place_text(demand(version=Version(1)), state) == Placement(EngineName("e0"), "least loaded of version 1")
    state.engines[EngineName("e0")].close_intake(1.0)
    assert isinstance(place_text(demand(version=Version(1)), state), Wait)
    assert place_text(demand(version=Version(3)), state) == Unable(
        "no engine has version 3 any more", "send the request again"
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"intake_open": False},
        {"status": "refreshing"},
        {"status": "dead"},
        {"suspected": True},
        {"turns": [1] * 4},
        {"turns": [900]},
    ],
    ids=str,
)
def test_who_takes_no_new_session_takes_none_of_these(fields: dict[str, Any]) -> None:
    state = fleet(open_engine("e0", **fields), max_running=4)
    assert isinstance(place_text(demand(), state), Wait)
    state.add(open_engine("e1", 0))
    assert place_text(demand(), state) == Placement(EngineName("e1"), "least loaded of version 0")


def test_it_is_not_asked_of_an_engine_that_failed_it_unless_there_is_no_other() -> None:
    state = fleet(open_engine("e0"), open_engine("e1", turns=[1] * 3))
    assert place_text(demand(avoid=("e0",)), state) == Placement(EngineName("e1"), "least loaded of version 1")
    assert place_text(demand(avoid=("e0", "e1")), state) == Placement(EngineName("e0"), "least loaded of version 1")


def test_engines_without_the_route_are_no_candidates_and_the_error_says_what_would_be() -> None:
    state = fleet(open_engine("e0", kind="embedded"))
    assert place_text(demand(api="completion"), state) == Placement(EngineName("e0"), "least loaded of version 1")
    outcome = place_text(demand(api="chat"), state)
    assert isinstance(outcome, Unable)
    assert "embedded" in outcome.reason
    assert "vllm" in outcome.hint
    assert "--relay-text" in outcome.hint
    nobody = place_text(demand(), fleet())
    assert isinstance(nobody, Unable)
    assert "no engine" in nobody.reason
    state.add(open_engine("e1", status="dead"))
    assert isinstance(place_text(demand(api="chat"), state), Wait), "one that is away now may come back"


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(1, 40))
def test_load_is_even_whatever_was_there_and_each_one_counts(running: list[int], num: int) -> None:
    engines = [open_engine(f"e{i}", turns=[1] * count, kv_capacity_tokens=0) for i, count in enumerate(running)]
    state = fleet(*engines, max_running=1000)
    for _ in range(num):
        asked = demand(5)
        outcome = place_text(asked, state)
        assert isinstance(outcome, Placement)
        before = len(state.engines[outcome.engine].turns)
        assert before == min(len(e.turns) for e in engines)
        admit(outcome, asked, state)
        load = state.engines[outcome.engine].turns[asked.turn_id]
        assert load.relayed
        assert load.tokens == 5
    assert sum(len(e.turns) for e in engines) == sum(running) + num
    assert sum(e.admitted for e in engines) == num


def test_engines_as_loaded_as_each_other_take_turns() -> None:
    state = fleet(*(open_engine(f"e{i}") for i in range(3)))
    took = []
    for _ in range(6):
        asked = demand()
        outcome = place_text(asked, state)
        assert isinstance(outcome, Placement)
        admit(outcome, asked, state)
        state.engines[outcome.engine].leave(asked.turn_id)  # answered before the next one comes
        took.append(outcome.engine)
    assert took == ["e0", "e1", "e2"] * 2


def test_they_close_an_intake_for_a_newer_version_as_sessions_do() -> None:
    state = fleet(open_engine("e0", 1, available=2))
    asked = demand()
    outcome = place_text(asked, state)
    assert isinstance(outcome, Placement)
    admit(outcome, asked, state)
    [change] = intake_changes(state, 1.0)
    assert not change.open
    assert refresh_decisions(state, 1.0) == [], "the refresh waits for it"
    state.engines[EngineName("e0")].leave(asked.turn_id)
    assert [d.to_version for d in refresh_decisions(state, 1.0)] == [2]
