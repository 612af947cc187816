"""The handle of one engine: its adapter, its state, and the tasks that poll and refresh it."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from gateway.config import EngineSpec
from gateway.core.fleet.state import EngineState, EngineStatus
from gateway.core.types import Version
from gateway.engines.base import EngineAdapter
from gateway.fleet.probe import Probe
from gateway.store import Timeline
from protos.telemetry.logs import about

log = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineHandle:
    """`state` belongs to `FleetState`; it changes between awaits of the event loop only."""

    spec: EngineSpec
    adapter: EngineAdapter
    state: EngineState
    timeline: Timeline
    poll_now: asyncio.Event = field(default_factory=asyncio.Event)  # wakes its watcher before the interval is over
    polled: asyncio.Event = field(default_factory=asyncio.Event)  # at least once, with whatever result
    left: asyncio.Event = field(default_factory=asyncio.Event)  # a turn has left it
    has_joined: bool = False  # it has responded as an engine: what it says is shown
    failed_polls: int = 0  # in a row
    dtype_requests: int = 0  # to this incarnation
    refresh_failures: int = 0
    held: bool = False  # it stays on its version for sessions, and that was logged
    probe: Probe | None = None  # the result of the last one, after its last load
    reported: set[Version] = field(default_factory=set)  # refused versions that a relay has a report of
    watch: asyncio.Task[None] | None = None
    tether: asyncio.Task[None] | None = None
    refresh: asyncio.Task[None] | None = None

    def to(self, status: EngineStatus, reason: str) -> None:
        """Makes a transition, and records it with its reason on the timeline and in the log."""
        self.state.to(status)
        self.timeline.add("engine", engine=self.state.name, state=status, reason=reason)
        extra = about(engine=self.state.name, version=self.state.version)
        log.info("engine %s: %s: %s", self.state.name, status, reason, extra=extra)

    def note_failed_poll(self, error: str) -> None:
        """On the timeline: `state.poll_error` is cleared by the next poll that succeeds."""
        self.timeline.add("look", engine=self.state.name, error=error)

    def suspect(self) -> None:
        """A connection to the engine broke: it gets no turn before it responded to another poll, which is made now."""
        self.state.suspected = self.state.status == "serving"
        self.poll_now.set()

    def shun(self, why: str) -> None:
        """It gets no turn before a later poll shows that `why` is over."""
        state = self.state
        if state.status != "serving":
            return
        if state.suspicion != why:
            log.warning("engine %s gets no turns: %s", state.name, why, extra=about(engine=state.name))
            self.timeline.add("engine", engine=state.name, state="suspected", reason=why)
        state.suspected, state.suspicion = True, why

    def trust(self) -> None:
        """It gets turns again."""
        state = self.state
        if state.suspicion:
            log.info("engine %s gets turns again", state.name, extra=about(engine=state.name))
            self.timeline.add("engine", engine=state.name, state=state.status, reason="it gets turns again")
        state.suspected, state.suspicion, state.ready = False, "", True

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
