"""The relay's side of its NIXL processes: started, given work, taken back when clean, killed when not.

Invariants:
- a process serves one link at a time; it is used again only when all it began has been confirmed to have ended;
- any other is killed and reaped before its link is given up: a read under way ends with it, so that nothing writes into
  pool memory that was given to another version meanwhile;
- at most `PROCESSES_MAX` processes, at most `idle_max` of them without work.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from paramserver.data.frames import HEARTBEAT_S, TransportFailed
from paramserver.data.nixl.process import (
    FDS_PER_MESSAGE,
    MESSAGE_BYTES_MAX,
    VARIANTS,
    Answer,
    Failed,
    Lend,
    Map,
    Mapped,
    Order,
    Peer,
    Read,
    Started,
    Unmap,
    Unmapped,
)
from protos.decoding import decode_json
from protos.errors import OutOfCapacity, Unavailable
from protos.extras import install

log = logging.getLogger(__name__)

PROCESSES_MAX = 32  # processes of one relay; links beyond go over tcp
START_TIMEOUT_S = 20.0
MAP_TIMEOUT_S = 60.0  # an RDMA card takes a while to register a large version
UNMAP_TIMEOUT_S = 5.0  # one that takes longer is killed, which unmaps too

_Answer = TypeVar("_Answer", Started, Mapped, Unmapped)

Files = Sequence[tuple[int, int]]
"""Descriptor and size of each file."""


def nothing() -> None:
    pass


class NixlProcess:
    """One NIXL process. Not for several threads at once."""

    def __init__(self, interface: str | None) -> None:
        self._buffer = memoryview(bytearray(MESSAGE_BYTES_MAX))
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            if interface is not None:
                env.setdefault("UCX_NET_DEVICES", interface)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paramserver.data.nixl.process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                env=env,
            )
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self._sock.setsockopt(socket.SOL_SOCKET, option, MESSAGE_BYTES_MAX)

    def fileno(self) -> int:
        """Readable when there is something to `receive`."""
        return self._sock.fileno()

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def map(self, files: Files, meanwhile: Callable[[], None] = nothing) -> Mapped:
        """Makes the files readable for a peer, and writable for `read`."""
        for start in range(0, max(1, len(files)), FDS_PER_MESSAGE):
            part = files[start : start + FDS_PER_MESSAGE]
            order = Map([size for _, size in part], start + FDS_PER_MESSAGE < len(files))
            self._send(order, [fd for fd, _ in part])
        return self._receive(Mapped, MAP_TIMEOUT_S, meanwhile)

    def peer(self, metadata: bytes) -> None:
        self._send(Peer(metadata))

    def read(self, order: Read) -> None:
        self._send(order)

    def lend(self, now: bool) -> None:
        self._send(Lend(now))

    def started(self, meanwhile: Callable[[], None] = nothing) -> None:
        self._receive(Started, START_TIMEOUT_S, meanwhile)

    def unmap(self) -> None:
        self._send(Unmap())
        self._receive(Unmapped, UNMAP_TIMEOUT_S, nothing)

    def receive(self) -> Answer:
        """The next answer, within the socket's timeout. TransportFailed: the process's own error, or it is gone."""
        try:
            length = self._sock.recv_into(self._buffer)
        except TimeoutError:
            raise
        except OSError as error:
            raise TransportFailed(f"a NIXL process does not answer: {error}") from error
        if not length:
            raise TransportFailed("a NIXL process died; its link is given up")
        answer: Answer = decode_json(self._buffer[:length], Answer)
        if isinstance(answer, Failed):
            raise TransportFailed(f"nixl: {answer.why}")
        return answer

    def kill(self) -> None:
        """When this returns, the process and all it had under way are gone."""
        self._sock.close()
        self._process.kill()
        self._process.wait()

    def _send(self, order: Order, fds: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self._sock, [msgspec.json.encode(order)], list(fds))
        except OSError as error:
            raise TransportFailed(f"a NIXL process takes no orders: {error}") from error

    def _receive(self, kind: type[_Answer], timeout_s: float, meanwhile: Callable[[], None]) -> _Answer:
        deadline = time.monotonic() + timeout_s
        self._sock.settimeout(HEARTBEAT_S)
        while time.monotonic() < deadline:
            try:
                answer = self.receive()
            except TimeoutError:
                meanwhile()
                continue
            if isinstance(answer, kind):
                return answer
            raise TransportFailed(f"a NIXL process sent {answer} where {kind.__name__} was due")
        raise TransportFailed(f"a NIXL process was silent for {timeout_s} s")


class NixlProcesses:
    """The NIXL processes of one relay. Threads call it."""

    def __init__(self, *, idle_max: int, interface: str | None = None) -> None:
        self._idle_max = idle_max
        self._interface = interface
        self._idle: list[NixlProcess] = []
        self.num_busy = 0
        self._mutex = threading.Lock()
        self._closing = False

    def warm(self, count: int) -> None:
        """Starts that many, which shows whether the library works here. Unavailable when it does not."""
        require()
        try:
            with ThreadPoolExecutor(count) as threads:
                for process in list(threads.map(lambda _: self.take(), range(count))):
                    self._put_back(process)
        except TransportFailed as error:
            raise Unavailable(f"--transport nixl: {error}", hint="use --transport tcp, or mend nixl here") from error

    def take(self, meanwhile: Callable[[], None] = nothing) -> NixlProcess:
        """An idle one or a new one. OutOfCapacity beyond PROCESSES_MAX, TransportFailed when it does not start.

        `meanwhile` is called every HEARTBEAT_S while it starts.
        """
        with self._mutex:
            if self._closing or self.num_busy >= PROCESSES_MAX:
                raise OutOfCapacity(f"{self.num_busy} NIXL processes are at work already")
            self.num_busy += 1
            while self._idle:
                if (process := self._idle.pop()).alive():
                    return process
                process.kill()
        try:
            return self._start(meanwhile)
        except BaseException:
            with self._mutex:
                self.num_busy -= 1
            raise

    def give(self, process: NixlProcess) -> None:
        """Takes it back for another link; everything it began must have ended."""
        try:
            process.unmap()
        except TransportFailed as error:
            log.warning("%s", error)
            self.discard(process)
        else:
            self._put_back(process)

    def discard(self, process: NixlProcess) -> None:
        process.kill()
        with self._mutex:
            self.num_busy -= 1

    def close(self) -> None:
        """Ends those without work, and starts no more; links end theirs."""
        with self._mutex:
            self._closing = True
            idle, self._idle = self._idle, []
        for process in idle:
            process.kill()

    def _start(self, meanwhile: Callable[[], None]) -> NixlProcess:
        process = NixlProcess(self._interface)
        try:
            process.started(meanwhile)
        except BaseException:
            process.kill()
            raise
        return process

    def _put_back(self, process: NixlProcess) -> None:
        with self._mutex:
            self.num_busy -= 1
            kept = not self._closing and len(self._idle) < self._idle_max
            if kept:
                self._idle.append(process)
        if not kept:
            process.kill()


def require() -> None:
    """Unavailable, with what to do, when the package is not there."""
    if not any(importlib.util.find_spec(name) for name in VARIANTS):
        raise Unavailable("--transport nixl needs the package nixl, which is not installed", hint=install("nixl"))
