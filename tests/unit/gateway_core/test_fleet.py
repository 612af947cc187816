"""Engines' lives, when an intake opens or closes, and when an engine may leave its version for a newer one."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.fleet.intake import intake_changes
from gateway.core.fleet.order import Pool
from gateway.core.fleet.refresh import LOAD_TRIES, RefreshDecision, load_failed, refresh_decisions
from gateway.core.fleet.state import TRANSITIONS, EngineState, EngineStatus, FleetState, staleness_histogram
from gateway.core.types import SessionId, Version
from tests.support.quick import examples
from tests.unit.gateway_core.helpers import engine, fleet

STATUSES: tuple[EngineStatus, ...] = get_args(EngineStatus)
LIMITS: dict[str, Any] = {
    "max_running": 10,
    "intake_batch": 4,
    "intake_age_s": 100.0,
    "intake_min_batch": 2,
    "drain_max_s": 30.0,
    "min_util": 0.25,
    "staleness_max": 2,
    "version_hold_s": 50.0,
}


def on_versions(state: FleetState, **sessions: int) -> FleetState:
    for name, version in sessions.items():
        state.note_session(SessionId(name), Version(version), "segment")
    return state


# -- transitions


@pytest.mark.parametrize("after", STATUSES)
@pytest.mark.parametrize("before", STATUSES)
def test_only_the_ways_of_the_table_are_open(before: EngineStatus, after: EngineStatus) -> None:
    state = engine(status=before, intake_open=True)
    if after in TRANSITIONS[before]:
        state.to(after)
        assert (state.status, state.intake_open) == (after, after == "serving"), "only a serving engine takes any in"
    else:
        with pytest.raises(ValueError, match=f"engine e0: no way from {before} to {after}"):
            state.to(after)
        assert (state.status, state.intake_open) == (before, True)


def test_the_table_keeps_its_promises() -> None:
    assert set(TRANSITIONS) == set(STATUSES)
    assert all(before not in after for before, after in TRANSITIONS.items()), "a change is a change"
    assert TRANSITIONS["dead"] == {"joining"}, "what comes back is looked at before it serves"
    assert all("dead" in TRANSITIONS[status] for status in STATUSES if status != "dead"), "anything may die"
    assert "serving" not in TRANSITIONS["fenced"], "after a failed load only another load helps"
    assert [s for s in STATUSES if "fenced" in TRANSITIONS[s]] == ["refreshing"]


def test_tokens_and_serving_engines_are_counted() -> None:
    state = fleet(engine("e2", 1), engine("e0", 1, [3, 4]), engine("e1", 2), engine("e3", 1, status="joining"))
    assert [e.name for e in state.sorted_engines()] == ["e0", "e1", "e2", "e3"]
    assert sorted(e.name for e in state.serving(Pool(Version(1)))) == ["e0", "e2"]
    assert state.sorted_engines()[0].tokens == 7
    assert on_versions(state, b=1, c=2, a=1).live_sessions(Version(1)) == ("a", "b")


# -- intake


def intake(state: EngineState, now: float, newest: int | None = None) -> tuple[bool, str] | None:
    """What one engine's intake does at `now`, applied."""
    changes = intake_changes(fleet(state, newest=newest, **LIMITS), now)
    assert all(c.engine == state.name for c in changes)
    return (changes[0].open, changes[0].reason) if changes else None


OPEN: dict[str, Any] = {"intake_open": True, "intake_opened_at": 1000.0}
NEWER: dict[str, Any] = {"available": 2}


