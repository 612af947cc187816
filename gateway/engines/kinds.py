"""Which adapter speaks to which kind of engine."""

from __future__ import annotations

from collections.abc import Callable

from gateway.engines.base import EngineAdapter
from gateway.engines.vllm import VllmEngine

ADAPTERS: dict[str, Callable[..., EngineAdapter]] = {"vllm": VllmEngine, "embedded": VllmEngine}
"""By the kinds of `protos.engines`; called with the address, the served model and `stall_timeout_s`."""


def connect(kind: str, url: str, model: str, *, stall_timeout_s: float) -> EngineAdapter:
    """The adapter for one engine; nothing is asked of it yet."""
    return ADAPTERS[kind](url, model, stall_timeout_s=stall_timeout_s)
