"""What `--relay-text` relies on in engines that take text: their own routes, answered as OpenAI has it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from typing import Any

import pytest

from gateway.core.placing.text_requests import TEXT_ROUTES, TextApi
from gateway.engines.base import EngineAdapter, PassedAnswer
from tests.contract.engine_contract import MODEL, PATIENCE_S, Subject, ends_early
from tests.support.relays import until

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
                leave = functools.partial(self._leave, adapter, subject, fields)
                await ends_early(subject, leave, lambda: self._running(adapter, 0))

    async def _leave(self, adapter: EngineAdapter, subject: Subject, fields: dict[str, Any]) -> None:
        """Leaves a turn that the engine has begun, or that is over before anybody could see it run."""
        before = await subject.generated_tokens()
        answer = await pass_on(adapter, subject, "completion", max_tokens=subject.long, **fields)
        reading = asyncio.create_task(answer.head())

        async def begun() -> bool:
            return await subject.generated_tokens() > before

        await until(begun, "a first token", PATIENCE_S)
        reading.cancel()
        await asyncio.wait([reading])
        answer.close()

    async def _running(self, adapter: EngineAdapter, wanted: int) -> bool:
        return (await adapter.report()).running == wanted