@pytest.mark.parametrize(
    ("how", "running", "age_s", "reason"),
    [
        ({"admitted": 3}, 1, 99.9, None),
        ({"admitted": 4}, 1, 0.0, "batch of 4 admitted"),
        ({"admitted": 4}, 0, 0.0, "batch of 4 admitted"),
        ({"admitted": 1}, 1, 100.0, "open for 100 s"),
        ({"admitted": 0}, 0, 1e6, None),
        ({"admitted": 1, **NEWER}, 1, 0.0, None),
        ({"admitted": 2, **NEWER}, 1, 0.0, "version 2 is here; 2 admitted"),
        ({"admitted": 1, **NEWER}, 0, 0.0, "version 2 is here and nothing runs"),
        ({"admitted": 1, **NEWER}, 1, 100.0, "open for 100 s"),
    ],
)
def test_an_open_intake_closes(how: dict[str, Any], running: int, age_s: float, reason: str | None) -> None:
    state = engine("e0", 1, [10] * running, **OPEN, **how)
    assert intake(state, 1000.0 + age_s) == (None if reason is None else (False, reason))
    assert state.intake_open == (reason is None)
    assert state.intake_closed_at == (0.0 if reason is None else 1000.0 + age_s)


@pytest.mark.parametrize(
    ("how", "running", "closed_s", "newest", "reason"),
    [
        ({}, 0, 0.0, 1, "nothing newer than version 1"),
        ({}, 9, 0.0, 1, "nothing newer than version 1"),
        ({}, 10, 1e6, 1, None),
        ({}, 9, 0.0, 5, "nothing newer than version 1"),  # others have it; its own host does not
        (NEWER, 0, 1e6, 2, None),  # it is to refresh
        (NEWER, 2, 30.0, 2, "stragglers held it for 30 s (2 turns of 20 tokens); within the staleness bound"),
        (NEWER, 2, 29.9, 2, None),
        (NEWER, 3, 30.0, 2, None),  # busy enough
        (NEWER, 2, 30.0, 3, None),  # a session admitted now would be too stale
        ({"status": "joining"}, 0, 0.0, 1, None),
        ({"status": "refreshing"}, 0, 0.0, 1, None),
        ({"status": "fenced"}, 0, 0.0, 1, None),
        ({"status": "dead"}, 0, 0.0, 1, None),
    ],
)
def test_a_closed_intake_opens(
    how: dict[str, Any], running: int, closed_s: float, newest: int, reason: str | None
) -> None:
    state = engine("e0", 1, [10] * running, intake_closed_at=900.0, below_since=1000.0, admitted=3, **how)
    now = 1000.0 + closed_s
    assert intake(state, now, newest) == (None if reason is None else (True, reason))
    assert state.intake_open == (reason is not None)
    assert (state.intake_opened_at, state.admitted) == ((0.0, 3) if reason is None else (now, 0))


def test_few_turns_have_to_stay_few_for_stragglers() -> None:
    """It is the time below `min_util` that counts, not the time closed; tool calls do not interrupt it."""
    state = engine("e0", 1, [10] * 8, available=2, intake_closed_at=900.0)
    busy, few = dict(state.turns), dict(list(state.turns.items())[:2])
    for now, turns, opens in [
        (1000.0, busy, False),
        (1001.0, few, False),
        (1020.0, {}, False),
        (1030.9, few, False),
        (1031.0, {}, False),  # nobody is there to wait for
        (1032.0, few, True),
    ]:
        state.turns = dict(turns)
        assert (intake(state, now, 2) is not None) is opens, now
    assert state.below_since is None


@pytest.mark.parametrize(("newest", "to"), [(2, None), (3, 2)], ids=["fresh enough", "beyond the staleness bound"])
def test_stragglers_beyond_the_staleness_bound_leave(newest: int, to: int | None) -> None:
    state = on_versions(
        fleet(
            engine("e0", 1, [10, 10], available=2, intake_closed_at=900.0, below_since=970.0),
            engine("e1", 2, available=2),
            newest=newest,
            **LIMITS,
        ),
        a=1,
    )
    assert refresh_decisions(state, 999.9) == []
    decisions = refresh_decisions(state, 1000.0)
    assert [(d.engine, d.to_version) for d in decisions] == ([] if to is None else [("e0", 2)])
    for decision in decisions:
        assert decision.interrupted == ("e0-0", "e0-1")
        assert decision.forced_sessions == ("a",)
        assert decision.reason == "stragglers held it for 30 s (2 turns of 20 tokens); beyond the staleness bound"


