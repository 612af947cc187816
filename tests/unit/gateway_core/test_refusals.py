"""A queue that is walked with refusals remembered gives every turn what asking for each would give."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.fleet.state import FleetState
from gateway.core.placing.scheduler import Admission, Demand, Refusals, Wait, place
from gateway.core.types import EngineName, GroupId, Version
from tests.support.quick import examples
from tests.unit.gateway_core.helpers import engine, fleet, session

DEMANDS = st.builds(
    lambda i, version, group, tokens, most, how: Demand(
        session(f"s{i}", group, version=version, **how), tokens, tokens_max=most
    ),
    st.integers(0, 99),
    st.sampled_from([None, None, None, 1, 2]),
    st.sampled_from(["", "", "g"]),
    st.sampled_from([10, 100, 900]),
    st.sampled_from([0, 900, 1000, 9000]),
    st.fixed_dictionaries(
        {},
        optional={
            "split": st.just("eval"),
            "train": st.just(False),
            "min_version": st.integers(0, 2),
            "max_version": st.integers(1, 2),
            "blocks_parent": st.just(True),
        },
    ),
)


def some_fleet(open_: bool, full: int) -> FleetState:
    state = fleet(
        engine("e0", 1, [100] * full, intake_open=open_), engine("e1", 2, [500], intake_open=open_), max_running=2
    )
    state.engines[EngineName("e1")].context_tokens = 950
    state.group_versions.note(GroupId("g"), Version(1))
    return state


@given(st.lists(DEMANDS, max_size=12), st.booleans(), st.integers(0, 2), st.booleans())
@examples(200)
def test_the_same_as_asking_for_each(demands: list[Demand], open_: bool, full: int, stop: bool) -> None:
    state, refusals = some_fleet(open_, full), Refusals()
    admission = Admission(5, 5, 1 if stop else None, 0)
    for demand in demands:
        asked = place(demand, state, admission)
        told = refusals.find(demand, state)
        if told is not None:
            assert isinstance(asked, Wait)
        elif isinstance(asked, Wait):
            refusals.note(demand, state, asked)


def test_one_refusal_stands_for_those_that_need_as_much_and_no_others() -> None:
    state, refusals = some_fleet(open_=False, full=0), Refusals()
    refusals.note(Demand(session("a"), 50), state, Wait("every intake is closed"))
    assert refusals.find(Demand(session("b"), 50), state) == Wait("every intake is closed")
    assert refusals.find(Demand(session("c"), 49), state) is None
    refusals.note(Demand(session("a"), 50, tokens_max=1000), state, Wait("open intakes are full"))
    assert refusals.find(Demand(session("b"), 50, tokens_max=1000), state) == Wait("open intakes are full")
    assert refusals.find(Demand(session("c"), 50, tokens_max=999), state) is None, "a smaller context holds it"
    assert refusals.find(Demand(session("d", version=1), 50), state) is None
    assert refusals.find(Demand(session("e", "g"), 50), state) is None
    assert refusals.find(Demand(session("f", split="eval"), 50), state) is None
