"""The handle of one engine: its adapter, its state, and the tasks that watch and refresh it."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from gateway.config import EngineSpec
from gateway.core.fleet import EngineState, EngineStatus
from gateway.core.types import Version
from gateway.engines.base import EngineAdapter
from gateway.fleet.probe import Probe
from gateway.store import Timeline

log = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineHandle:
    """`state` is the fleet's; it changes between awaits of the event loop only."""

    spec: EngineSpec
    adapter: EngineAdapter
    state: EngineState
    timeline: Timeline
    look: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)  # a turn left
    looked: asyncio.Event = field(default_factory=asyncio.Event)  # once, whatever was seen
    failed_polls: int = 0
    dtype_asks: int = 0  # of this incarnation
    refresh_failures: int = 0
    held: bool = False  # it stays on its version for sessions, which was said
    probe: Probe | None = None  # the last, after its last load
    reported: set[Version] = field(default_factory=set)  # as refused, to a relay, since its last load that counted
    watcher: asyncio.Task[None] | None = None
    tether: asyncio.Task[None] | None = None
    refresher: asyncio.Task[None] | None = None

    def to(self, status: EngineStatus, reason: str) -> None:
        """A transition that the timeline and the log are told of, with its reason."""
        self.state.to(status)
        self.timeline.add("engine", engine=self.state.name, state=status, reason=reason)
        log.info("engine %s: %s: %s", self.state.name, status, reason)

    def note_failed_look(self, error: str) -> None:
        """For the timeline: the engine's own state forgets it with the next look that succeeds."""
        self.timeline.add("look", engine=self.state.name, error=error)

    def suspect(self) -> None:
        """A connection to it broke: it gets no turn before it was looked at, which is now."""
        self.state.suspected = self.state.status == "serving"
        self.look.set()

    async def close(self) -> None:
        """Ends its tasks and connections. Nothing is left behind if who asked is cancelled meanwhile."""
        tasks = [task for task in (self.watcher, self.tether, self.refresher) if task is not None]
        for task in tasks:
            task.cancel()
        try:
            if tasks:
                await asyncio.wait(tasks)
        finally:
            await self.adapter.close()
