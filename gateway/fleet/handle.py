"""The handle of one engine: its adapter, its state, and the tasks that poll and refresh it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from gateway.config import EngineSpec
from gateway.core.fleet.state import EngineState
from gateway.core.types import Version
from gateway.engines.base import EngineAdapter
from gateway.fleet.probe import Probe


@dataclass(slots=True)
class EngineHandle:
    """`state` is the machine's; it changes between awaits of the event loop only."""

    spec: EngineSpec
    adapter: EngineAdapter
    state: EngineState
    poll_now: asyncio.Event = field(default_factory=asyncio.Event)  # wakes its watcher before the interval is over
    polled: asyncio.Event = field(default_factory=asyncio.Event)  # at least once, with whatever result
    emptied: asyncio.Event = field(default_factory=asyncio.Event)  # no turn runs on it, and it is to load
    has_joined: bool = False  # it has responded as an engine: what it says is shown
    dtype_requests: int = 0  # to this incarnation
    probe: Probe | None = None  # the result of the last one, after its last load
    reported: set[Version] = field(default_factory=set)  # refused versions that a relay has a report of
    watch: asyncio.Task[None] | None = None
    tether: asyncio.Task[None] | None = None
    refresh: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Ends its tasks and connections, also when the caller is cancelled meanwhile."""
        tasks = [task for task in (self.watch, self.tether, self.refresh) if task is not None]
        for task in tasks:
            task.cancel()
        try:
            if tasks:
                await asyncio.wait(tasks)
        finally:
            await self.adapter.close()
