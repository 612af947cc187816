"""What `--relay-text` relies on in engines that take text: their own routes, answered as OpenAI has it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any

import pytest

from gateway.core.relaying import TEXT_ROUTES, TextApi
from gateway.engines.base import EngineAdapter, PassedAnswer
from tests.contract.engine_contract import LONG, MODEL, PATIENCE_S, Subject
from tests.support.relays import until

TRIES, LOOK_S = 6, 5.0

ASKED: dict[TextApi, dict[str, Any]] = {
    "completion": {"prompt": "What is the sum of 12 and 30?"},
    "chat": {"messages": [{"role": "user", "content": "What is the sum of 12 and 30?"}]},
}


async def pass_on(adapter: EngineAdapter, subject: Subject, api: TextApi, **fields: Any) -> PassedAnswer:
    body = {"model": MODEL, "temperature": 0, "ignore_eos": True, "max_tokens": 12, **ASKED[api], **fields}
    return await adapter.pass_on(TEXT_ROUTES[subject.kind][api], json.dumps(body).encode(), stall_timeout_s=PATIENCE_S)


async def read(answer: PassedAnswer) -> tuple[int, bytes]:
    with contextlib.closing(answer):
        (status, _), found = await answer.head(), b""
        while data := await answer.some():
            found += data
    return status, found


def whole_text(body: bytes) -> str:
    choice = json.loads(body)["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def streamed_text(body: bytes) -> str:
    events = [line.removeprefix("data: ") for line in body.decode().splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices)


class TextContract:
    """The cases. A subclass gives the fixture `subject`."""

    @pytest.fixture
    def subject(self) -> Subject:
        raise NotImplementedError("a subclass gives the engine")

    async def test_text_is_the_same_whole_and_streamed(self, subject: Subject) -> None:
        async with subject.adapter() as adapter:
            for api in TEXT_ROUTES[subject.kind]:
                status, whole = await read(await pass_on(adapter, subject, api))
                assert status == 200, whole
                status, streamed = await read(await pass_on(adapter, subject, api, stream=True))
                assert status == 200, streamed
                assert whole_text(whole) == streamed_text(streamed) != ""

    async def test_what_it_refuses_is_an_answer_too(self, subject: Subject) -> None:
        async with subject.adapter() as adapter:
            status, said = await read(await pass_on(adapter, subject, "completion", temperature=-1))
        assert 400 <= status < 500
        assert b"temperature" in said

    async def test_who_leaves_text_frees_the_engine(self, subject: Subject) -> None:
        async with subject.adapter() as adapter:
            for fields in ({"stream": True}, {}):
                answer, reading = await self._seen_to_run(adapter, subject, fields)
                reading.cancel()
                await asyncio.wait([reading])
                answer.close()
                await until(lambda: self._running(adapter, 0), "room", PATIENCE_S)

    async def _seen_to_run(
        self, adapter: EngineAdapter, subject: Subject, fields: dict[str, Any]
    ) -> tuple[PassedAnswer, asyncio.Task[Any]]:
        """A turn that runs. Asked again if it ended before we looked: on a busy machine that takes seconds."""
        for _ in range(TRIES):
            answer = await pass_on(adapter, subject, "completion", max_tokens=LONG, **fields)
            reading = asyncio.create_task(answer.head())
            deadline = time.monotonic() + LOOK_S
            while time.monotonic() < deadline:
                if await self._running(adapter, 1):
                    return answer, reading
                await asyncio.sleep(0.02)
            await reading
            answer.close()
        raise AssertionError(f"of {TRIES} turns none was seen to run")

    async def _running(self, adapter: EngineAdapter, wanted: int) -> bool:
        return (await adapter.report()).running == wanted
