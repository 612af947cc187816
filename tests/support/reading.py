"""A turn as its clients read it: at once, or as slowly as a test likes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from gateway.core.types import TokenDelta
from gateway.ports import TurnHandle


async def heard(run: TurnHandle) -> list[TokenDelta]:
    """All its deltas, each as it comes. Raises what ended the turn."""
    deltas: list[TokenDelta] = []
    await run.read(deltas.append)
    return deltas


async def slowly(run: TurnHandle) -> AsyncGenerator[TokenDelta]:
    """Its deltas, each one taken once the one before was done with. Raises what ended the turn."""
    given: asyncio.Queue[tuple[TokenDelta, asyncio.Future[None]] | None] = asyncio.Queue()

    def take(delta: TokenDelta) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        given.put_nowait((delta, done))
        return done

    reading = asyncio.create_task(run.read(take))
    reading.add_done_callback(lambda _: given.put_nowait(None))
    try:
        while (one := await given.get()) is not None:
            yield one[0]
            one[1].set_result(None)
        await reading
    finally:
        reading.cancel()
        await asyncio.wait({reading})
