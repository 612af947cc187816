"""The relay's side of its mover processes: started, given work, taken back when clean, killed when not.

Invariants:
- a mover serves one link at a time; it is used again only when all it began has been confirmed to have ended;
- one that is not is killed and reaped before its link is given up, so nothing of it touches the pool later;
- at most `MOVERS_MAX` processes, at most `idle_max` of them without work.
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
from paramserver.data.nixl_process import (
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

log = logging.getLogger(__name__)

MOVERS_MAX = 32  # processes of one relay; links beyond go over tcp
START_TIMEOUT_S = 20.0
MAP_TIMEOUT_S = 60.0  # an RDMA card takes a while to register a large version
UNMAP_TIMEOUT_S = 5.0  # one that takes longer is killed, which unmaps too
INSTALL = 'pip install "laminar-rl[nixl]"'

_Answer = TypeVar("_Answer", Started, Mapped, Unmapped)

Files = Sequence[tuple[int, int]]
"""Descriptor and size of each file."""


def nothing() -> None:
    pass


class NixlProcess:
    """One mover. Not for several threads at once."""

    def __init__(self, interface: str | None) -> None:
        self._buffer = memoryview(bytearray(MESSAGE_BYTES_MAX))
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            if interface is not None:
                env.setdefault("UCX_NET_DEVICES", interface)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paramserver.data.nixl_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                env=env,
            )
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self._sock.setsockopt(socket.SOL_SOCKET, option, MESSAGE_BYTES_MAX)

    def fileno(self) -> int:
        """Readable when there is something to `hear`."""
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
            self._say(order, [fd for fd, _ in part])
        return self._await(Mapped, MAP_TIMEOUT_S, meanwhile)

    def peer(self, metadata: bytes) -> None:
        self._say(Peer(metadata))

    def read(self, order: Read) -> None:
        self._say(order)

    def lend(self, now: bool) -> None:
        self._say(Lend(now))

    def started(self, meanwhile: Callable[[], None] = nothing) -> None:
        self._await(Started, START_TIMEOUT_S, meanwhile)

    def unmap(self) -> None:
        self._say(Unmap())
        self._await(Unmapped, UNMAP_TIMEOUT_S, nothing)

    def hear(self) -> Answer:
        """One answer, awaited as long as the socket's timeout says. TransportFailed: its last word, or none."""
        try:
            length = self._sock.recv_into(self._buffer)
        except TimeoutError:
            raise
        except OSError as error:
            raise TransportFailed(f"a mover cannot be heard: {error}") from error
        if not length:
            raise TransportFailed("a mover died; its link is given up")
        answer: Answer = decode_json(self._buffer[:length], Answer)
        if isinstance(answer, Failed):
            raise TransportFailed(f"nixl: {answer.why}")
        return answer

    def kill(self) -> None:
        """When this returns, the process and all it had under way are gone."""
        self._sock.close()
        self._process.kill()
        self._process.wait()

    def _say(self, order: Order, fds: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self._sock, [msgspec.json.encode(order)], list(fds))
        except OSError as error:
            raise TransportFailed(f"a NIXL process takes no orders: {error}") from error

    def _await(self, kind: type[_Answer], timeout_s: float, meanwhile: Callable[[], None]) -> _Answer:
        deadline = time.monotonic() + timeout_s
        self._sock.settimeout(HEARTBEAT_S)
        while time.monotonic() < deadline:
            try:
                answer = self.hear()
            except TimeoutError:
                meanwhile()
                continue
            if isinstance(answer, kind):
                return answer
            raise TransportFailed(f"a mover said {answer} where {kind.__name__} was due")
        raise TransportFailed(f"a mover was silent for {timeout_s} s")


class NixlProcesses:
    """The movers of one relay. Threads call it."""

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
                for mover in list(threads.map(lambda _: self.take(), range(count))):
                    self._put_back(mover)
        except TransportFailed as error:
            raise Unavailable(f"--transport nixl: {error}", hint="use --transport tcp, or mend nixl here") from error

    def take(self, meanwhile: Callable[[], None] = nothing) -> NixlProcess:
        """An idle one or a new one. OutOfCapacity beyond MOVERS_MAX, TransportFailed when it does not start.

        `meanwhile` is called every HEARTBEAT_S while it starts.
        """
        with self._mutex:
            if self._closing or self.num_busy >= MOVERS_MAX:
                raise OutOfCapacity(f"{self.num_busy} movers are at work already")
            self.num_busy += 1
            while self._idle:
                if (mover := self._idle.pop()).alive():
                    return mover
                mover.kill()
        try:
            return self._start(meanwhile)
        except BaseException:
            with self._mutex:
                self.num_busy -= 1
            raise

    def give(self, mover: NixlProcess) -> None:
        """Takes it back for another link; everything it began must have ended."""
        try:
            mover.unmap()
        except TransportFailed as error:
            log.warning("%s", error)
            self.discard(mover)
        else:
            self._put_back(mover)

    def discard(self, mover: NixlProcess) -> None:
        mover.kill()
        with self._mutex:
            self.num_busy -= 1

    def close(self) -> None:
        """Ends those without work, and starts no more; links end theirs."""
        with self._mutex:
            self._closing = True
            idle, self._idle = self._idle, []
        for mover in idle:
            mover.kill()

    def _start(self, meanwhile: Callable[[], None]) -> NixlProcess:
        mover = NixlProcess(self._interface)
        try:
            mover.started(meanwhile)
        except BaseException:
            mover.kill()
            raise
        return mover

    def _put_back(self, mover: NixlProcess) -> None:
        with self._mutex:
            self.num_busy -= 1
            kept = not self._closing and len(self._idle) < self._idle_max
            if kept:
                self._idle.append(mover)
        if not kept:
            mover.kill()


def require() -> None:
    """Unavailable, with what to do, when the package is not there."""
    if not any(importlib.util.find_spec(name) for name in VARIANTS):
        raise Unavailable("--transport nixl needs the package nixl, which is not installed", hint=INSTALL)
