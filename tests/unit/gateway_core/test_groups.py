"""A group's life: failed places sampled again, then closed short, or given up."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.groups import Close, GiveUp, GroupState, Resample
from gateway.core.types import GroupId, SessionId
from protos.errors import Conflict


def group(size: int = 3, group_min: int = 2, resample_max: int = 0) -> GroupState:
    state = GroupState(GroupId("g"), size, group_min, resample_max)
    for index in range(size):
        state.sampled(SessionId(f"s{index}"), index)
    return state


def test_it_closes_when_its_last_member_has_ended() -> None:
    state = group()
    assert [state.ended(SessionId(f"s{i}"), "finished") for i in range(3)] == [None, None, Close(3)]
    assert state.phase == "closed"


def test_a_failed_member_is_sampled_again_then_the_group_closes_short() -> None:
    state = group(resample_max=1)
    assert state.ended(SessionId("s1"), "abandoned") == Resample(1)
    state.sampled(SessionId("again"), 1)
    assert state.ended(SessionId("again"), "abandoned") is None
    assert state.ended(SessionId("s0"), "finished") is None
    assert state.ended(SessionId("s2"), "finished") == Close(2)


def test_it_is_given_up_as_soon_as_it_cannot_reach_its_minimum() -> None:
    state = group(group_min=3)
    outcome = state.ended(SessionId("s0"), "abandoned")
    assert outcome == GiveUp("2 members are left, and it needs 3")
    assert state.ended(SessionId("s1"), "finished") is None, "what comes later changes nothing"
    with pytest.raises(Conflict, match="already abandoned"):
        state.abandon()


def test_strangers_and_members_that_ended_change_nothing() -> None:
    state = group()
    state.ended(SessionId("s0"), "finished")
    assert state.ended(SessionId("s0"), "finished") is None
    assert state.ended(SessionId("nobody"), "abandoned") is None
    assert (len(state.live), len(state.finished)) == (2, 1)


@given(st.integers(1, 5), st.data(), st.integers(0, 3), st.lists(st.booleans(), min_size=8, max_size=8))
def test_every_group_ends_in_one_way(size: int, data: st.DataObject, resample_max: int, fates: list[bool]) -> None:
    state = group(size, data.draw(st.integers(1, size)), resample_max)
    names, outcomes, fate = itertools.count(), [], itertools.chain(fates, itertools.repeat(True))
    while state.live and state.phase == "open":
        session_id = data.draw(st.sampled_from(sorted(state.live)))
        outcome = state.ended(session_id, "finished" if next(fate) else "abandoned")
        outcomes.append(outcome)
        if isinstance(outcome, Resample):
            state.sampled(SessionId(f"again{next(names)}"), outcome.sample_index)
        assert sorted(state.live.values()) == sorted(set(state.live.values())), "one session a place"
    assert state.resampled <= resample_max
    assert isinstance(outcomes[-1], Close | GiveUp)
    assert not any(isinstance(outcome, Close | GiveUp) for outcome in outcomes[:-1])
    if isinstance(outcomes[-1], Close):
        assert state.group_min <= outcomes[-1].members == len(state.finished) <= size
