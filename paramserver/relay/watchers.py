"""Watches of a model's versions: each begins with the current state, then gets every change, in order.

Invariants:
- a watch that falls `WATCHER_EVENTS_MAX` events behind is ended, and starts again from the state;
- between the state and the first change nothing is missed: both are taken in one step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from paramserver.core.versions import Notify
from paramserver.relay.models import ModelTable
from protos.errors import Unavailable

WATCHER_EVENTS_MAX = 256


@dataclass(eq=False)
class _Watcher:
    model: str
    queue: asyncio.Queue[Notify | None] = field(default_factory=lambda: asyncio.Queue(WATCHER_EVENTS_MAX))

    def offer(self, event: Notify | None) -> None:
        """Queues an event; a full queue is emptied and ended, so that the watcher starts over from the state."""
        if self.queue.full():
            while not self.queue.empty():
                self.queue.get_nowait()
            event = None
        self.queue.put_nowait(event)


class Watchers:
    """The watches of one relay; owned by its event loop."""

    def __init__(self, models: ModelTable) -> None:
        self._models = models
        self._watchers: set[_Watcher] = set()

    async def watch(self, model: str) -> AsyncIterator[Notify]:
        """The current state, then every change. Raises Unavailable when it fell behind, or the relay ends."""
        watcher = _Watcher(model)
        now = self._models.events(model)
        self._watchers.add(watcher)
        try:
            for event in now:
                yield event
            while (event_or_end := await watcher.queue.get()) is not None:
                yield event_or_end
            raise Unavailable("the watch was ended by the relay", hint="watch again; it starts with the state")
        finally:
            self._watchers.discard(watcher)

    def notify(self, event: Notify) -> None:
        for watcher in list(self._watchers):
            if watcher.model == event.sealed.model:
                watcher.offer(event)

    def close(self) -> None:
        """Ends all watches."""
        for watcher in self._watchers:
            watcher.offer(None)