# -- modes


def test_in_flight_engines_load_at_once_and_tell_whom_they_interrupt() -> None:
    state = fleet(engine("e0", 1, [10, 10], available=2), engine("e1", 1, available=2), **LIMITS, mode="inflight")
    assert [(c.engine, c.open) for c in intake_changes(state, 1000.0)] == [("e0", True), ("e1", True)]
    assert intake_changes(state, 1e9) == [], "and never closes"
    assert [(d.engine, d.interrupted) for d in refresh_decisions(state, 1000.0)] == [
        ("e0", ("e0-0", "e0-1")),
        ("e1", ()),
    ]


def test_at_the_barrier_all_wait_for_the_last_turn() -> None:
    e0, e1 = engine("e0", 1, [10], available=2, **OPEN), engine("e1", 1, available=2, **OPEN)
    state = fleet(e0, e1, engine("e2", 2), **{**LIMITS, "intake_min_batch": 50}, mode="barrier")
    closing = [(c.engine, c.open) for c in intake_changes(state, 1000.0)]
    assert closing == [("e0", False), ("e1", False), ("e2", True)], "whatever they admitted"
    assert refresh_decisions(state, 1e6) == []
    assert intake_changes(state, 1e6) == [], "no straggler opens an intake"
    e0.turns.clear()
    assert [d.engine for d in refresh_decisions(state, 1000.0)] == ["e0", "e1"]


def test_each_engine_decides_for_itself_in_the_order_of_names() -> None:
    state = fleet(
        engine("e2", 1, available=2, **OPEN),
        engine("e1", 1, [5]),
        engine("e0", 1, [5], **OPEN, admitted=4),
        **LIMITS,
    )
    assert [(c.engine, c.open) for c in intake_changes(state, 1000.0)] == [("e0", False), ("e1", True), ("e2", False)]


# -- refresh


@pytest.mark.parametrize(
    ("how", "to"),
    [
        ({"status": "joining", "available": 2}, 2),
        ({"status": "joining", "available": 1}, None),  # it holds the wanted one
        ({"status": "joining", "available": 0}, None),  # nothing was published
        ({"status": "joining", "version": 5, "available": 3}, None),  # versions never go back
        ({"status": "fenced", "available": 1}, 1),  # whatever its label says, the load failed
        ({"status": "fenced", "available": 1, "tried": 1, "refresh_not_before": 1000.1}, None),
        ({"status": "fenced", "available": 1, "refresh_not_before": 1000.0}, 1),
        ({"status": "refreshing", "available": 2}, None),
        ({"status": "dead", "available": 2}, None),
        ({"available": 3}, 3),
        ({"available": 1}, None),
        ({"available": 2, "version": 3}, None),  # versions never go back
        ({"available": 2, "intake_open": True}, None),
        ({"available": 2, "tried": 2, "refresh_not_before": 1000.1}, None),
        ({"available": 3, "tried": 2, "refresh_not_before": 1000.1}, 3),
    ],
)
def test_an_engine_refreshes(how: dict[str, Any], to: int | None) -> None:
    state = engine(**how)
    before = state.status
    decisions = refresh_decisions(fleet(state), 1000.0)
    assert [(d.engine, d.to_version) for d in decisions] == ([] if to is None else [("e0", to)])
    assert state.status == (before if to is None else "refreshing")


def test_an_engine_with_a_turn_does_not_refresh() -> None:
    state = fleet(engine("e0", 1, [10], available=2), engine("e1", 1, available=2))
    assert [(d.engine, d.reason) for d in refresh_decisions(state, 1000.0)] == [("e1", "empty")]


def test_one_that_answers_again_while_its_old_streams_run_does_not_refresh_under_them() -> None:
    state = fleet(engine("e0", 1, [10], status="joining", available=2))
    assert refresh_decisions(state, 1000.0) == []


