"""An idle connection to an engine, kept open only to be told when it breaks: the kernel closes it with the process.

So a death or a restart is known within milliseconds, before the next turn is placed there, and not at the next poll.
It proves nothing else: a proxy may close idle connections, and a host that vanished closes none.
"""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S = 5.0
READ_BYTES = 1 << 12
"""Of what an engine says there, though nobody asked: it is read and dropped."""


async def until_broken(url: str) -> bool:
    """Returns when the connection breaks; False when there was none to begin with."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure or None)
    except (OSError, TimeoutError, ValueError):  # ValueError: a host that cannot be
        return False
    try:
        while await reader.read(READ_BYTES):
            pass
    except OSError:
        pass  # a reset tells as much as an end
    finally:
        writer.close()
    return True
