"""Which adapter speaks to which kind of engine."""

from __future__ import annotations

from collections.abc import Callable

from gateway.engines.base import EngineAdapter
from gateway.engines.sglang import SglangEngine
from gateway.engines.vllm import VllmEngine

ADAPTERS: dict[str, Callable[..., EngineAdapter]] = {"vllm": VllmEngine, "sglang": SglangEngine, "embedded": VllmEngine}
"""By the kinds of `protos.engines`; called with the address, the served model, and deadlines: `stall_timeout_s`,
`control_timeout_s`, `load_timeout_s`."""


def connect(kind: str, url: str, model: str, **deadlines: float) -> EngineAdapter:
    """The adapter for one engine; nothing is asked of it yet."""
    return ADAPTERS[kind](url, model, **deadlines)
