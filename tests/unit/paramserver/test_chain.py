"""The chain's order, whom each relay asks, and who stands for master."""

from __future__ import annotations

import random

import pytest

from paramserver.core.chain import next_plan, sources
from paramserver.core.election import RANK_DELAY_S, candidacy
from paramserver.core.records import Epoch, Member, Plan

EPOCH = Epoch("store", 5)


def plan(*order: str, number: int = 1, epoch: Epoch = EPOCH) -> Plan:
    return Plan(epoch, number, order)


def member(name: str, *, publish_host: bool = True) -> Member:
    return Member(name, f"instance-{name}", "h:1", "h:2", publish_host)


def test_the_master_leads_and_the_rest_join_by_name() -> None:
    assert next_plan(None, EPOCH, "b", {"c", "a", "b"}) == (plan("b", "a", "c"), "first plan")


def test_nothing_changed_means_the_same_plan() -> None:
    assert next_plan(plan("a", "b"), EPOCH, "a", {"a", "b"}) == (plan("a", "b"), "")


def test_places_are_kept_and_newcomers_join_at_the_tail() -> None:
    found, reason = next_plan(plan("d", "c", "b"), EPOCH, "d", {"a", "b", "d"})
    assert found == plan("d", "b", "a", number=2)
    assert reason == "left: c; joined: a"


def test_a_new_epoch_counts_its_plans_from_one() -> None:
    later = Epoch("store", 9)
    found, reason = next_plan(plan("a", "b", "c", number=7), later, "b", {"b", "c"})
    assert found == plan("b", "c", epoch=later)
    assert reason == "left: a; new master"


def test_upstream_is_asked_from_the_nearest_up_then_complete_holders() -> None:
    assert sources("c", plan("a", "b", "c", "d"), set()) == ("b", "a")
    assert sources("c", plan("a", "b", "c", "d"), {"d", "a"}) == ("b", "a", "d")
    assert sources("a", plan("a", "b"), {"b"}) == ("b",)


def test_a_late_joiner_asks_holders_then_the_chain_from_its_tail() -> None:
    assert sources("z", plan("a", "b", "c"), {"b"}) == ("b", "c", "a")


@pytest.mark.parametrize("seed", range(20))
def test_no_cycle_can_form_among_those_that_are_not_complete(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"r{i}" for i in range(8)]
    rng.shuffle(names)
    order, holders = tuple(names[:6]), set(rng.sample(names, 2))
    asks = {me: set(sources(me, plan(*order), holders)) - holders for me in names if me not in holders}
    ranks = {name: rank for rank, name in enumerate([*order, *names[6:]])}
    for me, whom in asks.items():
        assert all(ranks[other] < ranks[me] for other in whom)


def test_candidates_are_ranked_by_host_then_by_what_they_hold() -> None:
    members = [member("a"), member("b"), member("c", publish_host=False)]
    assert [candidacy(name, members, {"b", "c"})[0] for name in "bac"] == [0.0, RANK_DELAY_S, 2 * RANK_DELAY_S]


def test_one_that_is_no_member_waits_longest() -> None:
    delay_s, reason = candidacy("x", [member("a")], set())
    assert delay_s == 2 * RANK_DELAY_S
    assert reason == "not a registered member"
