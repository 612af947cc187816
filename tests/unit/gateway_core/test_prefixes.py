"""Which engine holds a prompt's beginning, and when a new turn goes there for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.fleet import prefixes
from gateway.core.fleet.prefixes import BLOCK_TOKENS, TOKENS_MAX, Holding, PrefixIndex, chain
from gateway.core.fleet.state import FleetState
from gateway.core.placing.scheduler import LEAD_MAX, Admission, Demand, Placement, place
from gateway.core.types import EngineName, Version
from tests.unit.gateway_core.helpers import admit, engine, fleet, session

FREE = Admission(running=0, buffered=0, reader_batch=None, staleness_max=0)
E0, E1 = EngineName("e0"), EngineName("e1")
HERE: Holding = ("i", Version(1))
IDS = st.lists(st.integers(0, 3), max_size=6 * BLOCK_TOKENS)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Whole blocks that two prompts begin with alike, in tokens."""
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return same // BLOCK_TOKENS * BLOCK_TOKENS


# -- the index


@given(st.lists(st.tuples(st.sampled_from([E0, E1]), IDS), max_size=6), IDS)
def test_an_engine_holds_the_longest_beginning_that_it_was_sent(
    sent: list[tuple[EngineName, list[int]]], prompt: list[int]
) -> None:
    index = PrefixIndex()
    for name, ids in sent:
        index.sent(chain(ids), name, HERE)
    for name in (E0, E1):
        held = max((common(ids, prompt) for to, ids in sent if to == name), default=0)
        assert index.held(chain(prompt), name, HERE) == held
        for tokens in range(0, len(prompt), BLOCK_TOKENS):
            assert (name in index.holders(chain(prompt), tokens)) is (held > tokens)


@pytest.mark.parametrize("now", [("another", Version(1)), ("i", Version(2))])
def test_what_was_sent_before_a_restart_or_a_load_is_held_no_more(now: Holding) -> None:
    index, blocks = PrefixIndex(), chain(range(64))
    index.sent(blocks, E0, HERE)
    assert index.held(blocks, E0, now) == 0
    index.sent(blocks[:2], E0, now)
    assert index.held(blocks, E0, now) == 2 * BLOCK_TOKENS


def test_it_is_bounded_and_forgets_ends_before_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "BLOCKS_MAX", 6)
    index, first, second = PrefixIndex(), chain(range(64)), chain(range(100, 164))
    index.sent(first, E0, HERE)
    index.sent(second, E0, HERE)
    assert len(index) == 6
    assert index.held(first, E0, HERE) == 2 * BLOCK_TOKENS
    assert index.held(second, E0, HERE) == 4 * BLOCK_TOKENS


def test_no_more_than_the_beginning_of_a_long_prompt_is_looked_at() -> None:
    assert len(chain(range(TOKENS_MAX + 1000))) == TOKENS_MAX // BLOCK_TOKENS
    assert chain(range(BLOCK_TOKENS - 1)) == ()


# -- placement


def asked(name: str, prompt: Sequence[int]) -> Demand:
    return Demand(session(name), len(prompt), prefix=chain(prompt))


def placed(demand: Demand, state: FleetState) -> Placement:
    outcome = place(demand, state, FREE)
    assert isinstance(outcome, Placement)
    admit(outcome, demand, state)
    return outcome


def two(loads: Sequence[int] = (0, 0), **config: Any) -> FleetState:
    """Two engines with so many turns of one token."""
    return fleet(*(engine(f"e{i}", 1, [1] * n, intake_open=True) for i, n in enumerate(loads)), **config)


PROMPT = list(range(640))


def test_siblings_go_where_their_prompt_is_and_say_why() -> None:
    state = two((1, 0))
    assert placed(asked("a", PROMPT), state).engine == E1
    state.engines[E1].turns |= engine("x", 1, [1] * 2).turns
    second = placed(asked("b", PROMPT), state)
    assert second == Placement(E1, "holds 640 tokens of its prompt, with 1 turns more than e0")
    assert placed(asked("c", PROMPT[::-1]), state).engine == E0, "another prompt goes by load"