def test_an_intake_reopened_for_stragglers_takes_another_batch() -> None:
    state = engine("e0", 1, [10, 10], available=2, intake_closed_at=900.0, below_since=970.0)
    reason = "stragglers held it for 30 s (2 turns of 20 tokens); within the staleness bound"
    assert intake(state, 1000.0, 2) == (True, reason)
    state.admitted = 2
    assert intake(state, 1000.0, 2) is None, "not closed after its first session"


@pytest.mark.parametrize(("held_s", "goes"), [(0.0, False), (49.9, False), (50.0, True)])
def test_the_last_engine_of_a_version_is_held_for_its_sessions(held_s: float, goes: bool) -> None:
    state = on_versions(fleet(engine(available=2, intake_closed_at=1000.0), **LIMITS), b=1, a=1, c=2)
    decisions = refresh_decisions(state, 1000.0 + held_s)
    assert [d.forced_sessions for d in decisions] == ([("a", "b")] if goes else [])
    assert [d.reason for d in decisions] == (["held version 1 for 50 s for 2 sessions"] if goes else [])
    assert [e.held_since is not None for e in state.sorted_engines()] == [not goes], "and it is known since when"


def test_of_two_empty_engines_one_stays_for_the_sessions() -> None:
    state = fleet(engine("e0", available=2), engine("e1", available=2, intake_closed_at=1000.0), **LIMITS)
    decisions = refresh_decisions(on_versions(state, a=1), 1000.0)
    assert [(d.engine, d.forced_sessions) for d in decisions] == [("e0", ())]
    assert [e.status for e in state.sorted_engines()] == ["refreshing", "serving"]
    state.forget_session(SessionId("a"))
    assert [d.engine for d in refresh_decisions(state, 1000.0)] == ["e1"], "its sessions ended"


def fail(state: EngineState, *, by_engine: bool = True) -> RefreshDecision:
    """Its next refresh, which fails."""
    [decision] = refresh_decisions(fleet(state), 1000.0)
    state.to("fenced")
    load_failed(state, decision, f"no {decision.to_version}", by_engine=by_engine)
    return decision


def test_a_version_that_does_not_load_is_given_up_for_the_one_before_until_a_newer_is_there() -> None:
    state = engine("e0", 1, available=2)
    assert [(d.to_version, d.before) for d in (fail(state), fail(state))] == [(2, False)] * LOAD_TRIES
    [decision] = refresh_decisions(fleet(state), 1000.0)
    assert (decision.to_version, decision.before) == (2, True)
    state.loaded(Version(1))
    state.to("serving")
    assert refresh_decisions(fleet(state), 1000.0) == []
    assert intake(state, 1000.0, 2) == (True, "nothing newer than version 1"), "it takes new sessions meanwhile"
    state.available = Version(3)
    assert intake(state, 1000.0, 3) == (False, "version 3 is here and nothing runs")
    [decision] = refresh_decisions(fleet(state), 1000.0)
    assert (decision.to_version, decision.before, decision.served) == (3, False, True)


def test_the_second_bad_version_in_a_row_goes_back_to_what_was_held_not_to_the_first() -> None:
    state = engine("e0", 1, available=2, good=Version(1))
    for version in (2, 3):
        state.available, state.version = Version(version), Version(1)
        state.status = "serving"
        assert [fail(state).to_version for _ in range(LOAD_TRIES)] == [version] * LOAD_TRIES
        [decision] = refresh_decisions(fleet(state), 1000.0)
        assert (decision.to_version, decision.before) == (version, True)
        assert state.before(Version(version), range(1, version + 1)) == 1
        state.loaded(Version(1))
        state.to("serving")
    assert state.bad == {2, 3}
    assert state.before(Version(3), [2]) == 2, "a version given up may be all there is"
    assert engine("e0", 0, bad=frozenset({2})).before(Version(3), [1, 2]) == 1, "what was never tried comes before it"
    assert state.before(Version(3), [3, 4]) is None


