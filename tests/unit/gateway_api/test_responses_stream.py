"""Streamed responses: typed events, as the official client accumulates them."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from gateway.tokens import Codec
from protos.errors import Unavailable
from tests.support import codecs
from tests.support.turns import Script, ScriptedTurns
from tests.unit.gateway_api.test_responses import CALL, TOOLS, client_of, says

THOUGHT = "<think>\nHm.\n</think>\n\n"
ANSWERS: list[tuple[Codec | None, str, list[str]]] = [
    (None, "Café 😀 ok", ["message"]),
    (None, "", ["message"]),
    (None, CALL, ["function_call"]),
    (None, f"Let me see.\n{CALL}\n{CALL}", ["message", "function_call", "function_call"]),
    (None, f"{CALL}\nThat was it.", ["function_call", "message"]),
    (codecs.qwen3(), f"{THOUGHT}Fine.\n{CALL}", ["reasoning", "message", "function_call"]),
    (codecs.qwen3(), "<think>\nnever ends", ["reasoning", "message"]),
]


@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize(("codec", "text", "kinds"), ANSWERS, ids=[str(i) for i in range(len(ANSWERS))])
async def test_the_events_join_to_the_response(codec: Codec | None, text: str, kinds: list[str], chunk: int) -> None:
    turns = ScriptedTurns(says(text, codec=codec, chunk=chunk))
    async with client_of(turns, codec) as client:
        async with client.responses.stream(model="policy", input="go", tools=TOOLS) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        whole = await client.responses.create(model="policy", input="go", tools=TOOLS)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    if chunk < 1000:  # a call and text of one delta have no order
        assert [item.type for item in final.output] == kinds
    assert sorted(item.type for item in final.output) == sorted(item.type for item in whole.output)
    assert final.output_text == whole.output_text
    assert final.usage == whole.usage
    for index, item in enumerate(final.output):
        own = [e for e in events if getattr(e, "output_index", None) == index]
        assert (own[0].type, own[-1].type) == ("response.output_item.added", "response.output_item.done")
        deltas = "".join(e.delta for e in own if e.type.endswith(".delta"))  # type: ignore[union-attr]
        assert deltas == _shown(item)


def _shown(item: Any) -> str:
    return item.arguments if item.type == "function_call" else item.content[0].text  # type: ignore[no-any-return]


async def test_a_length_limit_ends_the_stream_as_incomplete() -> None:
    async with client_of(ScriptedTurns(says("one two three four five"))) as client:
        stream = await client.responses.create(model="policy", input="count", max_output_tokens=3, stream=True)
        events = [event async for event in stream]
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details is not None
    assert last.response.incomplete_details.reason == "max_output_tokens"


async def test_logprobs_come_with_the_text() -> None:
    codec = codecs.tiny()
    async with client_of(ScriptedTurns(says("Café 😀 ok"))) as client:
        stream = await client.responses.create(
            model="policy", input="hi", include=["message.output_text.logprobs"], top_logprobs=1, stream=True
        )
        events = [event async for event in stream]
    sent = [token for e in events if e.type == "response.output_text.delta" for token in e.logprobs]
    [done] = [e for e in events if e.type == "response.output_text.done"]
    assert len(sent) >= len(codec.encode("Café 😀 ok"))
    assert len(done.logprobs) == len(codec.encode("Café 😀 ok")) + 1
    assert all(token.top_logprobs for token in sent)


async def test_a_failure_in_mid_stream_is_an_event_and_an_error() -> None:
    turns = ScriptedTurns(
        lambda request: Script(codecs.tiny().encode("one two three"), error=Unavailable("engine gone"), fails_after=2)
    )
    async with client_of(turns) as client:
        stream = await client.responses.create(model="policy", input="count", stream=True)
        seen: list[tuple[str, int]] = []

        async def read() -> None:
            async for event in stream:
                seen.append((event.type, event.sequence_number))  # noqa: PERF401 (it is cut short)

        with pytest.raises(openai.APIError, match="engine gone"):
            await read()
    assert seen[-1][0] == "response.failed"
    assert [number for _, number in seen] == list(range(len(seen)))
    assert turns.delivered == []
