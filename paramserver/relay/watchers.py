"""Watches of a model's versions: each begins with the current state, then gets every change, in order.

Invariants:
- a watch that falls `WATCHER_EVENTS_MAX` events behind is ended, and starts again from the state;
- there are at most `WATCHES_MAX`: beyond, another is refused, and those that stand go on;
- between the state and the first change nothing is missed: both are taken in one step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from paramserver.core.versions import Notify
from paramserver.relay.models import ModelTable
from protos.errors import OutOfCapacity, Unavailable
from protos.failures import RareLines
from protos.foreign_text import quoted

log = logging.getLogger(__name__)

WATCHER_EVENTS_MAX = 256
WATCHES_MAX = 4096
"""At one relay: a gateway has one, and so has each trainer or engine that waits for versions by itself."""
SAID_MAX = 64
"""Models of which it was said that nobody watches them; beyond, the oldest is forgotten."""


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
        self._refused = RareLines(log, 1)
        self._said: dict[str, str] = {}  # model to the last run that was told that nobody watches it

    async def watch(self, model: str) -> AsyncIterator[Notify]:
        """The current state, then every change. Raises Unavailable when it fell behind, or the relay ends, and
        OutOfCapacity beyond `WATCHES_MAX`."""
        if len(self._watchers) >= WATCHES_MAX:
            refused = OutOfCapacity(
                f"{WATCHES_MAX} watches are open at this relay, and it takes no more",
                hint="close some: each program needs one of a model at a relay",
            )
            self._refused.say(logging.WARNING, f"a watch of {quoted(model)} is refused: {refused.message}")
            raise refused
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

    def models(self) -> set[str]:
        """Those that are watched here."""
        return {watcher.model for watcher in self._watchers}

    def unwatched(self, model: str, run: str) -> str:
        """For a run's publisher, once: nobody watches its model here, though other models are watched. Empty if not."""
        watched = self.models()
        if not watched or model in watched or self._said.get(model) == run:
            return ""
        self._said.pop(model, None)
        self._said[model] = run
        while len(self._said) > SAID_MAX:
            del self._said[next(iter(self._said))]
        names = ", ".join(map(quoted, sorted(watched)))
        why = (
            f"nobody watches model {quoted(model)} at this relay, where {names} is watched: no engine is served with it"
        )
        log.warning("%s (run %s)", why, quoted(run))
        return why

    def notify(self, event: Notify) -> None:
        for watcher in list(self._watchers):
            if watcher.model == event.sealed.model:
                watcher.offer(event)

    def close(self) -> None:
        """Ends all watches."""
        for watcher in self._watchers:
            watcher.offer(None)
