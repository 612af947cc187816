"""Work beside the event loop.

A thread keeps the loop from nothing but work in Python, which lets go of the interpreter's lock every 5 ms, and C that
releases it. One long call of C that does not (a decode, an `extend`, a join) holds the loop from any thread: so what
comes here works in pieces, or is bounded before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def let_go(items: list[Any]) -> None:
    """Frees what only this list holds, one by one: freed with it, a thousand lists of tokens are one long call."""
    while items:
        items.pop()


async def aside(work: Callable[[], T], *, long: bool) -> T:
    """What `work` returns: done at once, or in a thread if it would hold the event loop."""
    return await asyncio.to_thread(work) if long else work()
