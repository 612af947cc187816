"""The connection of a publisher to its relay while it writes a version, and the relay's files that it maps.

Invariants:
- a thread sends signs of life, so whoever reads the tensors may take as long as they like;
- what the relay refused is raised as the relay's own error, whatever broke first on this side;
- mappings are kept from version to version, and none of a file that the relay has destroyed;
- a mapping that is dropped lets go of the relay's memory when its last writer is done, although an error that somebody
  keeps holds views of it. Not before: a writer whose bytes went nowhere would report chunks that are not there;
- a forked child, such as a data loader's, has none of the relay's memory, which could not be used again while it lives,
  nor has a program that is started;
- a descriptor is touched only until `drop`: from then on its number may be another file's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, Self

from paramserver.core.records import Manifest
from paramserver.data import frames
from paramserver.data.frames import Greeting, Header, Kind, LinkBroken
from paramserver.memory.mapping import FileMapping
from protos.errors import Conflict, LaminarError, NotFound

log = logging.getLogger(__name__)

PUBLISH_STALL_S = 30.0
MAPPINGS_MAX = 64
PRESENT_S = 0.001  # between reports: one by one, 256 chunks took 14 ms of the 80 in which two cores copied them
ALIVE_S = 1.0  # a relay takes a publisher that is silent for some seconds to be hung
REFUSAL_S = 1.0  # it was sent before the connection ended
SLOW_READ_S = 10.0  # logged then, and again each time that it has taken twice as long


class Reading(Protocol):
    """Whoever reads the tensors. `reading`: the one whose bytes are awaited, and since when; None: none is."""

    @property
    def reading(self) -> tuple[str, float] | None: ...


class MappedFile:
    """One file of the relay's, mapped. The first pass over a fresh mapping brings its pages in by `populate`.

    It counts its writers: each comes by `Mappings.map`, and goes by `leave`.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd: int | None = fd  # None: dropped
        self._map = FileMapping(fd, size_bytes)
        self._mutex = threading.Lock()
        self._num_writers = 0
        self.view = self._map.view()
        self.warm = False
        _living.add(self)

    def __len__(self) -> int:
        return len(self.view)

    def status(self) -> os.stat_result:
        assert self._fd is not None, "dropped"
        return os.fstat(self._fd)

    def populate(self, offset: int, num_bytes: int) -> None:
        """Maps the pages in one call, unless that was done: each fault by itself costs four times as much."""
        if self.warm:
            return
        with contextlib.suppress(OSError):  # a kernel without it maps them one by one
            self._map.populate(offset, num_bytes)

    def enter(self) -> Self:
        with self._mutex:
            self._num_writers += 1
        return self

    def leave(self) -> None:
        """A writer is done with it, whether or not its frames still have views."""
        with self._mutex:
            self._num_writers -= 1
            self._detach_unused()

    def drop(self) -> None:
        """Nobody else gets it."""
        with self._mutex:
            fd, self._fd = self._fd, None  # a child that is forked in between keeps it open, and harms no other file
            assert fd is not None, "dropped once"
            os.close(fd)
            self._detach_unused()

    def _detach_unused(self) -> None:
        if self._fd is None and not self._num_writers:
            self._map.detach()

    def leave_to_parent(self, null: int) -> None:
        """In a forked child, which has no other threads: `null`, which is open there, takes the descriptor's place."""
        if self._fd is not None:
            os.dup2(null, self._fd, inheritable=False)
        self._map.detach()


_living: weakref.WeakSet[MappedFile] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for place in list(_living):
        place.leave_to_parent(null)
    os.close(null)


# MADV_DONTFORK would leave holes in the child's addresses, which it may fill before the mapping's own end unmaps them.
os.register_at_fork(after_in_child=_leave_all_to_parent)


def leave(places: Iterable[MappedFile | None]) -> None:
    """A writer of these files is done."""
    for place in places:
        if place is not None:
            place.leave()


