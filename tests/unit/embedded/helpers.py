"""Small engines over tiny models, and the shortest ways to ask them for tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from gateway.engines.embedded.batching.sequence import Delta, GenerationRequest, SamplingParams, Token
from gateway.engines.embedded.config import EngineConfig
from gateway.engines.embedded.engine import Engine
from tests.support.tiny_model import tiny_model


def config(model: Path | None = None, **overrides: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "model": model or tiny_model(),
        "served_model_name": "policy",
        "dtype": "float32",
        "max_num_seqs": 5,
        "kv_cache_tokens": 1024,
        "max_model_len": 256,
        "max_batched_tokens": 48,
        "weight_version": "1",
        **overrides,
    }
    return EngineConfig(**values)


def request(id: str, prompt: list[int], salt: str = "", **params: Any) -> GenerationRequest:
    return GenerationRequest(id, tuple(prompt), SamplingParams(**{"temperature": 0.0, **params}), salt)


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 512) for _ in range(length)] for length in lengths]


def drain(engine: Engine, steps_max: int = 5000) -> list[Delta]:
    """Steps until nothing is left."""
    deltas: list[Delta] = []
    for _ in range(steps_max):
        if engine.idle:
            return deltas
        deltas += engine.step()
    raise AssertionError(f"not idle after {steps_max} steps: {engine.statistics()}")


def run(engine: Engine, *requests: GenerationRequest) -> dict[str, list[Token]]:
    """Runs these requests together to their ends."""
    for r in requests:
        engine.add(r)
    out: dict[str, list[Token]] = {r.request_id: [] for r in requests}
    for delta in drain(engine):
        if delta.token is not None:
            out[delta.request_id].append(delta.token)
    return out


def ids(tokens: list[Token]) -> list[int]:
    return [token.id for token in tokens]
