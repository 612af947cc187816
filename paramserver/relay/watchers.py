"""Who watches the versions of a model here: each gets the state first, then every change, in order.

Invariants:
- one that falls `WATCHER_EVENTS_MAX` events behind is cut off, and starts again from the state;
- between the state and the first change nothing is missed: both are taken in one step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

from paramserver.core.versions import Tell
from protos.errors import Unavailable

WATCHER_EVENTS_MAX = 256


@dataclass(eq=False)
class _Watcher:
    model: str
    queue: asyncio.Queue[Tell | None] = field(default_factory=lambda: asyncio.Queue(WATCHER_EVENTS_MAX))

    def offer(self, event: Tell | None) -> None:
        """Queues an event; a full queue is emptied and ended, so that the watcher starts over from the state."""
        if self.queue.full():
            while not self.queue.empty():
                self.queue.get_nowait()
            event = None
        self.queue.put_nowait(event)


class Watchers:
    def __init__(self) -> None:
        self._watchers: set[_Watcher] = set()

    async def watch(self, model: str, state: Callable[[], Iterable[Tell]]) -> AsyncIterator[Tell]:
        """The current state, then every change. Raises Unavailable when it fell behind, or the relay ends."""
        watcher = _Watcher(model)
        now = list(state())
        self._watchers.add(watcher)
        try:
            for event in now:
                yield event
            while (event_or_end := await watcher.queue.get()) is not None:
                yield event_or_end
            raise Unavailable("the watch was ended by the relay", hint="watch again; it starts with the state")
        finally:
            self._watchers.discard(watcher)

    def tell(self, event: Tell) -> None:
        for watcher in list(self._watchers):
            if watcher.model == event.sealed.model:
                watcher.offer(event)

    def dismiss(self) -> None:
        """Ends all watches."""
        for watcher in self._watchers:
            watcher.offer(None)