def test_a_prefix_that_all_hold_leaves_it_to_load() -> None:
    state = two((1, 0))
    for name in (E0, E1):
        state.prefixes.sent(chain(PROMPT), name, state.engines[name].holding)
    assert placed(asked("a", PROMPT), state).reason == "least loaded of 2"


@pytest.mark.parametrize(
    ("turns", "rate", "tokens", "batch", "goes_there"),
    [
        (2, 1000.0, 256.0, 64, True),
        (3, 1000.0, 256.0, 64, False),  # 0.64 s of prefill against 3 * 256 / 15 / 64 = 0.8 s of slower decoding
        (3, 500.0, 256.0, 64, True),  # prefill is dearer
        (3, 1000.0, 128.0, 64, True),  # answers are shorter
        (3, 1000.0, 256.0, 128, True),  # the engine bears more
    ],
)
def test_the_prefix_is_weighed_against_the_larger_batch(
    turns: int, rate: float, tokens: float, batch: int, goes_there: bool
) -> None:
    state = two((turns, 0), max_running=batch)
    state.prefill_tokens_per_s, state.turn_tokens = rate, tokens
    state.prefixes.sent(chain(PROMPT), E0, state.engines[E0].holding)
    assert (placed(asked("a", PROMPT), state).engine == E0) is goes_there


@pytest.mark.parametrize(("expected", "goes_there"), [(None, False), (128, True), (1, True), (2**53 - 1, False)])
def test_what_a_client_expects_to_be_decoded_counts_before_what_is_typical(
    expected: int | None, goes_there: bool
) -> None:
    state = two((3, 0))
    state.prefill_tokens_per_s, state.turn_tokens = 1000.0, 256.0
    state.prefixes.sent(chain(PROMPT), E0, state.engines[E0].holding)
    of = session("a", expected_output_tokens=expected)
    assert (placed(Demand(of, len(PROMPT), prefix=chain(PROMPT)), state).engine == E0) is goes_there


def test_its_holder_without_room_is_passed_over() -> None:
    state = two((4, 0), max_running=4)
    state.prefixes.sent(chain(PROMPT), E0, state.engines[E0].holding)
    assert placed(asked("a", PROMPT), state).engine == E1


def test_what_an_engine_learnt_of_its_batches_counts() -> None:
    """A flat curve: batches cost nothing, and only the bound on the lead is left."""
    state = two((16, 0), max_running=64)
    state.prefixes.sent(chain(PROMPT), E0, state.engines[E0].holding)
    for batch in (1, 16):
        state.engines[E0].curve.observe(batch, 1000, 10.0)
    assert placed(asked("a", PROMPT), state).engine == E0
    state.engines[E0].turns |= engine("x", 1, [1]).turns
    assert placed(asked("b", PROMPT), state).engine == E1, "a lead of a quarter of B, and no more"


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12)), min_size=1, max_size=80),
    st.sampled_from([1.0, 1e3, 1e9]),
    st.integers(2, 4),
)
def test_the_lead_for_a_prefix_is_bounded_whatever_prefill_costs(
    arrivals: list[tuple[int, int]], cost: float, num: int
) -> None:
    """Prompts of three families of several lengths, none of which ever ends."""
    state = fleet(*(engine(f"e{i}", 1, intake_open=True, kv_capacity_tokens=0) for i in range(num)), max_running=32)
    state.prefill_tokens_per_s = 1e3 / cost
    for number, (family, blocks) in enumerate(arrivals):
        prompt = [family] * (blocks * BLOCK_TOKENS)
        before = loads(state)
        where = placed(asked(f"s{number}", prompt), state).engine
        assert before[where] <= min(before.values()) + LEAD_MAX * 32
        state.engines[where].turns |= engine(f"t{number}", 1, [1]).turns
    assert sum(loads(state).values()) == len(arrivals)


def loads(state: FleetState) -> Mapping[EngineName, int]:
    return {name: len(e.turns) for name, e in state.engines.items()}


def test_a_sessions_own_engine_comes_before_another_holder() -> None:
    state = two((0, 3))
    known = session(version=1, on="e1")
    assert place(Demand(known, 640, prefix=chain(PROMPT)), state, FREE) == Placement(E1, "holds its prefix")
