"""A signal for calls that wait until something holds on this relay, or until the relay stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Changes:
    """Owned by the relay's event loop. `closed`: the relay stops, and starts nothing new."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self.closed = False

    def notify(self) -> None:
        """Every waiting call checks its condition again."""
        # An event of its own for each round: a call that waits from now on waits for the next change, not for this one.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def close(self) -> None:
        self.closed = True
        self.notify()

    async def wait_until(self, holds: Callable[[], bool]) -> None:
        """Returns once `holds()`, or once the relay stops."""
        while not (self.closed or holds()):
            await self._changed.wait()
