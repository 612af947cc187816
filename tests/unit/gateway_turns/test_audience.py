"""Readers of a turn that are given its deltas as they come: each gets all, none disturbs the turn or another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.types import SamplingParams, SessionId, TokenDelta, TurnId, TurnRecord, TurnRequest
from gateway.turns import audience as audience_module
from gateway.turns.audience import READ_TOKENS_MAX, UNREAD_TOKENS_MAX, Audience
from protos.errors import Conflict
from protos.trajectories import Segment


def turn() -> tuple[TurnRecord, Audience]:
    request = TurnRequest(TurnId("t"), SessionId("s"), 0, (1,), SamplingParams(max_tokens=10_000))
    record = TurnRecord(request)
    return record, Audience(record)


def say(record: TurnRecord, audience: Audience, tokens: int) -> None:
    record.token_ids += range(len(record.token_ids), len(record.token_ids) + tokens)
    record.logprobs += [-1.0] * tokens
    audience.show()


def segment(start: int) -> Segment:
    return Segment(
        turn=0,
        engine="e",
        incarnation="i",
        version=1,
        start=start,
        end=start,
        cause="start",
        started_unix_s=0.0,
        ended_unix_s=0.0,
        seed=0,
        sampled_with="-",
    )


def end(record: TurnRecord, audience: Audience) -> None:
    record.finish_reason = "length"
    audience.end()


@dataclass
class Client:
    """`held`: what it waits for after each delta."""

    held: asyncio.Event | None = None
    got: list[TokenDelta] = field(default_factory=list)

    def take(self, delta: TokenDelta) -> Awaitable[object] | None:
        self.got.append(delta)
        return None if self.held is None else self.held.wait()

    @property
    def ids(self) -> list[int]:
        return [token for delta in self.got for token in delta.token_ids]


@pytest.mark.parametrize("over", [True, False], ids=["ended", "running"])
async def test_others_go_on_between_the_pieces_of_a_long_record(over: bool) -> None:
    record, audience = turn()
    client, seen, all_read = Client(), set[int](), asyncio.Event()

    async def beside() -> None:
        while True:
            seen.add(len(client.ids))
            if len(client.ids) == len(record.token_ids):
                all_read.set()
            await asyncio.sleep(0)

    say(record, audience, 5 * READ_TOKENS_MAX)
    other = asyncio.create_task(beside())
    if over:
        end(record, audience)
    reading = asyncio.create_task(audience.read(client.take))
    await asyncio.wait_for(all_read.wait(), 60)
    if not over:
        end(record, audience)
    await asyncio.wait_for(reading, 60)
    other.cancel()
    assert client.ids == list(range(5 * READ_TOKENS_MAX))
    assert {READ_TOKENS_MAX * piece for piece in range(1, 5)} <= seen


@given(st.lists(st.integers(0, 5), max_size=8), st.integers(0, 8), st.booleans(), st.booleans())
async def test_a_reader_gets_every_token_whenever_it_comes(
    said: list[int], joins_at: int, slow: bool, at_end: bool
) -> None:
    record, audience = turn()
    client = Client(asyncio.Event() if slow else None)
    reading = None
    for at, tokens in enumerate(said):
        if at == joins_at:
            reading = asyncio.create_task(audience.read(client.take, at_end=at_end))
            await asyncio.sleep(0)
        say(record, audience, tokens)
    assert not (at_end and client.got)
    reading = reading or asyncio.create_task(audience.read(client.take, at_end=at_end))
    end(record, audience)
    if client.held is not None:
        client.held.set()
    await asyncio.wait_for(reading, 60)
    assert client.ids == list(range(sum(said)))
    assert [delta.finish_reason for delta in client.got] == [None] * (len(client.got) - 1) + ["length"]


async def test_each_client_leaves_for_itself() -> None:
    """While one of two that have read all of it is still being answered, the turn is no one else's to take."""
    _, audience = turn()
    audience.answering()
    audience.answering()
    audience.left()
    assert audience.attention == "read"
    audience.left()
    assert audience.attention == "unread"


async def test_a_client_is_being_answered_for_as_long_as_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audience_module, "CLAIM_S", 0.0)
    _, audience = turn()
    audience.answering()
    assert audience.attention == "read"
    audience.left()
    assert audience.attention == "unread"


async def test_each_client_that_joins_is_waited_for() -> None:
    _, audience = turn()
    audience.claim()
    audience.claim()
    audience.attach()
    audience.detach()
    assert audience.attention == "read", "the other one is about to come"
    audience.attach()
    audience.detach()
    assert audience.attention == "unread"


