"""Which engine to kill, and when. Pure: the last status in, a choice with its reason out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from deploy.demo.recording import GatewayStatus

RUNNING_MIN = 2
"""Fewer turns may all end between the status and the kill."""


@dataclass(frozen=True, slots=True)
class Choice:
    """`engine` is None while it is not time yet."""

    engine: str | None
    reason: str


def choose_victim(status: GatewayStatus | None, steps_done: int, steps: int, budget_used: float = 0.0) -> Choice:
    """After a third of the steps, or of the time for them, the serving engine with the most turns in flight.

    Best one whose version others serve too, so that its turns go on under the version they began with.
    """
    if steps_done < max(1, steps // 3) and budget_used < 1 / 3:
        return Choice(None, f"{steps_done} of {steps} steps done: not a third yet")
    serving = [] if status is None else [engine for engine in status.engines if engine.state == "serving"]
    if len(serving) < 2:
        return Choice(None, "fewer than two engines serve: no other could continue the turns")
    counts = Counter(engine.version for engine in serving)
    busy = [engine for engine in serving if engine.running >= RUNNING_MIN]
    if not busy:
        return Choice(None, f"no engine runs {RUNNING_MIN} turns right now")
    victim = min(busy, key=lambda engine: (counts[engine.version] == 1, -engine.running, engine.name))
    return Choice(victim.name, f"{victim.running} turns in mid-generation")
