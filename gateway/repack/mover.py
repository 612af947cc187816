"""Carries repack plans out: one move after the other, so that a turn decodes at its source until it is moved.

A destination takes `MOVES_AT_ONCE` turns at a time: prefilled all at once, they would wait for each other without a
token, and delay the turns that are there.

The races. Between plan and move a turn may end, be cut, or its engines may load another version: so the source, both
versions and the destination's status are checked again right before the move. Between the request to move and the first
token from the destination the turn may still end; then its departure yields None, and the move failed. `inbound` holds
what is planned and not made yet, so that the next plan counts it on its destination.

Owner of the moves in progress.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict

from gateway.core.fleet.events import Emptying
from gateway.core.packing.plans import Move, Plan
from gateway.core.packing.receipts import Outcome, Receipt, ReceiptBook
from gateway.core.types import EngineName
from gateway.fleet.fleet import Fleet
from gateway.runtime.supervisor import Supervisor
from gateway.sessions.turn_service import TurnService
from gateway.turns.running import RunningTurn
from protos.foreign_text import quoted

log = logging.getLogger(__name__)

MOVES_AT_ONCE = 2
"""To one destination: one turn is prefilled while the other's request is on its way."""
ARRIVAL_MAX_S = 60.0
"""A first token that takes longer does not delay the next moves any more."""


class TurnMover:
    """`inbound`: destination of each planned move that was not made yet, by its session's or turn's key."""

    def __init__(self, fleet: Fleet, sessions: TurnService) -> None:
        self.book = ReceiptBook()
        self.inbound: dict[str, EngineName] = {}
        self._fleet, self._sessions = fleet, sessions
        self._slots: defaultdict[EngineName, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(MOVES_AT_ONCE))
        self._tasks = Supervisor()

    async def close(self) -> None:
        """Makes no more moves, and waits for none."""
        await self._tasks.close()

    def start(self, plan: Plan) -> None:
        """Returns at once; the plan is carried out in tasks, one for each engine it frees."""
        for freed in plan.freed:
            if freed.engine not in self._fleet.state.engines:
                continue  # it left the fleet while the plan was made
            moves = [m for m in plan.moves if m.source == freed.engine]
            now, unix_s = time.monotonic(), time.time()
            receipt = self.book.open(plan.version, freed, moves, freed.reason, now=now, unix_s=unix_s)
            self._fleet.send(Emptying(freed.engine, True))
            self.inbound |= {m.key: m.destination for m in moves}
            self._tasks.start(self._empty(receipt), f"empty-{freed.engine}-{receipt.number}")

    async def _empty(self, receipt: Receipt) -> None:
        moves = [m.move for m in receipt.moves]
        running = self._sessions.running
        turns = [turn for m in moves if m.turn_id is not None and (turn := running.get(m.turn_id)) is not None]
        tasks = [asyncio.create_task(self._carry_out(receipt, m), name=f"move-{m.key}") for m in moves]
        try:
            if tasks:
                await asyncio.wait(tasks)  # independent: one that fails does not end the others
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            for move in moves:
                self.inbound.pop(move.key, None)
            source = self._fleet.state.engines.get(receipt.engine)
            self._fleet.send(Emptying(receipt.engine, False))
            if source is not None and not source.turns:
                self.book.emptied(receipt, time.monotonic())
        ending = [turn.task for turn in turns if turn.task is not None]
        if ending:
            await asyncio.wait(ending)
        self.book.ended(receipt, time.monotonic())

    async def _carry_out(self, receipt: Receipt, move: Move) -> None:
        outcome: Outcome = "failed"
        pause_s: float | None = None
        try:
            if move.turn_id is None:
                outcome = self._move_idle(move)
            else:
                async with self._slots[move.destination]:
                    outcome, pause_s = await self._move(self._sessions.running.get(move.turn_id), move)
        except Exception:
            log.exception("the move of %s to engine %s failed", quoted(move.key), move.destination)
        finally:
            self.inbound.pop(move.key, None)
            self.book.settle(receipt, move, outcome, pause_s)

    def _move_idle(self, move: Move) -> Outcome:
        """Moves a session that waits for a tool: its next turn is placed at the destination first."""
        session = self._sessions.live.find(move.session_id)
        if session is None or session.running or session.engine != move.source:
            return "ended"
        session.engine, session.moves = move.destination, session.moves + 1
        return "moved"

    async def _move(self, turn: RunningTurn | None, move: Move) -> tuple[Outcome, float | None]:
        if turn is None or turn.engine != move.source:
            return "ended", None
        if not self._same_version(move):
            return "failed", None
        arrived = turn.move(move.destination)
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
        return source is not None and there is not None and there.takes_turns and there.version == source.version
