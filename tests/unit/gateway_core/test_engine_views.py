"""What the planner sees of engines: what their sessions weigh, alone and together."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.fleet.state import TurnLoad
from gateway.core.packing.engine_views import NOTHING, SessionLoad, engine_views, steady, weigh
from gateway.core.packing.lengths import SEEN_MIN, TurnLengths
from gateway.core.types import EngineName, SessionId, TurnId
from tests.support.quick import examples
from tests.unit.gateway_core.helpers import engine, fleet

TURN = st.builds(
    lambda tokens, left, generated, **more: TurnLoad(
        TurnId("t"), SessionId("s"), tokens, tokens + left, generated=min(tokens, generated), **more
    ),
    st.integers(1, 9000),
    st.integers(0, 9000),
    st.integers(0, 9000),
    moves=st.integers(0, 4),
    expected_tokens=st.just(0) | st.integers(1, 9000),
    ends_session=st.booleans(),
    in_place=st.booleans(),
    relayed=st.booleans(),
)


def learnt(num: int) -> TurnLengths:
    known = TurnLengths()
    for i in range(num):
        known.ended(100 + 7 * i)
    return known


@given(st.lists(st.lists(TURN, max_size=4), min_size=1, max_size=6), st.sampled_from([0, SEEN_MIN]))
@examples(200)
def test_an_engine_weighs_what_its_sessions_weigh(engines: list[list[TurnLoad]], ended: int) -> None:
    nums = np.array([len(turns) for turns in engines])
    loads = [turn for turns in engines for turn in turns]
    each_s = np.repeat([0.1 * (1 + i) for i in range(len(engines))], nums)
    turns = weigh(loads, lengths=learnt(ended), each_s=each_s, back_s=3.0, context=6000)
    begins = np.cumsum(nums) - nums
    each = [NOTHING.plus(turns.sessions(begin, begin + num)) for begin, num in zip(begins, nums, strict=True)]
    assert turns.weights(nums) == each


def weighed(**fields: Any) -> SessionLoad:
    turn = TurnLoad(TurnId("t"), SessionId("s"), 100, 300, **fields)
    [load] = weigh([turn], lengths=TurnLengths(), each_s=np.full(1, 0.1), back_s=7.0, context=0).sessions()
    return load


def test_what_is_forwarded_as_text_stays_and_is_not_known_to_grow() -> None:
    load = weighed(relayed=True)
    assert (load.kv_at, load.remaining_s, load.stays) == ([*steady(100)], 0.0, True)
    assert weighed().kv_at > load.kv_at
    assert not weighed().stays


def test_a_turn_that_may_outgrow_an_engine_of_its_version_stays() -> None:
    turn = TurnLoad(TurnId("t"), SessionId("s"), 100, 300)
    contexts = {0: False, 299: True, 300: False}
    for context, stays in contexts.items():
        [load] = weigh([turn], lengths=TurnLengths(), each_s=np.zeros(1), back_s=0.0, context=context).sessions()
        assert load.stays is stays


def test_sessions_that_wait_for_a_tool_weigh_on_their_engine_and_run_no_turn() -> None:
    engines = [engine("e0", turns=[10, 20]), engine("e1"), engine("e2")]
    idle = SessionLoad(SessionId("s"), None, steady(500), 9.0, moves=2)
    names: dict[str, Any] = {"waiting": {EngineName("e1"): [idle]}, "inbound": {EngineName("e2"): [idle]}}
    e0, e1, e2 = engine_views(engines, fleet(*engines), TurnLengths(), **names, back_s=9.0, context=0)
    assert (e0.weight.num_turns, e0.weight.num, e0.weight.tokens) == (2, 2, 30)
    assert [load.turn_id for load in e0.list_sessions()] == ["e0-0", "e0-1"]
    assert (e1.weight.num_turns, e1.weight.num, e1.weight.kv_at) == (0, 1, [*steady(500)])
    assert (e1.weight.remaining_s, e1.weight.moves, e1.list_sessions()) == (9.0, 2, [idle])
    assert (e2.weight, e2.inbound) == (NOTHING, [idle]), "what is on its way weighs where the plan puts it"
