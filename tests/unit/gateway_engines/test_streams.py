"""Events into chunks: merged as they came together, every token once, and nothing after the finish."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.types import TopLogprob
from gateway.engines.base import EngineChunk, StreamCut
from gateway.engines.connections import Take
from gateway.engines.streams import EventChunks, merged

LENGTH = EngineChunk((), (), finish_reason="length")


@dataclass
class Said:
    """Events as reads bring them."""

    reads: list[list[bytes]]
    over: bool = False

    async def deliver(self, take: Take) -> None:
        for events in self.reads:
            if not self.over:
                take(events)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for data in (event for events in self.reads for event in events):
            yield data

    def complete(self) -> None:
        self.over = True


class Reader:
    def chunk(self, data: bytes) -> EngineChunk | None:
        if data == b"bad":
            raise StreamCut("protocol", "a bad event")
        return None if data == b"usage" else msgspec.msgpack.decode(data, type=_Event).chunk()


class _Event(msgspec.Struct):
    token_ids: list[int]
    version: str = ""
    finish: bool = False

    def chunk(self) -> EngineChunk:
        ids = tuple(self.token_ids)
        versions = (self.version,) if self.version else ()
        return EngineChunk(ids, tuple(-i / 8 for i in ids), None, "length" if self.finish else None, versions)


def event(*token_ids: int, version: str = "", finish: bool = False) -> bytes:
    return msgspec.msgpack.encode(_Event(list(token_ids), version, finish))


async def deliver(*reads: list[bytes]) -> list[EngineChunk]:
    chunks: list[EngineChunk] = []
    await EventChunks(Said(list(reads)), Reader(), "http://engine").deliver(chunks.append)
    return chunks


@given(st.lists(st.lists(st.lists(st.integers(0, 99), max_size=3), max_size=4), max_size=6))
async def test_every_token_comes_once_however_reads_cut_the_stream(reads: list[list[list[int]]]) -> None:
    said = [[event(*token_ids) for token_ids in events] for events in reads]
    chunks = await deliver(*said, [event(7, finish=True), b"bad"])
    ids = [token for events in reads for token_ids in events for token in token_ids]
    assert [token for chunk in chunks for token in chunk.token_ids] == [*ids, 7]
    assert [p for chunk in chunks for p in chunk.logprobs] == [-i / 8 for i in (*ids, 7)]
    assert len(chunks) == 1 + sum(1 for events in reads if events)
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


async def test_versions_are_not_mixed_in_a_chunk() -> None:
    [first, second] = await deliver([event(1), event(2), b"usage", event(3, version="4", finish=True)])
    assert (first.token_ids, first.versions) == ((1, 2), ())
    assert (second.token_ids, second.versions) == ((3,), ("4",))


async def test_what_came_before_an_error_is_handed_over_before_it() -> None:
    chunks: list[EngineChunk] = []
    with pytest.raises(StreamCut, match="bad event"):
        await EventChunks(Said([[event(1), event(2), b"bad", event(3)]]), Reader(), "u").deliver(chunks.append)
    assert [chunk.token_ids for chunk in chunks] == [(1, 2)]


async def test_an_end_without_a_finish_is_a_cut_either_way() -> None:
    with pytest.raises(StreamCut) as cut:
        await deliver([event(1)])
    assert cut.value.reason == "early_end"
    with pytest.raises(StreamCut):
        assert [c.token_ids async for c in EventChunks(Said([[event(1)]]), Reader(), "u")] == [(1,)]


def test_alternatives_are_told_of_every_token_or_of_none() -> None:
    tops = ((TopLogprob(5, -1.0),),)
    some = merged(EngineChunk((1, 2), (-1.0, -2.0)), EngineChunk((3,), (-3.0,), tops, "stop"))
    assert (some.top_logprobs, some.finish_reason) == (((), (), *tops), "stop")
    assert merged(EngineChunk((1,), (-1.0,)), LENGTH).top_logprobs is None
