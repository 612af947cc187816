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
import logging
import os
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from paramserver.core.layout import FileLayout
from paramserver.core.records import Chunk, ChunkMap
from paramserver.data import frames, stream
from paramserver.data.frames import Greeting, Header, Kind, LinkBroken
from paramserver.data.publisher_link import (
    PUBLISH_STALL_S,
    MappedFile,
    Mappings,
    PublisherConnection,
    connect_unix,
    finish,
    leave,
    receive_fds,
    refusal,
)
from paramserver.data.secured import DataAccess, open_connection
from protos.errors import Corrupt, InvalidRequest, LaminarError, OutOfCapacity, Unavailable

log = logging.getLogger(__name__)

COPY_THREADS_MAX = 4
RUN_BYTES_MAX = 32 << 20  # copied and reported at once; two threads take 3 ms, a hop of 5 GB/s twice that
CHUNKS_PER_THREAD_MIN = 4

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
        except InvalidRequest:
            raise
        except LaminarError as error:  # or it would be taken for the relay's, and the version announced again and again
            raise InvalidRequest(f"reading tensor {segment.what!r} failed: {error}") from error
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


def write_mapped(path: Path, greeting: Greeting, image: Image, mappings: Mappings) -> list[bytes]:
    """Writes through the relay's own descriptors. Returns the chunk digests; LinkBroken when it went away, NotItsSocket
    where it is not the one at `path`."""
    sock, manifest = connect_unix(path, greeting)
    with sock:
        sizes = [file.size_bytes for file in manifest.files]
        places = mappings.map_all(receive_fds(sock, len(sizes)), sizes)
        try:
            with PublisherConnection(sock, image) as connection:
                digests = _copy(image, places, connection)
            finish(sock)
        except LinkBroken as error:
            if found := refusal(sock):
                raise found from error
            raise
        finally:
            leave(places)
        return digests


def num_copy_threads(num_chunks: int = 1 << 30) -> int:
    """How many threads copy a version: memory is faster than one core, and a small version is not worth them."""
    return max(1, min(COPY_THREADS_MAX, len(os.sched_getaffinity(0)), num_chunks // CHUNKS_PER_THREAD_MIN))


def _copy(image: Image, places: Sequence[MappedFile | None], connection: PublisherConnection) -> list[bytes]:
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


def write_tcp(
    address: str, greeting: Greeting, image: Image, *, attempts: int = 3, access: DataAccess | None = None
) -> list[bytes]:
    """Streams to the data port; after a broken connection only what is missing there is sent again. A port with too
    many connections is asked again after a while."""
    digests: dict[int, bytes] = {}
    for attempt in range(1, attempts + 1):
        try:
            _stream(address, greeting, image, digests, access)
            break
        except (LinkBroken, Corrupt, OutOfCapacity) as error:
            if attempt == attempts:
                raise Unavailable(f"the data port {address} failed {attempts} times, last: {error}") from error
            if isinstance(error, OutOfCapacity):
                time.sleep(error.retry_after_s)
    return [digests[index] for index in image.indices]


def _stream(
    address: str, greeting: Greeting, image: Image, digests: dict[int, bytes], access: DataAccess | None
) -> None:
    sock, _ = open_connection(address, PUBLISH_STALL_S, greeting, access)
    with sock:
        welcome = frames.receive_welcome(sock, silence_s=PUBLISH_STALL_S)
        buffer = memoryview(bytearray(image.chunks.chunk_bytes))
        missing = {index for first, end in welcome.missing for index in range(first, end)}
        try:
            with PublisherConnection(sock, image) as connection:
                for index in image.indices:
                    if index in missing:
                        chunk = image.chunks.chunk(index)
                        digests[index] = image.fill(chunk, buffer)
                        header = Header(Kind.DATA, index, 0, chunk.length, digests[index])
                        connection.send(header, buffer[: chunk.length])
            finish(sock)
        except LinkBroken as error:
            if found := refusal(sock):
                raise found from error
            raise
