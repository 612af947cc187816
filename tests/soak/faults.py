"""Carries faults out on a fleet, and mends each after its time.

Invariants:
- whatever was done to a part is undone, also when the run ends in the middle of it;
- one part has one fault of a kind at a time: one that meets another is left out, and counted as such;
- a gateway whose disk is full is not killed, as its runbook has it: what ended meanwhile is in its memory alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

from tests.soak import clocks, disks
from tests.soak.chaos import Fault
from tests.soak.fleet import Fleet

REFILL_S = 0.25
AFTER_FULL_S = 10.0
"""For which a part is excused after its disk has room again: a gateway writes what waited, Redis is started again."""


class Faults:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._busy: set[str] = set()
        self.done: Counter[str] = Counter()  # by action, and the kind of part of what was killed or stopped
        self.left_out = 0

    async def carry_out(self, fault: Fault) -> None:
        if fault.target in self._busy:
            self.left_out += 1
            return
        self._busy.add(fault.target)
        try:
            self.done[self._name(fault)] += 1
            await self._do(fault)
        finally:
            self._busy.discard(fault.target)

    def _name(self, fault: Fault) -> str:
        process = self._fleet.processes.get(fault.target)
        of_process = fault.action in ("kill", "stop", "clock step") and process is not None
        return f"{fault.action} {process.program.kind}" if of_process and process is not None else fault.action

    async def _do(self, fault: Fault) -> None:
        fleet, name, seconds = self._fleet, fault.target, fault.seconds
        match fault.action:
            case "kill":
                fleet.processes[name].kill(seconds)
                await asyncio.sleep(seconds)
            case "stop":
                await fleet.processes[name].pause(seconds)
            case "cut link" | "silent link" | "slow link":
                await self._break_link(fault)
            case "full disk":
                async with self._full(name, fleet.disks[name]):
                    await asyncio.sleep(seconds)
            case "full shm":
                async with self._full(name, fleet.shm[name]):
                    fleet.processes[name].kill(0.5)  # so that it has to find its memory anew
                    await asyncio.sleep(seconds)
            case "clock step":
                clocks.set_clock(fleet.clocks[name], fault.amount)

    async def _break_link(self, fault: Fault) -> None:
        link = self._fleet.links[fault.target]
        if fault.action == "cut link":
            link.break_connections()
        elif fault.action == "silent link":
            link.silence()
        else:
            link.slow(fault.amount)
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            link.heal()

    @contextlib.asynccontextmanager
    async def _full(self, name: str, directory: Path) -> AsyncIterator[None]:
        process = self._fleet.processes[name]
        process.excused += 1
        filling = asyncio.create_task(_keep_full(directory))
        try:
            yield
        finally:
            filling.cancel()
            await asyncio.gather(filling, return_exceptions=True)
            disks.empty(directory)
            try:
                await asyncio.sleep(AFTER_FULL_S)
            finally:
                process.excused -= 1


async def _keep_full(directory: Path) -> None:
    while True:
        disks.fill(directory)
        await asyncio.sleep(REFILL_S)
