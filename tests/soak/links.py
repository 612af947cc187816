"""Links between processes that can be cut, silenced and slowed: TCP proxies of one event loop.

Invariants:
- a healthy link passes what comes, in order and at once; its buffers are bounded by the transports' own;
- a silent link passes nothing and closes nothing, as a broken switch does; what waited goes out when it heals;
- a cut link resets its connections and refuses new ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass, field

BLOCK_BYTES = 64 << 10
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of no seconds: a close sends a reset."""


@dataclass(eq=False)
class Link:
    """`listen` and `target` are (host, port)."""

    name: str
    listen: tuple[str, int]
    target: tuple[str, int]
    bytes_s: float | None = None
    cut: bool = False
    _passing: asyncio.Event = field(default_factory=asyncio.Event)
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def start(self) -> None:
        self._passing.set()
        self._server = await asyncio.start_server(self._serve, *self.listen, limit=BLOCK_BYTES)

    async def close(self) -> None:
        self.break_connections()
        if self._server is not None:
            self._server.close()

    def silence(self) -> None:
        self._passing.clear()

    def slow(self, bytes_s: float) -> None:
        self.bytes_s = bytes_s

    def break_connections(self) -> None:
        self.cut = True
        self._passing.set()
        for writer in self._writers:
            _reset(writer)

    def heal(self) -> None:
        self.cut, self.bytes_s = False, None
        self._passing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.cut:
            _reset(writer)
            return
        await self._passing.wait()
        try:
            there, back = await asyncio.open_connection(*self.target, limit=BLOCK_BYTES)
        except OSError:
            _reset(writer)
            return
        self._writers |= {writer, back}
        try:
            await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
        finally:
            self._writers -= {writer, back}
            for end in (writer, back):
                end.close()

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        """One direction to its end; a break of either side breaks both."""
        try:
            while data := await source.read(BLOCK_BYTES):
                if self.bytes_s is not None:
                    await asyncio.sleep(len(data) / self.bytes_s)
                await self._passing.wait()
                target.write(data)
                await target.drain()
            if target.can_write_eof():
                target.write_eof()
        except OSError:
            _reset(target)


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()
