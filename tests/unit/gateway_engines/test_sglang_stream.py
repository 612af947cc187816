"""SGLang's events into chunks: however they are cut up, every token comes once; whatever does not fit is a cut."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.types import TopLogprob
from gateway.engines.base import EngineChunk, RequestRefused, StreamCut
from gateway.engines.connections import Take
from gateway.engines.sglang_stream import Reader
from gateway.engines.streams import EventChunks

IDS = list(range(100, 120))
Event = dict[str, Any]


def event(start: int, end: int, finish: Event | None = None, **meta: Any) -> Event:
    """Tokens `start` to `end` of IDS, at `end` so far."""
    return {
        "text": "",
        "output_ids": IDS[start:end],
        "meta_info": {
            "id": "r",
            "finish_reason": finish,
            "completion_tokens": end,
            "output_token_logprobs": [[-i / 8, i, None] for i in IDS[start:end]],
            **meta,
        },
    }


@dataclass
class Said:
    """A stream's events, each read by itself."""

    events: list[bytes]
    over: bool = False

    async def deliver(self, take: Take) -> None:
        for data in self.events:
            if not self.over:
                take([data])

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for data in self.events:
            yield data

    def complete(self) -> None:
        self.over = True


async def read(*events: Event | bytes, top: int = 0) -> tuple[list[EngineChunk], Exception | None]:
    """The chunks, and how the stream ended."""

    chunks: list[EngineChunk] = []
    said = Said([one if isinstance(one, bytes) else json.dumps(one).encode() for one in events])
    try:
        await EventChunks(said, Reader("http://engine", top), "http://engine").deliver(chunks.append)
    except (StreamCut, RequestRefused) as e:
        return chunks, e
    return chunks, None


def ids(chunks: list[EngineChunk]) -> list[int]:
    return [i for chunk in chunks for i in chunk.token_ids]


@given(ends=st.lists(st.integers(1, len(IDS)), min_size=1), cumulative=st.lists(st.booleans(), min_size=40))
async def test_every_token_comes_once_however_it_is_streamed(ends: list[int], cumulative: list[bool]) -> None:
    """Also when a server changes from one form to the other, and when an event brings nothing new."""
    ends = sorted(ends)
    starts = [0, *ends[:-1]]
    events = [event(0 if whole else a, b) for a, b, whole in zip(starts, ends, cumulative, strict=False)]
    events[-1]["meta_info"]["finish_reason"] = {"type": "length", "length": ends[-1]}
    chunks, error = await read(*events)
    assert error is None
    assert ids(chunks) == IDS[: ends[-1]]
    assert [p for c in chunks for p in c.logprobs] == [-i / 8 for i in IDS[: ends[-1]]]
    assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]


async def test_alternatives_and_versions() -> None:
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    tops = [[[-1.0, 5, None], [-2.0, 6, None]], None]
    stop = {"type": "stop", "matched": 101}
    chunks, error = await read(
        event(0, 1, weight_version="3"),
        event(1, 2, stop, weight_version="4", weight_versions=spans, output_top_logprobs=tops),
        top=2,
    )
    assert error is None
    assert [(c.versions, c.finish_reason) for c in chunks] == [(("3",), None), (("3", "4"), "stop")]
    assert [c.top_logprobs for c in chunks] == [None, ((),)]
    chunks, _ = await read(event(0, 1, stop, output_top_logprobs=tops[:1]), top=2)
    assert chunks[0].top_logprobs == ((TopLogprob(5, -1.0), TopLogprob(6, -2.0)),)


ABORT = {"type": "abort", "message": "Aborted"}
BAD = {"type": "abort", "message": "too long", "status_code": 400}


@pytest.mark.parametrize(
    ("events", "told", "error"),
    [
        ([], [], "early_end"),
        ([event(0, 2)], IDS[:2], "early_end"),
        ([event(0, 2), event(0, 3, ABORT)], IDS[:3], "abort"),
        ([event(0, 2), event(2, 3, ABORT)], IDS[:3], "abort"),
        ([event(0, 2), event(0, 2, ABORT)], IDS[:2], "abort"),
        ([event(0, 5), event(1, 2)], IDS[:5], "protocol"),
        ([event(0, 5), event(0, 2)], IDS[:5], "protocol"),
        ([event(0, 5), event(3, 7)], IDS[:5], "protocol"),
        ([event(0, 2), b"{"], IDS[:2], "protocol"),
        ([event(0, 2), b'{"x": "\xff"}'], IDS[:2], "protocol"),
        ([b"{}"], [], "protocol"),
        ([event(0, 1, output_token_logprobs=[[None, 100, None]])], [], "protocol"),
        ([b'{"error": {"message": "died"}}'], [], "server_error"),
        ([b'{"error": {"message": "wrong", "code": 400}}'], [], "refused"),
        ([event(0, 0, BAD)], [], "refused"),
        ([event(0, 1, BAD, output_token_logprobs=[])], [], "refused"),
        ([event(0, 2), event(2, 3, BAD, output_token_logprobs=[])], IDS[:2], "refused"),
        ([event(0, 1, {**BAD, "status_code": 503}, output_token_logprobs=[])], [], "no_room"),
        ([event(0, 1, ABORT, output_token_logprobs=[])], [], "abort"),
        ([event(0, 2, {"type": "abort", "message": "queue", "status_code": 429})], IDS[:2], "no_room"),
        ([b'{"error": {"message": "full", "code": 503}}'], [], "no_room"),
        ([b'{"error": {"message": "who are you", "code": 401}}'], [], "server_error"),
    ],
)
async def test_a_stream_that_ends_in_another_way(events: list[Any], told: list[int], error: str) -> None:
    chunks, raised = await read(*events)
    assert ids(chunks) == told
    assert all(chunk.finish_reason is None for chunk in chunks)
    if error == "refused":
        assert isinstance(raised, RequestRefused)
    else:
        assert isinstance(raised, StreamCut)
        assert raised.reason == error
