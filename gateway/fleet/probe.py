"""A probe of what an engine computes: the logprob of one greedy token after a fixed prompt.

Over the whole vocabulary a logprob depends on every weight that the forward pass touches, so other weights make another
number. If an engine returns exactly the same before and after the load of another version, either the version has the
same weights, or the engine did not take the new ones. That is reported, not refused: only the trainer knows which. An
engine that returns no number, or one that is not finite, does not serve.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass
from typing import Literal

from gateway.core.types import SamplingParams, Version
from gateway.engines.base import EngineAdapter, EngineFailed, NoLogprob, RequestRefused, StreamCut

log = logging.getLogger(__name__)

PROMPT = tuple(range(5, 21))
"""Ids that every vocabulary has; their text does not matter."""
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
TIMEOUT_S = 30.0
"""One short prefill, on an engine that runs nothing else, and may compile for its first request."""

Finding = Literal["first", "changed", "same", "none"]
"""Against the probe before the load: there was none; another number; exactly the same; the engine takes no probe."""


@dataclass(frozen=True, slots=True)
class Probe:
    incarnation: str
    version: Version
    token_id: int
    logprob: float


async def probe(adapter: EngineAdapter, incarnation: str, version: Version) -> Probe | None:
    """Probes the engine. None: it refuses the request. Raises EngineFailed when it returns no finite number."""
    try:
        async with asyncio.timeout(TIMEOUT_S), adapter.generate(PROMPT, ONE_TOKEN, "probe", "probe") as chunks:
            found = [pair async for chunk in chunks for pair in zip(chunk.token_ids, chunk.logprobs, strict=True)]
    except RequestRefused as e:
        log.warning("an engine refuses the probe: %s", e)
        return None
    except NoLogprob as e:
        raise _computes_nan(version) from e
    except (StreamCut, TimeoutError) as e:
        raise EngineFailed(f"it gave no token after its load: {e or f'silent for {TIMEOUT_S:g} s'}") from e
    if any(math.isnan(logprob) for _, logprob in found):
        raise _computes_nan(version)
    if len(found) != 1 or not math.isfinite(found[0][1]):
        raise EngineFailed(f"it answered a probe of one token with {found}", hint="its weights are not what they were")
    return Probe(incarnation, version, *found[0])


def _computes_nan(version: Version) -> EngineFailed:
    return EngineFailed(
        f"version {version} computes NaN: its weights hold NaN, or numbers so large that they lead to it",
        hint="look at the loss and the gradients of the training step that made it",
    )


def compare(before: Probe | None, after: Probe | None) -> Finding:
    if after is None:
        return "none"
    if before is None or before.incarnation != after.incarnation or before.version == after.version:
        return "first"
    return "same" if (before.token_id, before.logprob) == (after.token_id, after.logprob) else "changed"
