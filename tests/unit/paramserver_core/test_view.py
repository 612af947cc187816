"""The registry's keys and what a relay reads from them."""

from __future__ import annotations

import msgspec
import pytest

from paramserver.core import view as keys
from paramserver.core.records import Announced, Ended, Epoch, Holding, Manifest, Master, Member, Plan
from paramserver.core.view import HolderFact, MasterFact, MasterSeen, MemberFact, SkippedFact, VersionFact, View

MEMBER = Member("a", "instance", "h:1", "h:2")
MASTER = Master("a", "instance")
ENDED = Ended("lost", "gone")
HOLDING = Holding("m", 2e9)
STATE = [
    (keys.STORE, b"store", 1),
    (keys.member_key("a"), msgspec.json.encode(MEMBER), 2),
    (keys.wanted_key("policy"), b"", 3),
    (keys.master_key("policy"), msgspec.json.encode(MASTER), 4),
    (keys.plan_key("policy"), msgspec.json.encode(Plan(Epoch("store", 4), 1, ("a",))), 5),
    (keys.version_key("policy", 12, "ended"), msgspec.json.encode(ENDED), 6),
    (keys.holder_key("policy", 12, "a"), msgspec.json.encode(HOLDING), 7),
]


def test_the_whole_state_becomes_facts() -> None:
    view = View()
    assert view.replace(STATE) == [
        MemberFact("a", MEMBER),
        MasterFact("policy", MasterSeen(MASTER, 4)),
        VersionFact("policy", 12, ENDED),
        HolderFact("policy", 12, "a", present=True, holding=HOLDING),
    ]
    assert view.epoch("policy") == Epoch("store", 4)
    assert view.plans["policy"].order == ("a",)
    assert view.models == {"policy"}


def test_the_same_state_again_is_no_news() -> None:
    view = View()
    view.replace(STATE)
    assert view.replace(STATE) == []


def test_what_is_missing_from_a_new_state_was_removed() -> None:
    view = View()
    view.replace(STATE)
    assert view.replace(STATE[:1]) == [
        HolderFact("policy", 12, "a", present=False),
        MemberFact("a", None),
        MasterFact("policy", None),
    ]
    assert view.epoch("policy") is None
    assert view.models == {"policy"}


def test_a_new_election_is_news_though_the_same_relay_won_it() -> None:
    view = View()
    view.replace(STATE)
    assert view.put(keys.master_key("policy"), msgspec.json.encode(MASTER), 9) == [
        MasterFact("policy", MasterSeen(MASTER, 9))
    ]
    assert view.epoch("policy") == Epoch("store", 9)


def test_numbers_that_were_skipped_stay_skipped_when_who_skipped_them_is_gone() -> None:
    view = View()
    assert view.put(keys.skipped_key("policy", "a"), b"1012", 8) == [SkippedFact("policy", 1012)]
    assert view.models == {"policy"}
    assert view.remove(keys.skipped_key("policy", "a")) == []


def test_removing_what_was_never_there_is_no_news() -> None:
    assert View().remove(keys.member_key("a")) == []


def test_keys_that_others_put_below_ours_are_left_alone() -> None:
    assert View().put(keys.ROOT + "notes", b"hello", 1) == []


DEEP = b"[" * 100_000
ANNOUNCED = msgspec.json.encode(
    Announced(Manifest("policy", 12, "r", 1, Epoch("store", 4), ()), Plan(Epoch("store", 4), 1, ("a",)))
)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (keys.member_key("x"), b"not json"),
        (keys.member_key("x"), DEEP),
        (keys.member_key("x"), msgspec.json.encode(MEMBER)),  # of another name: its end would leave this one's
        (keys.ROOT + "holders/policy", b""),
        (keys.ROOT + "holders/policy/twelve/a", b""),
        (keys.ROOT + "holders/policy/1/a/b", b""),
        (keys.ROOT + "spilled/policy/\u0664/x/y", b""),
        (keys.pin_key("policy", 1, "lease"), b"{}"),
        (keys.master_key("policy"), b"\xff\xfe"),
        (keys.plan_key("policy"), b"null"),
        (keys.ROOT + "models/policy/skipped/a", b"many"),
        (keys.ROOT + "models//wanted", b""),
        (keys.version_key("policy", 13, "announced"), ANNOUNCED),  # of another version than its key
        (keys.version_key("policy", 12, "announced"), ANNOUNCED.replace(b'"chunk_bytes":1048576', b'"chunk_bytes":0')),
        (keys.STORE, b"\xff"),
    ],
)
def test_a_key_that_cannot_be_read_costs_itself_alone(key: str, value: bytes) -> None:
    """A relay that ended for it would end again whenever it was started."""
    view = View()
    view.replace(STATE)
    before = (dict(view.members), dict(view.masters), dict(view.plans), set(view.models), dict(view.pins))
    assert view.put(key, value, 50) == []
    assert list(view.unreadable) == [key]
    assert before == (view.members, view.masters, view.plans, view.models, view.pins)
    assert view.put(keys.holder_key("policy", 13, "a"), b"", 51) != [], "others are read as before"
    view.remove(key)
    assert not view.unreadable
    again = View()
    facts = again.replace([(key, value, 1), *STATE])
    assert VersionFact("policy", 12, ENDED) in facts
    assert MemberFact("a", MEMBER) in facts
