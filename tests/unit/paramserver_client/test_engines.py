"""Engines beside relays: how they are named on the command line, registered, and seen by who follows them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from paramserver.client import RegisteredEngine, watch_engines
from paramserver.client.engines import EngineView
from paramserver.config import EngineBeside, RelayConfig
from paramserver.core import view as keys
from paramserver.core.records import Member
from paramserver.membership import MemoryRegistry, MemoryStore
from paramserver.membership.registry import Changed, Entry, Put, Removed, State
from paramserver.relay.member_lease import MemberLease
from protos.errors import InvalidRequest, UnsupportedField


def engine(name: str, url: str = "http://h:1") -> RegisteredEngine:
    return RegisteredEngine(name, "vllm", url, "h:7070")


def entry(one: RegisteredEngine) -> Entry:
    return Entry(keys.engine_key(one.name), msgspec.json.encode(one), 1)


# -- words


def test_an_engine_is_named_after_its_relay_and_port() -> None:
    beside = EngineBeside.parse("sglang=http://engines-0:30000/")
    assert beside == EngineBeside("sglang", "http://engines-0:30000")
    assert beside.name("engines-0") == "engines-0:30000"
    assert EngineBeside.parse("vllm=https://h").name("r") == "r:443"


@pytest.mark.parametrize(
    "text", ["", "vllm", "vllm=", "=http://h:1", "vllm=h:1", "vllm=ftp://h", "vllm=http://h:99999"]
)
def test_what_is_no_engine_is_told_the_form(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not KIND=URL") as error:
        EngineBeside.parse(text)
    assert error.value.hint == "such as vllm=http://127.0.0.1:8000@8443"


def test_an_unknown_kind_is_told_the_known_ones() -> None:
    with pytest.raises(UnsupportedField, match="no adapter for 'tgi'") as error:
        EngineBeside.parse("tgi=http://h:1")
    assert error.value.hint == "known kinds: vllm, sglang, embedded"


def test_two_engines_of_one_port_cannot_be_told_apart() -> None:
    beside = (EngineBeside("vllm", "http://a:1"), EngineBeside("vllm", "http://b:1"))
    with pytest.raises(InvalidRequest, match="named alike: r:1, r:1"):
        RelayConfig("r", "etcd:1", engines=beside, pool_dir=Path("/dev/shm/x"))


# -- the view


def test_engines_come_change_and_go() -> None:
    view = EngineView()
    assert view.take(State((entry(engine("a")), entry(engine("b"))), 1), "s") == {"a": engine("a"), "b": engine("b")}
    moved = engine("a", "http://h:2")
    assert view.take(Changed(entry(moved), 2), "") == {"a": moved, "b": engine("b")}
    assert view.take(Removed(keys.engine_key("a"), 2), "") == {"b": engine("b")}
    assert view.take(State((), 5), "s") == {}


def test_a_replaced_store_takes_nobody_away_until_a_name_is_registered_there() -> None:
    view = EngineView()
    view.take(State((), 1), "")  # not even a relay is there yet
    view.take(State((entry(engine("a")), entry(engine("b"))), 1), "first")
    assert set(view.take(State((), 1), "second")) == {"a", "b"}
    assert view.take(Changed(entry(engine("a", "http://h:2")), 2), "")["a"].url == "http://h:2"
    assert set(view.take(Removed(keys.engine_key("a"), 2), "")) == {"b"}


def test_what_nobody_can_read_is_left_out() -> None:
    view = EngineView()
    strange = Entry(keys.engine_key("x"), b'{"name": 3}', 1)
    assert view.take(State((strange, entry(engine("a"))), 1), "s") == {"a": engine("a")}


async def test_an_engine_is_there_as_long_as_its_relays_lease() -> None:
    now = 0.0
    store = MemoryStore(lambda: now)
    lease = MemberLease(MemoryRegistry(store), Member("r", "i", "h:7070", "h:7071"), ttl_s=5.0)
    await lease.take()
    lease.holdings.register([engine("r:1")])
    follower = watch_engines(MemoryRegistry(store))
    assert await anext(follower) == {}

    telling = asyncio.create_task(lease.holdings.run())
    try:
        assert await anext(follower) == {"r:1": engine("r:1")}
        now = 6.0
        await MemoryRegistry(store).transact([], [Put("/other", b"")])  # the store looks at its clock
        assert await anext(follower) == {}
    finally:
        telling.cancel()
        await follower.aclose()  # type: ignore[attr-defined]