async def test_a_client_that_joined_and_never_came_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audience_module, "CLAIM_S", 0.0)
    _, audience = turn()
    audience.claim()
    assert audience.attention == "unread"


async def test_a_reader_that_keeps_up_has_what_was_shown_when_show_returns() -> None:
    record, audience = turn()
    client = Client()
    reading = asyncio.create_task(audience.read(client.take))
    await asyncio.sleep(0)
    for tokens in (1, 3):
        say(record, audience, tokens)
        assert client.ids == record.token_ids
    end(record, audience)
    await reading


async def test_what_a_reader_raises_is_its_own() -> None:
    record, audience = turn()
    client = Client()

    def gone(delta: TokenDelta) -> None:
        raise ConnectionResetError("the client is gone")

    leaving, reading = asyncio.create_task(audience.read(gone)), asyncio.create_task(audience.read(client.take))
    await asyncio.sleep(0)
    say(record, audience, 2)
    with pytest.raises(ConnectionResetError):
        await leaving
    end(record, audience)
    await reading
    assert client.ids == [0, 1]


async def test_a_slow_reader_holds_the_turn_back_until_it_has_read_on() -> None:
    record, audience = turn()
    slow, quick = Client(asyncio.Event()), Client()
    readings = [asyncio.create_task(audience.read(client.take)) for client in (slow, quick)]
    await asyncio.sleep(0)
    say(record, audience, 1)
    assert not audience.lags
    say(record, audience, UNREAD_TOKENS_MAX)
    assert audience.lags
    keeping_up = asyncio.create_task(audience.keep_up())
    await asyncio.sleep(0)
    assert not keeping_up.done()
    assert len(quick.ids) == 1 + UNREAD_TOKENS_MAX
    assert slow.held is not None
    slow.held.set()
    await asyncio.wait_for(keeping_up, 60)
    end(record, audience)
    await asyncio.gather(*readings)
    assert slow.ids == quick.ids == record.token_ids


async def test_a_reader_that_stops_is_waited_for_once_and_then_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audience_module, "PATIENCE_S", 0.01)
    record, audience = turn()
    slow, quick = Client(asyncio.Event()), Client()
    readings = [asyncio.create_task(audience.read(client.take)) for client in (slow, quick)]
    await asyncio.sleep(0)
    say(record, audience, 1)
    say(record, audience, UNREAD_TOKENS_MAX)
    assert audience.lags
    await asyncio.wait_for(audience.keep_up(), 60)
    assert not audience.lags
    say(record, audience, 5 * UNREAD_TOKENS_MAX)
    assert not audience.lags, "it is not waited for again"
    end(record, audience)
    assert slow.held is not None
    slow.held.set()
    await asyncio.gather(*readings)
    assert slow.ids == quick.ids == record.token_ids, "and has missed nothing"


async def test_a_reader_that_leaves_holds_nobody_back() -> None:
    record, audience = turn()
    reading = asyncio.create_task(audience.read(Client(asyncio.Event()).take))
    await asyncio.sleep(0)
    say(record, audience, 1)
    say(record, audience, UNREAD_TOKENS_MAX)
    keeping_up = asyncio.create_task(audience.keep_up())
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait_for(keeping_up, 60)


async def test_every_reader_is_told_what_ended_the_turn() -> None:
    record, audience = turn()
    clients = [Client(), Client()]
    readings = [asyncio.create_task(audience.read(client.take)) for client in clients]
    await asyncio.sleep(0)
    say(record, audience, 2)
    audience.end(Conflict("given up"))
    for reading in readings:
        with pytest.raises(Conflict):
            await reading
    assert [client.ids for client in clients] == [[0, 1], [0, 1]]


async def test_who_reads_at_the_end_holds_nobody_up_gets_a_delta_a_segment_and_is_told_of_a_failure() -> None:
    record, audience = turn()
    client = Client()
    reading = asyncio.create_task(audience.read(client.take, at_end=True))
    await asyncio.sleep(0)
    for start in (0, 2 * UNREAD_TOKENS_MAX):
        record.segments.append(segment(start))
        say(record, audience, 2 * UNREAD_TOKENS_MAX)
        assert not audience.lags
        assert client.got == []
    audience.end(Conflict("given up"))
    with pytest.raises(Conflict):
        await reading
    assert [len(delta.token_ids) for delta in client.got] == [2 * UNREAD_TOKENS_MAX] * 2
    assert [delta.segment for delta in client.got] == [0, 1]