def test_a_newer_version_is_tried_at_once_and_has_its_own_tries() -> None:
    state = engine("e0", 1, available=2)
    fail(state)
    state.refresh_not_before = 1030.0
    assert refresh_decisions(fleet(state), 1000.0) == [], "the same again waits"
    state.available = Version(3)
    assert (fail(state).to_version, state.given_up, state.load_failures) == (3, 0, 1), "not one try less"
    assert refresh_decisions(fleet(state), 1000.0) == []
    assert [d.to_version for d in refresh_decisions(fleet(state), 1030.0)] == [3]


def test_what_was_held_before_is_loaded_without_a_wait_once_a_version_is_given_up() -> None:
    state = engine("e0", 1, available=2)
    for _ in range(LOAD_TRIES):
        fail(state)
    state.refresh_not_before = 1030.0
    assert [d.before for d in refresh_decisions(fleet(state), 1000.0)] == [True]


def test_each_relay_keeps_the_newest_version_that_an_engine_beside_it_has_held() -> None:
    engines = [engine("e0", 1), engine("e1", 1), engine("e2", 1), engine("e3", 1), engine("e4", 1)]
    for state, relay, good in zip(engines, ("a:1", "a:1", "b:1", "", "c:1"), (3, 4, 2, 9, 0), strict=True):
        state.relay, state.good = relay, Version(good)
    assert fleet(*engines).fallbacks() == {"a:1": 4, "b:1": 2}


def test_what_went_wrong_with_a_load_stands_until_what_is_wanted_is_there() -> None:
    state = engine("e0", 1, available=2)
    assert (fail(state).to_version, state.last_error) == (2, "no 2")
    state.loaded(Version(2))
    assert state.last_error == ""
    state = engine("e0", 1, available=2)
    assert [fail(state).to_version for _ in range(LOAD_TRIES)] == [2] * LOAD_TRIES
    state.loaded(Version(1))
    assert state.last_error == "no 2", "it serves the one before"
    state.poll_error = "silent"
    assert state.last_error == "silent"
    state.poll_error = ""
    state.loaded(Version(3))
    assert state.last_error == ""
    fail(state := engine("e0", 1, available=2))
    state.begin_anew()
    assert state.last_error == "", "of the incarnation before"


def test_when_the_one_before_does_not_load_either_it_begins_anew() -> None:
    state = engine("e0", 1, available=2)
    assert [fail(state).before for _ in range(7)] == [False, False, True, False, False, True, False]


def test_what_lies_between_relay_and_engine_gives_up_no_version() -> None:
    state = engine("e0", 1, available=2)
    assert not any(fail(state, by_engine=False).before for _ in range(5))


def test_another_incarnation_tries_again_what_the_last_one_could_not_load() -> None:
    state = engine("e0", 1, available=2)
    assert [fail(state).before for _ in range(LOAD_TRIES)] == [False] * LOAD_TRIES
    state.begin_anew()
    state.status = "joining"
    assert [d.before for d in refresh_decisions(fleet(state), 1000.0)] == [False]


@st.composite
def engines(draw: st.DrawFn) -> list[EngineState]:
    """Engines in all conditions but one: an engine that does not serve runs nothing."""
    drawn = []
    for i in range(draw(st.integers(0, 6))):
        version, status = draw(st.integers(1, 3)), draw(st.sampled_from(["serving", "serving", "dead", "refreshing"]))
        e = engine(f"e{i}", version, available=version + draw(st.integers(0, 2)), status=status)
        if status == "serving":
            e.turns = engine(e.name, version, draw(st.sampled_from([[], [], [1]]))).turns
            e.intake_open = draw(st.sampled_from([False, False, True]))
        e.intake_closed_at = draw(st.sampled_from([900.0, 990.0]))
        drawn.append(e)
    return drawn


