"""Sockets read in batches: nothing is left unread, few events wait for nobody, and a look leaves others their turn."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import pytest

from gateway.engines import sockets
from gateway.engines.sockets import SHARE_S, Sockets, of
from tests.support.scripted_engine import until


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Stream:
    """One end is read by the sockets under test, the other one is written to."""

    def __init__(self, read_by: Sockets, name: str, seen: list[str]) -> None:
        self._sockets, self._name, self._seen = read_by, name, seen
        self.here, self.there = socket.socketpair()
        self.here.setblocking(False)
        read_by.add(self.here.fileno(), self.read)

    def read(self) -> None:
        self._seen.append(f"{self._name}{self.here.recv(100).decode()}")

    def close(self) -> None:
        self._sockets.remove(self.here.fileno())
        self.here.close()
        self.there.close()


@contextlib.contextmanager
def streams(read_by: Sockets, seen: list[str], names: str) -> Iterator[list[Stream]]:
    found = [Stream(read_by, name, seen) for name in names]
    try:
        yield found
    finally:
        for one in found:
            one.close()


@pytest.mark.parametrize("few", [1, 100])
async def test_all_that_comes_is_read_in_order_whether_looks_rest_or_not(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "STREAMS_FEW", few)
    seen: list[str] = []
    with streams(Sockets(asyncio.get_running_loop()), seen, "abc") as found:
        for at in range(20):
            for one in found:
                one.there.send(b"%d" % (at % 10))
            await asyncio.sleep(0)
        for name in "abc":
            await until(
                lambda name=name: sum(len(said) - 1 for said in seen if said[0] == name) == 20,  # type: ignore[misc]
                f"all of {name}",
            )
    for name in "abc":
        assert "".join(said[1:] for said in seen if said[0] == name) == "01234567890123456789"


async def test_rare_events_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "STREAMS_FEW", 1)
    clock, seen = Clock(), list[str]()
    with streams(Sockets(asyncio.get_running_loop(), clock), seen, "a") as [one]:
        for at in range(10):
            clock.now += sockets.REST_MAX_S
            one.there.send(b"!")
            await until(lambda at=at: len(seen) == at + 1, "the event")  # type: ignore[misc]
            assert one._sockets._resting is None


@pytest.mark.parametrize(("few", "rests"), [(5, False), (4, True)])
async def test_many_events_of_many_streams_are_read_together_after_a_rest(
    few: int, rests: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "STREAMS_FEW", few)
    clock, seen = Clock(), list[str]()
    with streams(Sockets(asyncio.get_running_loop(), clock), seen, "abcd") as found:
        for at in range(20):
            clock.now += sockets.REST_MIN_S
            for one in found:
                one.there.send(b"!")
            await until(lambda at=at: len(seen) >= 4 * (at + 1), "all of them")  # type: ignore[misc]
        assert (found[0]._sockets._resting is not None) == rests
        if rests:
            del seen[:]
            for one in found:
                one.there.send(b"2")
            await until(lambda: len(seen) >= 4, "what came in the rest")
            assert sorted(seen) == ["a2", "b2", "c2", "d2"]
        for at in range(50):
            clock.now += sockets.REST_MAX_S
            found[2].there.send(b"3")
            await until(lambda at=at: seen.count("c3") == at + 1, "the next one")  # type: ignore[misc]
        assert found[0]._sockets._resting is None, "they have become rare: the loop watches again"


async def test_what_is_over_a_looks_share_is_read_in_later_rounds_and_others_run_in_between() -> None:
    clock, done = Clock(), list[str]()
    with streams(Sockets(asyncio.get_running_loop(), clock), done, "abcdef") as found:
        for one in found:
            one.there.send(b"!")
        for fd, read in list(found[0]._sockets._reads.items()):

            def slow(read: object = read) -> None:
                clock.now += 0.6 * SHARE_S  # two of them are a look's share
                read()  # type: ignore[operator]

            found[0]._sockets._reads[fd] = slow
        async with asyncio.timeout(60):
            while len(done) - done.count("round") < len(found):
                await asyncio.sleep(0)
                done.append("round")
    runs = "".join("-" if said == "round" else "x" for said in done)
    assert "xxx" not in runs, f"{runs}: no more than a share of it in one round"


async def test_what_one_raises_costs_the_others_nothing() -> None:
    seen, raised = list[str](), list[object]()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: raised.append(context["exception"]))
    with streams(Sockets(loop), seen, "ab") as [one, other]:

        def fail() -> None:
            one.here.recv(100)
            raise RuntimeError("nobody foresaw this")

        one._sockets._reads[one.here.fileno()] = fail
        for _ in range(2):
            one.there.send(b"0")
            other.there.send(b"1")
        await until(lambda: "".join(seen).count("1") == 2, "the other's")
        await until(lambda: bool(raised), "the error, told")
    assert all(isinstance(error, RuntimeError) for error in raised)


@pytest.mark.parametrize("closed", ["before", "within"])
async def test_a_socket_that_was_given_up_is_not_read(closed: str) -> None:
    seen: list[str] = []
    read_by = Sockets(asyncio.get_running_loop())
    with streams(read_by, seen, "ab") as [one, other]:
        gone = Stream(read_by, "c", seen)

        def give_up_too() -> None:
            one.read()
            gone.close()

        if closed == "within":  # by the read of another one, in the same look
            read_by._reads[one.here.fileno()] = give_up_too
        one.there.send(b"0")
        if closed == "before":
            gone.close()
        other.there.send(b"0")
        await until(lambda: {"a0", "b0"} <= set(seen), "the others'")
        if closed == "within":
            assert gone.here.fileno() < 0
    assert not [said for said in seen if said.startswith("c")]


async def test_a_loop_has_one() -> None:
    loop = asyncio.get_running_loop()
    assert of(loop) is of(loop)
    assert of(loop).loop is loop
