"""Carries repack plans out: one move after the other, so that a turn decodes at its source until its turn comes.

Owner of what is on its way. A destination takes `MOVES_AT_ONCE` turns at a time: prefilled all at once they would wait
for each other without a token, and hold up the turns that are there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict

from gateway.core.receipts import Outcome, Receipt, ReceiptBook
from gateway.core.repack import Move, Plan
from gateway.core.types import EngineName
from gateway.fleet.fleet import Fleet
from gateway.sessions.service import TurnService
from gateway.turns.running import RunningTurn

log = logging.getLogger(__name__)

MOVES_AT_ONCE = 2
"""Of one destination: one is prefilled while the other's request is on its way."""
ARRIVAL_MAX_S = 60.0
"""A first token that takes longer no longer holds up the moves behind it."""


class TurnMover:
    """`inbound`: key to destination, of moves that were not made yet. `close` ends what is under way."""

    def __init__(self, fleet: Fleet, sessions: TurnService) -> None:
        self.book = ReceiptBook()
        self.inbound: dict[str, EngineName] = {}
        self._fleet, self._sessions = fleet, sessions
        self._doors: defaultdict[EngineName, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(MOVES_AT_ONCE))
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def start(self, plan: Plan) -> None:
        """Returns at once; the plan is carried out in tasks, one for each engine it frees."""
        for freed in plan.freed:
            moves = [m for m in plan.moves if m.source == freed.engine]
            reason = next(r for r in plan.reasons if r.startswith(f"{freed.engine} goes"))
            now, unix_s = time.monotonic(), time.time()
            receipt = self.book.open(plan.version, freed, moves, reason, now=now, unix_s=unix_s)
            self._fleet.state.engines[freed.engine].leaving = True
            self.inbound |= {m.key: m.destination for m in moves}
            task = asyncio.create_task(self._empty(receipt), name=f"empty-{freed.engine}-{receipt.number}")
            self._tasks.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: %r", task.get_name(), error, exc_info=error)

    async def _empty(self, receipt: Receipt) -> None:
        moves = [m.move for m in receipt.moves]
        runs = [r for m in moves if m.turn_id is not None and (r := self._sessions.runs.get(m.turn_id)) is not None]
        under_way = [asyncio.create_task(self._carry_out(receipt, m), name=f"move-{m.key}") for m in moves]
        try:
            if under_way:
                await asyncio.wait(under_way)  # each for itself: one that fails leaves the others on their way
        finally:
            for task in under_way:
                task.cancel()
            if under_way:
                await asyncio.wait(under_way)
            for move in moves:
                self.inbound.pop(move.key, None)
            source = self._fleet.state.engines.get(receipt.engine)
            if source is not None:
                source.leaving = False
                if not source.turns:
                    self.book.emptied(receipt, time.monotonic())
            self._fleet.changed()
        ending = [run.task for run in runs if run.task is not None]
        if ending:
            await asyncio.wait(ending)
        self.book.ended(receipt, time.monotonic())

    async def _carry_out(self, receipt: Receipt, move: Move) -> None:
        outcome: Outcome = "failed"
        pause_s: float | None = None
        try:
            if move.turn_id is None:
                outcome = self._lead_over(move)
            else:
                async with self._doors[move.destination]:
                    outcome, pause_s = await self._move(self._sessions.runs.get(move.turn_id), move)
        except Exception:
            log.exception("the move of %s to engine %s failed", move.key, move.destination)
        finally:
            self.inbound.pop(move.key, None)
            self.book.settle(receipt, move, outcome, pause_s)

    def _lead_over(self, move: Move) -> Outcome:
        """A session that waits for a tool: its next turn will look for its prefix at the destination."""
        session = self._sessions.live.find(move.session_id)
        if session is None or session.running or session.engine != move.source:
            return "ended"
        session.engine, session.moves = move.destination, session.moves + 1
        return "moved"

    async def _move(self, run: RunningTurn | None, move: Move) -> tuple[Outcome, float | None]:
        if run is None or run.engine != move.source:
            return "ended", None
        if not self._same_version(move):
            return "failed", None
        arrived = run.move(move.destination)
        if arrived is None:
            return "ended", None
        try:
            async with asyncio.timeout(ARRIVAL_MAX_S):
                pause_s = await asyncio.shield(arrived)
        except TimeoutError:
            return "failed", None
        return ("failed", None) if pause_s is None else ("moved", pause_s)

    def _same_version(self, move: Move) -> bool:
        engines = self._fleet.state.engines
        source, there = engines.get(move.source), engines.get(move.destination)
        return (
            source is not None and there is not None and there.status == "serving" and there.version == source.version
        )
