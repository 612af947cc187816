"""The publisher's side of moving bytes: into the relay's mapped files, or over the data port.

Invariants:
- every byte is copied once, and digested while it is copied;
- several threads copy, each a run of chunks at a time, in the order in which the chain wants them;
- no chunk that is whole waits for the `read` of another tensor, unless that one lies in memory already;
- a tensor's `read` is called when its first byte is due, and once: the view that it gave is kept until the next;
- a `read` may take as long as it likes: the relay gets signs of life meanwhile, and the log names the tensor.

Why one pass: a copy is bound by memory bandwidth. A digest of its own would read every byte again; in the same pass it
reads them from the core's cache. And the digest is that of the source, so a bad copy cannot match it.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from paramserver.core.layout import FileLayout
from paramserver.core.records import Chunk, ChunkMap
from paramserver.data import frames, stream
from paramserver.data.frames import Greeting, Header, Kind, LinkBroken
from paramserver.memory.mapping import FileMapping
from protos.errors import Conflict, Corrupt, InvalidRequest, LaminarError, NotFound, Unavailable

log = logging.getLogger(__name__)

PUBLISH_STALL_S = 30.0
MAPPINGS_MAX = 64
COPY_THREADS_MAX = 4
RUN_BYTES_MAX = 32 << 20  # copied and reported at once; two threads take 3 ms, a hop of 5 GB/s twice that
CHUNKS_PER_THREAD_MIN = 4
PRESENT_S = 0.001  # between reports: one by one, 256 chunks took 14 ms of the 80 in which two cores copied them
ALIVE_S = 1.0  # a relay takes a publisher that is silent for some seconds to be hung
REFUSAL_S = 1.0  # it was sent before the connection ended
SLOW_READ_S = 10.0  # logged then, and again each time that it has taken twice as long

Read = Callable[[], memoryview]


@dataclass(frozen=True, slots=True)
class _Segment:
    offset: int
    size_bytes: int
    read: Read
    what: str
    resident: bool = False


@dataclass(frozen=True, slots=True)
class _Run:
    """Chunks that lie side by side in one file, and the pieces of each."""

    chunks: list[Chunk]
    pieces: list[list[memoryview]]

    @property
    def start(self) -> int:
        return self.chunks[0].offset

    @property
    def end(self) -> int:
        return self.chunks[-1].offset + self.chunks[-1].length


class Image:
    """The bytes that one publisher writes of a version, readable by chunk in order, by one thread at a time.

    `sizes` of all files, `mine` by file number: a rank among several writes but its own. `resident`: tensors whose
    bytes lie in memory, so that their `read` returns at once.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        mine: Mapping[int, FileLayout],
        reads: Mapping[str, Read],
        chunk_bytes: int,
        resident: Container[str] = (),
    ) -> None:
        self.chunks = ChunkMap(sizes, chunk_bytes)
        self.indices = [index for file in sorted(mine) for index in self.chunks.range_of(file)]
        self._segments = {number: _segments(file, reads, resident) for number, file in mine.items()}
        self._offsets = {n: [segment.offset for segment in segments] for n, segments in self._segments.items()}
        self._last: tuple[_Segment, memoryview] | None = None
        self.reading: tuple[str, float] | None = None  # the tensor whose `read` was called and has not returned, since

    def pieces(self, chunk: Chunk) -> Iterator[memoryview]:
        """The chunk's bytes, a piece of each tensor that has some of them."""
        position, end = chunk.offset, chunk.offset + chunk.length
        segments, number = self._segments[chunk.file], bisect.bisect(self._offsets[chunk.file], chunk.offset) - 1
        while position < end:
            segment = segments[number]
            start = position - segment.offset
            num = min(segment.size_bytes - start, end - position)
            if num > 0:
                yield self._load(segment)[start : start + num]
                position += num
            number += 1

    def fill(self, chunk: Chunk, target: memoryview) -> bytes:
        """Copies the chunk into `target` and returns the digest of what was read: a bad copy will not match it."""
        return stream.through_caches(target[: chunk.length], list(self.pieces(chunk)))

    def runs(self, num_threads: int) -> Iterator[_Run]:
        """All chunks in order, in runs to be copied by so many threads.

        Between two runs Python takes some 60 µs of processor time, as a run that was copied evicts it from the caches:
        so runs are long. But the first ones, as the chain waits for them, and the last ones, or one thread would copy
        the whole rest while the others have nothing to do.
        """
        length_max, length, num_left = max(1, RUN_BYTES_MAX // self.chunks.chunk_bytes), 1, len(self.indices)
        chunks = map(self.chunks.chunk, self.indices)
        following = next(chunks, None)
        while following is not None:
            run, share = [following], num_left // (2 * num_threads)
            while (following := next(chunks, None)) and len(run) < min(length, share):
                if not self._goes_on(run[-1], following):
                    break
                run.append(following)
            yield _Run(run, [list(self.pieces(chunk)) for chunk in run])
            num_left, length = num_left - len(run), min(2 * length, length_max)

    def _goes_on(self, chunk: Chunk, following: Chunk) -> bool:
        """Whether `following` is of the same file, and waits for no `read` that `chunk` does not wait for."""
        if chunk.file != following.file:
            return False
        offsets, segments = self._offsets[chunk.file], self._segments[chunk.file]
        ends = (bisect.bisect(offsets, one.offset + one.length - 1) for one in (chunk, following))
        return all(segment.resident for segment in segments[slice(*ends)])

    def _load(self, segment: _Segment) -> memoryview:
        if self._last is not None and self._last[0] is segment:
            return self._last[1]
        self.reading = (segment.what, time.monotonic())
        try:
            view = segment.read().cast("B")
        finally:
            self.reading = None
        if len(view) != segment.size_bytes:
            raise InvalidRequest(
                f"tensor {segment.what!r} gave {len(view)} bytes, its shape and dtype make {segment.size_bytes}",
                hint="read() must return the whole contiguous tensor",
            )
        self._last = (segment, view)
        return view


def _segments(file: FileLayout, reads: Mapping[str, Read], resident: Container[str]) -> list[_Segment]:
    head = _Segment(0, len(file.head), lambda: memoryview(file.head), file.name, resident=True)
    tensors = [
        _Segment(place.offset, place.size_bytes, reads[place.name], place.name, place.name in resident)
        for place in file.tensors
    ]
    return [head, *(segment for segment in tensors if segment.size_bytes)]


class MappedFile:
    """One file of the relay's, mapped. The first pass over a fresh mapping brings its pages in by `populate`."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        self._map = FileMapping(fd, size_bytes)
        self.view = self._map.view()
        self.warm = False

    def __len__(self) -> int:
        return len(self.view)

    def status(self) -> os.stat_result:
        return os.fstat(self._fd)

    def populate(self, offset: int, num_bytes: int) -> None:
        """Maps the pages in one call, unless that was done: each fault by itself costs four times as much."""
        if self.warm:
            return
        with contextlib.suppress(OSError):  # a kernel without it maps them one by one
            self._map.populate(offset, num_bytes)

    def drop(self) -> None:
        os.close(self._fd)  # the mapping goes when its last view does


class Mappings:
    """Kept mappings of the relay's files: a fresh one costs a copy's time and a half more."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], MappedFile] = {}
        self._mutex = threading.Lock()  # a thread maps, and the event loop finds the relay gone

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def map(self, fd: int) -> MappedFile:
        """The file behind `fd`, which this object owns from now on, writable."""
        with self._mutex:
            self._prune()
            status = os.fstat(fd)
            key = (status.st_dev, status.st_ino)
            if key in self._kept:
                os.close(fd)
            else:
                self._kept[key] = MappedFile(fd, status.st_size)
            return self._kept[key]

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


def write_mapped(path: Path, greeting: Greeting, image: Image, mappings: Mappings) -> list[bytes]:
    """Writes through the relay's own descriptors. Returns the chunk digests; LinkBroken when it went away."""
    with _unix(path) as sock:
        frames.send_greeting(sock, greeting)
        welcome = frames.receive_welcome(sock, silence_s=PUBLISH_STALL_S)
        sizes = [file.size_bytes for file in welcome.manifest.files]
        places = [
            mappings.map(fd) if size else None for fd, size in zip(_receive_fds(sock, len(sizes)), sizes, strict=True)
        ]
        try:
            with _Connection(sock, image) as connection:
                digests = _copy(image, places, connection)
            _finish(sock)
        except LinkBroken as error:
            if refusal := _refusal(sock):
                raise refusal from error
            raise
        return digests


def num_copy_threads(num_chunks: int = 1 << 30) -> int:
    """How many threads copy a version: memory is faster than one core, and a small version is not worth them."""
    return max(1, min(COPY_THREADS_MAX, len(os.sched_getaffinity(0)), num_chunks // CHUNKS_PER_THREAD_MIN))


class _Connection:
    """The connection to the relay while a version is copied; a thread sends signs of life on it.

    Chunks are reported in batches of PRESENT_S: each report takes processor time from the threads that copy.
    """

    def __init__(self, sock: socket.socket, image: Image) -> None:
        self._sock = sock
        self._image = image
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
                reading = self._image.reading
                where = f" while tensor {reading[0]!r} is read" if reading is not None else ""
                log.warning("the relay left%s: the publish ends when that returns", where)
                return
            finally:
                self._mutex.release()

    def _log_slow(self, logged: tuple[float, float]) -> tuple[float, float]:
        reading = self._image.reading
        if reading is None:
            return logged
        name, since = reading
        took_s = time.monotonic() - since
        if took_s < max(SLOW_READ_S, 2 * logged[1] if logged[0] == since else 0.0):
            return logged
        log.warning("tensor %r has been read for %.1f s: the publish goes on when its read() returns", name, took_s)
        return since, took_s


def _copy(image: Image, places: Sequence[MappedFile | None], connection: _Connection) -> list[bytes]:
    """Copies and hashes every chunk, and reports each to the relay; digests in the order of `image.indices`."""
    digests: dict[int, bytes] = {}
    num_threads = num_copy_threads(len(image.indices))
    runs = image.runs(num_threads)
    mutex = threading.Lock()
    failed = threading.Event()

    def copy() -> None:
        try:
            while not failed.is_set():
                with mutex:
                    run = next(runs, None)
                if run is None:
                    return
                place = places[run.chunks[0].file]
                assert place is not None, "an empty file has no chunks"
                place.populate(run.start, run.end - run.start)
                found = stream.copy(place.view[run.start : run.end], run.pieces)
                digests.update((chunk.index, digest) for chunk, digest in zip(run.chunks, found, strict=True))
                connection.present(
                    Header(Kind.PRESENT, chunk.index, 0, chunk.length, digest)
                    for chunk, digest in zip(run.chunks, found, strict=True)
                )
        except BaseException:
            failed.set()
            raise

    if num_threads == 1:
        copy()
    else:
        with ThreadPoolExecutor(num_threads, "publish-copy") as threads:
            for _ in threads.map(lambda _: copy(), range(num_threads)):  # keeps no future, whose error has this frame
                pass
    connection.flush()
    for place in places:
        if place is not None and len(image.indices) == image.chunks.num_chunks:  # a rank touches its own chunks
            place.warm = True
    return [digests[index] for index in image.indices]


def write_tcp(address: str, greeting: Greeting, image: Image, *, attempts: int = 3) -> list[bytes]:
    """Streams to the data port; after a broken connection only what is missing there is sent again."""
    digests: dict[int, bytes] = {}
    for attempt in range(1, attempts + 1):
        try:
            _stream(address, greeting, image, digests)
            break
        except (LinkBroken, Corrupt) as error:
            if attempt == attempts:
                raise Unavailable(f"the data port {address} failed {attempts} times, last: {error}") from error
    return [digests[index] for index in image.indices]


def _stream(address: str, greeting: Greeting, image: Image, digests: dict[int, bytes]) -> None:
    with frames.connect(address, PUBLISH_STALL_S) as sock:
        frames.send_greeting(sock, greeting)
        welcome = frames.receive_welcome(sock, silence_s=PUBLISH_STALL_S)
        buffer = memoryview(bytearray(image.chunks.chunk_bytes))
        missing = {index for first, end in welcome.missing for index in range(first, end)}
        try:
            with _Connection(sock, image) as connection:
                for index in image.indices:
                    if index in missing:
                        chunk = image.chunks.chunk(index)
                        digests[index] = image.fill(chunk, buffer)
                        header = Header(Kind.DATA, index, 0, chunk.length, digests[index])
                        connection.send(header, buffer[: chunk.length])
            _finish(sock)
        except LinkBroken as error:
            if refusal := _refusal(sock):
                raise refusal from error
            raise


def _refusal(sock: socket.socket) -> LaminarError | None:
    """The refusal that the relay sent before it ended the connection, if any: it is read only once sending failed."""
    try:
        sock.settimeout(REFUSAL_S)
        header = frames.receive_header(sock)
        if header.kind is not Kind.REFUSED:
            return None
        refusal = frames.receive_refusal(sock, header)
    except (LinkBroken, OSError) as error:
        log.debug("the relay left without a refusal: %s", str(error))
        return None
    return LinkBroken(str(refusal)) if isinstance(refusal, Conflict | NotFound) else refusal


def _finish(sock: socket.socket) -> None:
    """Sends DONE and waits until the relay has taken everything in."""
    frames.send_all(sock, Header(Kind.DONE).pack())
    header = frames.receive_header(sock)
    if header.kind is Kind.REFUSED:
        raise frames.receive_refusal(sock, header)
    if header.kind is not Kind.DONE:
        raise LinkBroken(f"expected DONE, got {header.kind.name}")


def _unix(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(PUBLISH_STALL_S)
        sock.connect(str(path))
    except OSError as error:
        sock.close()
        raise LinkBroken(f"cannot connect to {path}: {error}") from error
    return sock


def _receive_fds(sock: socket.socket, num: int) -> list[int]:
    fds: list[int] = []
    while len(fds) < num:
        data, batch, _, _ = socket.recv_fds(sock, 1, frames.FDS_PER_MESSAGE)
        if not data:
            raise LinkBroken("the relay closed the connection before it passed all descriptors")
        fds += batch
    return fds
