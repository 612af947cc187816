"""Leases of samples whose answers did not come: the gateway may hold them for this reader, which has nothing of them.

Each is given back by its name once the gateway answers, in the background: without that its trajectories would wait
until it ends by itself, ten minutes by default.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from protos.errors import LaminarError, NotFound, Unavailable

log = logging.getLogger(__name__)

RETRY_S = 0.5
CLOSE_S = 5.0
"""How long `close` goes on."""
LEASES_MAX = 64
"""Beyond, the oldest end by their own time."""


class Unanswered:
    """`give_back` ends the lease of a name, and raises NotFound if there is none."""

    def __init__(self, give_back: Callable[[str], Awaitable[None]]) -> None:
        self._give_back = give_back
        self._leases: dict[str, float] = {}  # by name, oldest first: when each has ended by itself
        self._giving_back: asyncio.Task[None] | None = None
        self._closed = False

    def add(self, lease_id: str, lease_s: float) -> None:
        if self._closed:
            return
        while len(self._leases) >= LEASES_MAX:
            del self._leases[next(iter(self._leases))]
        self._leases[lease_id] = time.monotonic() + lease_s
        if self._giving_back is None or self._giving_back.done():
            self._giving_back = asyncio.create_task(self._run(), name="give-back-unanswered")

    async def close(self) -> None:
        """Goes on for a while, and leaves the rest to end by itself."""
        self._closed = True
        if self._giving_back is not None:
            await asyncio.wait([self._giving_back], timeout=CLOSE_S)
            if not self._giving_back.done():
                log.warning("%d batches whose answers were lost come back when their leases end", len(self._leases))
                self._giving_back.cancel()
                await asyncio.wait([self._giving_back])

    async def _run(self) -> None:
        while self._leases:
            lease_id, until = next(iter(self._leases.items()))
            if time.monotonic() < until:
                try:
                    await self._give_back(lease_id)
                    log.info("%s, a batch whose answer was lost, is given back", lease_id)
                except NotFound:
                    log.debug("%s was never leased, or has ended", lease_id)
                except Unavailable:
                    await asyncio.sleep(RETRY_S)
                    continue
                except LaminarError as error:
                    log.warning(
                        "%s, a batch whose answer was lost, comes back when its lease ends: %s", lease_id, error
                    )
            self._leases.pop(lease_id, None)
