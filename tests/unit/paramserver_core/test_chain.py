"""The chain's order, from which relays each one fetches, and who stands for master."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from paramserver.core.chain import Place, next_plan, sources
from paramserver.core.election import RANK_DELAY_S, candidacy
from paramserver.core.records import Epoch, Member, Plan

EPOCH = Epoch("store", 5)


def plan(*order: str, number: int = 1, epoch: Epoch = EPOCH, reason: str = "") -> Plan:
    return Plan(epoch, number, order, reason)


def at(*names: str, zone: str = "", rack: str = "") -> dict[str, Place]:
    return {name: Place(zone, rack) for name in names}


def member(name: str, *, publish_host: bool = True) -> Member:
    return Member(name, f"instance-{name}", "h:1", "h:2", publish_host)


def test_the_master_leads_and_the_rest_join_by_name() -> None:
    assert next_plan(None, EPOCH, "b", at("c", "a", "b")) == plan("b", "a", "c", reason="first plan")


def test_nothing_changed_means_the_same_plan() -> None:
    before = plan("a", "b", number=4)
    assert next_plan(before, EPOCH, "a", at("a", "b")) is before


def test_places_are_kept_and_newcomers_join_at_the_tail() -> None:
    found = next_plan(plan("d", "c", "b"), EPOCH, "d", at("a", "b", "d"))
    assert found == plan("d", "b", "a", number=2, reason="left: c; joined: a")


def test_a_new_epoch_counts_its_plans_from_one() -> None:
    later = Epoch("store", 9)
    found = next_plan(plan("a", "b", "c", number=7), later, "b", at("b", "c"))
    assert found == plan("b", "c", epoch=later, reason="left: a; new master")


def test_zones_and_racks_are_neighbours_and_the_masters_come_first() -> None:
    members = {
        **at("a", "e", zone="east", rack="1"),
        **at("b", "d", zone="west", rack="1"),
        **at("c", zone="east", rack="2"),
        **at("f", zone="west", rack="2"),
    }
    first = next_plan(None, EPOCH, "d", members)
    assert first.order == ("d", "b", "f", "a", "e", "c")
    grown = next_plan(first, EPOCH, "d", {**members, **at("g", zone="west", rack="1"), **at("h", zone="east")})
    assert grown.order == ("d", "b", "g", "f", "a", "e", "c", "h")


def test_slow_relays_go_to_the_tail_and_come_back_to_their_zone() -> None:
    members = {**at("a", "b", "c", zone="east"), **at("x", "y", zone="west")}
    before = next_plan(None, EPOCH, "a", members)
    slow = next_plan(before, EPOCH, "a", members, {"b"})
    assert slow.order == ("a", "c", "x", "y", "b")
    assert slow.reason == "at the tail for their slow hops: b"
    back = next_plan(slow, EPOCH, "a", members)
    assert back.order == ("a", "c", "b", "x", "y")
    assert back.reason == "back from the tail"


def test_a_slow_master_stays_the_head() -> None:
    assert next_plan(None, EPOCH, "a", at("a", "b"), {"a"}).order == ("a", "b")


def test_upstream_is_asked_from_the_nearest_up_then_complete_holders() -> None:
    members = at("a", "b", "c", "d")
    assert sources("c", plan("a", "b", "c", "d"), set(), members) == (("b",), ("a",))
    assert sources("c", plan("a", "b", "c", "d"), {"d", "a"}, members) == (("b",), ("a",), ("d",))
    assert sources("a", plan("a", "b"), {"b"}, members) == (("b",),)


def test_the_dead_are_not_asked() -> None:
    assert sources("c", plan("a", "b", "c"), {"d"}, at("a", "c")) == (("a",),)


def test_a_late_joiner_asks_holders_then_the_chain_from_its_tail() -> None:
    assert sources("z", plan("a", "b", "c"), {"b"}, at("a", "b", "c", "z")) == (("b",), ("c",), ("a",))


def test_a_late_joiner_asks_holders_of_its_own_zone_first() -> None:
    members = {**at("a", "b", zone="east"), **at("c", "z", zone="west")}
    assert sources("z", plan("a", "b", "c"), {"a", "c"}, members) == (("c",), ("a",), ("b",))


def test_many_that_join_together_begin_with_different_holders() -> None:
    holders = [f"h{i}" for i in range(4)]
    joiners = [f"j{i}" for i in range(40)]
    members = at(*holders, *joiners)
    first = Counter(sources(me, plan(*holders), holders, members)[0][0] for me in joiners)
    assert set(first) == set(holders)
    assert max(first.values()) <= 20


@pytest.mark.parametrize("seed", range(20))
def test_no_cycle_can_form_among_those_that_are_not_complete(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"r{i}" for i in range(8)]
    rng.shuffle(names)
    order, holders = tuple(names[:6]), set(rng.sample(names, 2))
    members = {name: Place(rng.choice("ab")) for name in names}
    fetches_from = {
        me: {name for tier in sources(me, plan(*order), holders, members) for name in tier} - holders
        for me in names
        if me not in holders
    }
    ranks = {name: rank for rank, name in enumerate([*order, *names[6:]])}
    for me, whom in fetches_from.items():
        assert all(ranks[other] < ranks[me] for other in whom)


def test_candidates_are_ranked_by_host_then_by_what_they_hold() -> None:
    members = [member("a"), member("b"), member("c", publish_host=False)]
    assert [candidacy(name, members, {"b", "c"})[0] for name in "bac"] == [0.0, RANK_DELAY_S, 2 * RANK_DELAY_S]


def test_one_that_is_no_member_waits_longest() -> None:
    delay_s, reason = candidacy("x", [member("a")], set())
    assert delay_s == 2 * RANK_DELAY_S
    assert reason == "not a registered member"