class Mappings:
    """Kept mappings of the relay's files: a fresh one costs a copy's time and a half more."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], MappedFile] = {}
        self._mutex = threading.Lock()  # a thread maps, and the event loop finds the relay gone

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def map_all(self, fds: Sequence[int], sizes: Sequence[int]) -> list[MappedFile | None]:
        """The files behind `fds`, which are closed here, for one writer to `leave`; None for an empty file."""
        places: list[MappedFile | None] = []
        try:
            for fd, size in zip(fds, sizes, strict=True):
                place = self.map(fd) if size else None
                if place is None:
                    os.close(fd)
                places.append(place)
        except BaseException:
            leave(places)
            for fd in fds[len(places) + 1 :]:
                os.close(fd)
            raise
        return places

    def map(self, fd: int) -> MappedFile:
        """The file behind `fd`, writable, for one writer to `leave`. `fd` is closed here, whatever comes of it."""
        with self._mutex:
            self._prune()
            status = os.fstat(fd)
            key = (status.st_dev, status.st_ino)
            if key in self._kept:
                os.close(fd)
                return self._kept[key].enter()
            try:
                found = MappedFile(fd, status.st_size)
            except BaseException:
                os.close(fd)
                raise
            self._kept[key] = found
            return found.enter()

    def _prune(self) -> None:
        """Drops what the relay has destroyed or resized: keeping it would hold memory outside the pool."""
        for key, mapping in list(self._kept.items()):
            status = mapping.status()
            if status.st_nlink == 0 or status.st_size != len(mapping):
                self._kept.pop(key).drop()
        while len(self._kept) > MAPPINGS_MAX:
            self._kept.pop(next(iter(self._kept))).drop()

    def close(self) -> None:
        """Drops all: the relay is gone, whose next life needs the memory, or the publisher is done with it."""
        with self._mutex:
            for mapping in self._kept.values():
                mapping.drop()
            self._kept.clear()


class PublisherConnection:
    """The connection to the relay while a version is copied; a thread sends signs of life on it.

    Chunks are reported in batches of PRESENT_S: each report takes processor time from the threads that copy.
    """

    def __init__(self, sock: socket.socket, source: Reading) -> None:
        self._sock = sock
        self._source = source
        self._mutex = threading.Lock()
        self._frames: list[bytes] = []
        self._sent_at = time.monotonic()
        self._broken = ""  # how, found by the thread of signs of life; the next to send raises it
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live, name="publish-alive", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()  # it sends nothing after DONE: the relay reads no further than that

    def present(self, headers: Iterable[Header]) -> None:
        frames = b"".join(header.pack() for header in headers)
        with self._mutex:
            self._frames.append(frames)
            if time.monotonic() - self._sent_at > PRESENT_S:
                self._flush()

    def send(self, header: Header, content: memoryview) -> None:
        with self._mutex:
            self._send(header.pack(), socket.MSG_MORE)
            self._send(content)

    def flush(self) -> None:
        with self._mutex:
            self._flush()

    def _flush(self) -> None:
        if self._frames:
            self._send(b"".join(self._frames))
        self._frames.clear()

    def _send(self, data: bytes | memoryview, flags: int = 0) -> None:
        if self._broken:
            raise LinkBroken(self._broken)
        frames.send_all(self._sock, data, flags)
        self._sent_at = time.monotonic()

    def _live(self) -> None:
        logged: tuple[float, float] = (0.0, 0.0)  # of the read last logged as slow: when it began, logged after
        while not self._over.wait(ALIVE_S):
            logged = self._log_slow(logged)
            if not self._mutex.acquire(blocking=False):
                continue  # another thread sends, which is a sign of life
            try:
                if time.monotonic() - self._sent_at > ALIVE_S / 2:
                    self._frames.append(Header(Kind.ALIVE).pack())
                    self._flush()
            except LinkBroken as error:
                self._broken = str(error)
                reading = self._source.reading
                where = f" while tensor {reading[0]!r} is read" if reading is not None else ""
                log.warning("the relay left%s: the publish ends when that returns", where)
                return
            finally:
                self._mutex.release()

    def _log_slow(self, logged: tuple[float, float]) -> tuple[float, float]:
        reading = self._source.reading
        if reading is None:
            return logged
        name, since = reading
        took_s = time.monotonic() - since
        if took_s < max(SLOW_READ_S, 2 * logged[1] if logged[0] == since else 0.0):
            return logged
        log.warning("tensor %r has been read for %.1f s: the publish goes on when its read() returns", name, took_s)
        return since, took_s


def refusal(sock: socket.socket) -> LaminarError | None:
    """The refusal that the relay sent before it ended the connection, if any: it is read only once sending failed."""
    try:
        sock.settimeout(REFUSAL_S)
        header = frames.receive_header(sock)
        if header.kind is not Kind.REFUSED:
            return None
        found = frames.receive_refusal(sock, header)
    except (LinkBroken, OSError) as error:
        log.debug("the relay left without a refusal: %s", str(error))
        return None
    return LinkBroken(str(found)) if isinstance(found, Conflict | NotFound) else found


def finish(sock: socket.socket) -> None:
    """Sends DONE and waits until the relay has taken everything in."""
    frames.send_all(sock, Header(Kind.DONE).pack())
    header = frames.receive_header(sock)
    if header.kind is Kind.REFUSED:
        raise frames.receive_refusal(sock, header)
    if header.kind is not Kind.DONE:
        raise LinkBroken(f"expected DONE, got {header.kind.name}")


class NotItsSocket(LinkBroken):
    """The relay that is meant does not listen there: hosts with the same paths have sockets at the same place."""


def connect_unix(path: Path, greeting: Greeting) -> tuple[socket.socket, Manifest]:
    """A connection to the relay instance `greeting.to` over the unix socket at `path`, and the manifest with which it
    welcomes. NotItsSocket unless that very instance does."""
    if not greeting.to:
        raise NotItsSocket("a relay of an earlier release does not prove that the socket is its own")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(PUBLISH_STALL_S)
        sock.connect(str(path))
        frames.send_greeting(sock, greeting)
        welcome = frames.receive_welcome(sock, silence_s=PUBLISH_STALL_S)
        if welcome.instance != greeting.to:
            raise NotItsSocket("another relay listens there")
    except (OSError, LaminarError) as error:
        sock.close()
        raise NotItsSocket(str(error)) from error
    return sock, welcome.manifest


def receive_fds(sock: socket.socket, num: int) -> list[int]:
    fds: list[int] = []
    try:
        while len(fds) < num:
            data, batch, _, _ = socket.recv_fds(sock, 1, frames.FDS_PER_MESSAGE)
            fds += batch
            for fd in batch:
                os.set_inheritable(fd, False)  # Python's `recv_fds` takes no MSG_CMSG_CLOEXEC
            if not data:
                raise LinkBroken("the relay closed the connection before it passed all descriptors")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds
