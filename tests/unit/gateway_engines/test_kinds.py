"""The table of engine kinds, and what their adapters are made with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.config import EngineSpec
from gateway.core.types import SamplingParams
from gateway.engines.base import AdapterContext, EngineFailed, EngineStream
from gateway.engines.kinds import ADAPTERS
from gateway.engines.vllm import VllmEngine
from gateway.tokens import Codec
from protos.engines import ENGINE_KINDS
from tests.support.adapters import lent
from tests.support.scripted_engine import MODEL, ScriptedEngine
from tests.support.tiny_model import tiny_tokenizer
from tests.unit.gateway_api.test_status import gateway

TEXT = "The quick brown fox"


def test_every_kind_that_may_be_named_has_an_adapter() -> None:
    assert list(ADAPTERS) == list(ENGINE_KINDS)


class TextEngine(VllmEngine):
    """An adapter that sends text: what it sends is kept, and the ids of that text go to a scripted engine."""

    sent: list[str]

    def __init__(self, url: str, context: AdapterContext) -> None:
        super().__init__(url, context)
        self.sent = []
        made.append(self)

    @asynccontextmanager
    async def generate(
        self,
        prompt_ids: tuple[int, ...],
        sampling: SamplingParams,
        request_id: str,
        session_id: str,
        traceparent: str = "",
    ) -> AsyncIterator[EngineStream]:
        self.sent.append(self._context.codec.decode(prompt_ids))
        ids = tuple(self._context.codec.encode(self.sent[-1]))
        async with super().generate(ids, sampling, request_id, session_id, traceparent) as stream:
            yield stream


made: list[TextEngine] = []


async def test_a_kind_that_takes_text_has_the_gateways_tokenizer_by_its_row_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENGINE_KINDS, "text", ENGINE_KINDS["vllm"])
    monkeypatch.setitem(ADAPTERS, "text", TextEngine)
    made.clear()
    body = {"model": MODEL, "prompt": TEXT, "max_tokens": 3}
    async with ScriptedEngine("e0", generate=lambda _: [5, 6, 7]) as e0:
        engines = (EngineSpec("e0", "text", e0.url, None),)
        async with (
            gateway(tmp_path, tokenizer=tiny_tokenizer(), engines=engines) as (_, http),
            http.post("/v1/completions", json=body) as answer,
        ):
            assert answer.status == 200, await answer.text()
        [adapter] = made
        assert adapter.sent == [TEXT]
        assert e0.requests[0].body["prompt"] == Codec.load(tiny_tokenizer()).encode(TEXT)


def test_an_adapter_without_a_tokenizer_says_what_it_lacks() -> None:
    with pytest.raises(EngineFailed, match="it takes text, and the gateway has no tokenizer"):
        _ = lent().codec
    codec = Codec.load(tiny_tokenizer())
    assert lent(tokenizer=codec).codec is codec
