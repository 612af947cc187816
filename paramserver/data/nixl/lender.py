"""The holder's side of a hop over nixl: lends a version's memory to one peer, chunk by chunk.

Invariants:
- what is lent is held against reuse (`reading()`) from READY until TAKEN, or until the process that serves it is dead:
  the peer's card reads it without this relay's notice;
- a version that goes is unmapped at once where nothing of it is lent;
- a peer that is silent for `STALL_S`, or has `LENT_MAX` chunks and requests more, loses its connection.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack

from paramserver.data import frames
from paramserver.data.frames import Header, Kind, LinkBroken
from paramserver.data.nixl.processes import NixlProcess, NixlProcesses
from paramserver.memory.store import Snapshot

STALL_S = 10.0
LENT_MAX = 64  # a fetch of ours has 4

Await = Callable[[int, int, bool], bytes]
"""Waits for a chunk (number, first byte, suspect) and gives its digest."""


class NixlLender:
    """One connection, greeted, not yet welcomed. `run` ends only by an exception: LinkBroken, or a refusal."""

    def __init__(
        self,
        sock: socket.socket,
        snapshot: Snapshot,
        processes: NixlProcesses,
        process: NixlProcess,
        await_chunk: Await,
        pause: Callable[[int], None],
    ) -> None:
        self._sock, self._snapshot = sock, snapshot
        self._processes, self._process = processes, process
        self._await_chunk, self._pause = await_chunk, pause
        self._lent: dict[int, ExitStack] = {}
        self._clean = False
        self._heard_at = time.monotonic()

    def run(self) -> None:
        try:
            self._welcome()
            while True:
                self._next()
        finally:
            if self._clean and not self._lent:
                self._processes.give(self._process)
            else:
                self._processes.discard(self._process)
            for held in self._lent.values():
                held.close()

    def _welcome(self) -> None:
        with self._snapshot.reading():
            files = [(file.fd, file.size_bytes) for file in self._snapshot.files]
            mapped = self._process.map(files, self._alive)
        self._clean = True
        lent = frames.Lent(mapped.metadata, mapped.addresses)
        frames.send_message(self._sock, Kind.WELCOME, frames.Welcome(self._snapshot.manifest, [], lent))

    def _next(self) -> None:
        if not self._lent:
            with self._snapshot.reading():  # refused once the version goes: its memory must not stay mapped
                pass
        ends: list[socket.socket | NixlProcess] = [self._sock, self._process]
        readable = frames.readable(ends, frames.HEARTBEAT_S)
        if self._process in readable:
            self._clean = False
            raise LinkBroken(f"the NIXL process sent {self._process.receive()}, which answers nothing")
        if self._sock in readable:
            self._request()
        elif time.monotonic() - self._heard_at > STALL_S:
            raise LinkBroken(f"the peer was silent for {STALL_S} s")
        elif self._lent:
            self._alive()

    def _request(self) -> None:
        kind, flags, index, from_byte = frames.REQUEST.unpack(frames.receive_bytes(self._sock, frames.REQUEST.size))
        self._heard_at = time.monotonic()
        if kind == Kind.GET:
            self._lend(index, from_byte, suspect=bool(flags & frames.FLAG_SUSPECT))
        elif kind == Kind.TAKEN:
            self._taken(index)
        elif kind != Kind.ALIVE:
            raise LinkBroken(f"the peer sent a request of unknown kind {kind}")

    def _lend(self, index: int, from_byte: int, *, suspect: bool) -> None:
        if index in self._lent or len(self._lent) >= LENT_MAX:
            raise LinkBroken(f"chunk {index} requested with {len(self._lent)} lent")
        with ExitStack() as held:
            held.enter_context(self._snapshot.reading(self._break_off))
            chunk_digest = self._await_chunk(index, from_byte, suspect)
            length = self._snapshot.chunks.chunk(index).length - from_byte
            self._pause(length)
            if not self._lent:
                self._process.lend(True)
            self._lent[index] = held.pop_all()
        frames.send_all(self._sock, Header(Kind.READY, index, from_byte, length, chunk_digest).pack())

    def _taken(self, index: int) -> None:
        held = self._lent.pop(index, None)
        if held is None:
            raise LinkBroken(f"chunk {index} was not lent and is reported as taken")
        held.close()
        if not self._lent:
            self._process.lend(False)

    def _break_off(self) -> None:
        with contextlib.suppress(OSError):  # it is down already
            self._sock.shutdown(socket.SHUT_RDWR)

    def _alive(self) -> None:
        frames.send_all(self._sock, Header(Kind.ALIVE).pack())