@given(engines(), st.lists(st.integers(1, 4), max_size=4))
@examples(150)
def test_whatever_the_fleet_only_empty_engines_go_and_no_held_version_is_left(
    engines: list[EngineState], versions: list[int]
) -> None:
    state = on_versions(fleet(*engines, **LIMITS), **{f"s{i}": v for i, v in enumerate(versions)})
    served = {e.version for e in state.sorted_engines() if e.status == "serving"}
    going = {d.engine: d for d in refresh_decisions(state, 1000.0)}
    for e in engines:
        if e.name in going:
            assert not e.turns
            assert not e.intake_open
            assert e.version < going[e.name].to_version == e.available
    for version in served & set(state.session_versions.values()):
        forced = [d for name, d in going.items() if state.engines[name].version == version and d.forced_sessions]
        assert state.num_serving(Pool(version)) or [d.forced_sessions for d in forced] == [state.live_sessions(version)]
        assert all(state.engines[d.engine].intake_closed_at == 900.0 for d in forced), "after the hold, not before"
    for e in engines:  # and none is kept without a reason
        if e.status == "serving" and e.version < e.available and not e.turns and not e.intake_open:
            assert state.live_sessions(e.version)
            assert list(state.serving(Pool(e.version))) == [e]


@pytest.mark.parametrize(
    ("versions", "counts"),
    [([], {}), ([5, 5, 3], {0: 2, 2: 1}), ([7, 5, 4], {0: 2, 1: 1}), ([0], {5: 1})],
    ids=["none", "behind", "ahead of what is known counts as fresh", "unpublished"],
)
def test_the_histogram_counts_how_far_behind_sessions_are(versions: list[int], counts: dict[int, int]) -> None:
    histogram = staleness_histogram([Version(v) for v in versions], Version(5))
    assert list(histogram.items()) == list(counts.items())


# -- a turn that leaves

ENGINES = st.builds(
    lambda version, newer, given_up, status, intake, admitted, turns, opened: {
        "version": version,
        "available": version + newer,
        "given_up": Version(version + newer if given_up else 0),
        "status": status,
        "intake_open": intake and status == "serving",
        "admitted": admitted,
        "turns": [1] * turns,
        "intake_opened_at": opened,
        "intake_closed_at": opened,
    },
    st.integers(1, 2),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from(["serving", "serving", "serving", "refreshing", "fenced", "joining"]),
    st.booleans(),
    st.integers(0, 4),
    st.integers(0, 3),
    st.sampled_from([0.0, 95.0]),
)


@given(st.lists(ENGINES, min_size=1, max_size=3), st.sampled_from(["drain", "repack", "inflight", "barrier"]))
def test_where_a_leaving_turn_moves_nothing_nothing_differs_without_it(made: list[dict[str, Any]], mode: Any) -> None:
    def state(leaves: bool) -> FleetState:
        engines = (engine(f"e{i}", **fields) for i, fields in enumerate(made))
        found = fleet(*engines, mode=mode, **{**LIMITS, "max_running": 3})
        if leaves:
            found.sorted_engines()[0].turns.popitem()
        return on_versions(found, a=1)

    made[0]["turns"] = [1] * max(1, len(made[0]["turns"]))
    before, after = state(False), state(True)
    if before.unmoved(before.sorted_engines()[0]):
        assert intake_changes(before, 100.0) == intake_changes(after, 100.0)
        assert refresh_decisions(before, 100.0) == refresh_decisions(after, 100.0)


def test_a_leaving_turn_is_heard_of_where_something_waits_for_it() -> None:
    for fields in ({"intake_open": False}, {"available": 2}, {"status": "fenced"}, {"admitted": 4}):
        state = fleet(engine("e0", 1, **{"intake_open": True, **fields}), **LIMITS)
        assert not state.unmoved(state.sorted_engines()[0])
    assert fleet(one := engine("e0", 1, intake_open=True), **LIMITS).unmoved(one)
