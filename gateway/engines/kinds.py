"""The table of engine kinds, and the guard around every adapter."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TypeVar

from gateway.core.types import SamplingParams
from gateway.engines.base import (
    AdapterContext,
    EngineAdapter,
    EngineFailed,
    EngineLimits,
    EngineReport,
    EngineStream,
    PassedAnswer,
    StreamCut,
    dtype_name,
)
from gateway.engines.sglang import SglangEngine
from gateway.engines.vllm import VllmEngine
from protos.errors import LaminarError
from protos.failures import FailureLog

log = logging.getLogger(__name__)

T = TypeVar("T")

ADAPTERS: dict[str, Callable[[str, AdapterContext], EngineAdapter]] = {
    "vllm": VllmEngine,
    "sglang": SglangEngine,
    "embedded": VllmEngine,
}
"""By the kinds of `protos.engines`. The first argument is the engine's address."""


def connect(kind: str, url: str, context: AdapterContext) -> EngineAdapter:
    """The adapter for one engine. Sends nothing yet."""
    return Guarded(ADAPTERS[kind](url, context), url)


class Guarded:
    """An adapter that raises only the errors of the seam: a malformed response is the engine's fault, never ours.

    An unexpected error is logged with its cause, once as long as it stays the same. Streams guard themselves, where
    they read an event (`gateway.engines.streams`).
    """

    def __init__(self, adapter: EngineAdapter, url: str) -> None:
        self._adapter, self._url = adapter, url
        self._failures = FailureLog(log)

    def generate(
        self,
        prompt_ids: tuple[int, ...],
        sampling: SamplingParams,
        request_id: str,
        session_id: str,
        traceparent: str = "",
    ) -> AbstractAsyncContextManager[EngineStream]:
        return self._adapter.generate(prompt_ids, sampling, request_id, session_id, traceparent)

    async def pass_on(self, path: str, body: bytes, *, stall_timeout_s: float) -> PassedAnswer:
        try:
            return await self._adapter.pass_on(path, body, stall_timeout_s=stall_timeout_s)
        except LaminarError:
            raise
        except Exception as e:
            raise StreamCut("protocol", self._unexpected(e)) from e

    async def report(self) -> EngineReport:
        return await self._control(self._adapter.report())

    async def limits(self) -> EngineLimits:
        return await self._control(self._adapter.limits())

    async def dtype(self) -> str:
        return dtype_name(await self._control(self._adapter.dtype()))

    async def weight_version(self) -> str:
        return await self._control(self._adapter.weight_version())

    async def tokenize(self, text: str) -> tuple[int, ...] | None:
        return await self._control(self._adapter.tokenize(text))

    async def load(self, path: Path, version: int, digest: str) -> float:
        return await self._control(self._adapter.load(path, version, digest))

    async def close(self) -> None:
        await self._adapter.close()

    async def _control(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except LaminarError:
            raise
        except Exception as e:
            raise EngineFailed(self._unexpected(e)) from e

    def _unexpected(self, error: Exception) -> str:
        self._failures.failed(f"{self._url} sent an unexpected response", error)
        return f"{self._url} sent an unexpected response: {error!r}"
