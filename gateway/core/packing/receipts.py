"""Receipts of repacking: the price and gain of every move, as estimated and as measured, and the price of prefill.

Pure: events and clock readings come from the shell. Invariants:
- a receipt has each turn and waiting session of the emptied engine once, with one outcome;
- measured figures are None until they are measured, never guessed;
- `RECEIPTS_MAX` receipts are kept.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from gateway.core.packing.plans import Freed, Move
from gateway.core.types import EngineName, Version

RECEIPTS_MAX = 1000
"""Emptied engines remembered: hours of a fleet that repacks all the time."""
PRICES_KEPT = 128
PRICES_MIN = 8
"""Moves measured before their price stands for the configured one."""

Outcome = Literal["planned", "moved", "ended", "failed"]
"""`ended`: its turn was over before it could move. `failed`: its destination was gone, or its stream there was cut."""


@dataclass(slots=True)
class MoveReceipt:
    """`pause_s`: how long the turn was without tokens; None if it never moved, or waited for a tool."""

    move: Move
    outcome: Outcome = "planned"
    pause_s: float | None = None


@dataclass(slots=True)
class Receipt:
    """One engine emptied. Gains and prices in seconds of an engine; `busy` is the share of B that it ran."""

    number: int
    version: Version
    engine: EngineName
    planned_unix_s: float
    reason: str
    estimate: Freed
    moves: list[MoveReceipt]
    planned_at: float
    emptied_after_s: float | None = None  # None until it is empty, and if it never was
    gain_measured_s: float | None = None  # known once the last moved turn has ended

    @property
    def price_measured_s(self) -> float:
        """Seconds that its moved turns went without tokens."""
        return sum(m.pause_s for m in self.moves if m.pause_s is not None)


@dataclass(slots=True)
class ReceiptBook:
    """Every receipt, newest last."""

    receipts: deque[Receipt] = field(default_factory=lambda: deque(maxlen=RECEIPTS_MAX))
    opened: int = 0
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=PRICES_KEPT))

    def open(
        self, version: Version, freed: Freed, moves: Sequence[Move], reason: str, *, now: float, unix_s: float
    ) -> Receipt:
        self.opened += 1
        receipts = [MoveReceipt(m) for m in moves]
        receipt = Receipt(self.opened, version, freed.engine, unix_s, reason, freed, receipts, now)
        self.receipts.append(receipt)
        return receipt

    def settle(self, receipt: Receipt, move: Move, outcome: Outcome, pause_s: float | None = None) -> None:
        """What came of one move."""
        [found] = [m for m in receipt.moves if m.move.key == move.key]
        assert found.outcome == "planned", (found, outcome)
        found.outcome, found.pause_s = outcome, pause_s
        if pause_s:
            self._rates.append(found.move.tokens / pause_s)

    def emptied(self, receipt: Receipt, now: float) -> None:
        receipt.emptied_after_s = now - receipt.planned_at

    def ended(self, receipt: Receipt, now: float) -> None:
        """The last of its moved turns ended: so long would they have held the engine."""
        if receipt.emptied_after_s is not None:
            held_s = now - receipt.planned_at - receipt.emptied_after_s
            receipt.gain_measured_s = held_s * (1 - receipt.estimate.busy)

    def prefill_tokens_per_s(self, configured: float) -> float:
        """The price of prefill as the last moves showed it; `configured` until enough did."""
        return statistics.median(self._rates) if len(self._rates) >= PRICES_MIN else configured
