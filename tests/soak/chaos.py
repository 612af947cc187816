"""What goes wrong next: faults drawn by seed from a table of weights. Pure.

Invariants:
- the same seed, parts and abilities give the same faults at the same times, whatever the fleet makes of them;
- the first faults of a run are one of each row, in an order drawn by seed; from then on rows are drawn by weight;
- in the second half of a run one process of each kind that has several is not killed, so that a slow growth has one
  long life to show itself in.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Action = Literal["kill", "stop", "cut link", "silent link", "slow link", "full disk", "full shm", "clock step"]

PERIOD_S = (10.0, 30.0)
"""From one fault to the next."""
CLOCK_STEPS_S = (-120.0, -30.0, -2.0, 2.0, 30.0, 120.0, 280.0)
"""What a clock is set to, against the true time: a step is from one of these to another. Within the idempotency window
of a gateway (600 s) and the idle time of a session (1,800 s), beyond which a step would be allowed to cost turns."""
SLOW_BYTES_S = (8 << 10, 256 << 10)


@dataclass(frozen=True, slots=True)
class Row:
    """A kind of fault: how often, at which kind of part, for how long (a killed process is away for that time)."""

    weight: int
    action: Action
    part: str
    seconds: tuple[float, float]


TABLE: Sequence[Row] = (
    Row(6, "kill", "engine", (0.5, 8)),
    Row(4, "kill", "relay", (0.5, 8)),
    Row(4, "kill", "gateway", (0.5, 5)),
    Row(3, "kill", "runner", (0.5, 5)),
    Row(3, "kill", "trainer", (0.5, 5)),
    Row(2, "kill", "redis", (0.2, 6)),
    Row(2, "kill", "etcd", (0.2, 8)),
    Row(2, "stop", "engine", (1, 12)),
    Row(2, "stop", "relay", (1, 12)),
    Row(2, "stop", "gateway", (1, 12)),
    Row(1, "stop", "runner", (1, 12)),
    Row(1, "stop", "trainer", (1, 12)),
    Row(1, "stop", "redis", (1, 8)),
    Row(1, "stop", "etcd", (1, 8)),
    Row(3, "cut link", "link", (1, 12)),
    Row(3, "silent link", "link", (1, 12)),
    Row(3, "slow link", "link", (5, 20)),
    Row(3, "full disk", "disk", (4, 15)),
    Row(2, "full shm", "shm", (8, 20)),
    Row(4, "clock step", "clock", (0, 0)),
)


@dataclass(frozen=True, slots=True)
class Fault:
    """`target` is a name, such as of a process or of a link. `amount`: bytes a second, or seconds of a clock."""

    at_s: float
    action: Action
    target: str
    seconds: float
    amount: float = 0.0

    def __str__(self) -> str:
        match self.action:
            case "clock step":
                return f"the clock of {self.target} is set to {self.amount:+.0f} s"
            case "slow link":
                return f"slow link: {self.target}, {self.amount / 1024:.0f} KiB/s for {self.seconds:.1f} s"
        return f"{self.action}: {self.target} for {self.seconds:.1f} s"


def spared(parts: Mapping[str, Sequence[str]], seed: int) -> frozenset[str]:
    """The processes that are not killed in the second half."""
    chance = random.Random(f"spared {seed}")
    several = [kind for kind in ("engine", "relay", "gateway", "runner") if len(parts.get(kind, ())) > 1]
    return frozenset(chance.choice(parts[kind]) for kind in several)


def faults(parts: Mapping[str, Sequence[str]], seed: int, duration_s: float) -> Iterator[Fault]:
    """All of a run. `parts`: names by kind of part; a kind that is empty has no faults."""
    chance = random.Random(seed)
    kept, none = spared(parts, seed), frozenset[str]()
    first = chance.sample(TABLE, len(TABLE))
    at = 0.0
    while (at := at + chance.uniform(*PERIOD_S)) < duration_s:
        targets = {
            row: found for row in TABLE if (found := _targets(row, parts, kept if at >= duration_s / 2 else none))
        }
        first = [row for row in first if row in targets]
        row = first.pop() if first else chance.choices([*targets], [row.weight for row in targets])[0]
        target = chance.choice(targets[row])
        seconds = chance.uniform(*row.seconds)
        amount = 0.0
        if row.action == "clock step":
            amount = chance.choice(CLOCK_STEPS_S)
        elif row.action == "slow link":
            amount = chance.uniform(*SLOW_BYTES_S)
        yield Fault(at, row.action, target, seconds, amount)


def _targets(row: Row, parts: Mapping[str, Sequence[str]], kept: frozenset[str]) -> list[str]:
    return [name for name in parts.get(row.part, ()) if row.action != "kill" or name not in kept]
