"""Writing a version whose tensors come one by one, in any order, and are gone when the next one comes.

Invariants:
- every byte is given once, and nothing of it is kept when `write` returns;
- a chunk that lies within one tensor is digested while it is copied. The parts of a chunk that several tensors share
  wait for each other where the chunk belongs; it is digested there when the last part is in;
- a chunk is reported to the relay once, with its digest: the chain has it while later tensors are still being made.

What waits: on the relay's host nothing besides the relay's own memory; over the network a buffer of one chunk for each
boundary between two tensors of which one has come. Tensors that come in the order of their names keep that at one.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paramserver.core.layout import FileLayout
from paramserver.core.records import Chunk, ChunkMap, digest
from paramserver.data import frames, stream
from paramserver.data.frames import Greeting, Header, Kind, LinkBroken
from paramserver.data.publish import CHUNKS_PER_THREAD_MIN, RUN_BYTES_MAX, num_copy_threads
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
from protos.errors import InvalidRequest


class Sink(Protocol):
    """Where chunks go. `whole` and `joined` return the digests of the chunks that they send on."""

    def place(self, chunk: Chunk) -> memoryview:
        """Where the parts of a chunk wait for each other; the same memory until it is joined."""

    def whole(self, chunks: Sequence[Chunk], data: memoryview) -> list[bytes]:
        """Takes chunks that lie side by side, with all their bytes."""

    def joined(self, chunk: Chunk) -> bytes:
        """Takes a chunk whose parts all lie in its `place`."""

    def close(self) -> None: ...


class MappedSink:
    """Chunks go into the relay's files, mapped here."""

    def __init__(self, places: Sequence[MappedFile | None], connection: PublisherConnection) -> None:
        self._places = places
        self._connection = connection
        self._num_threads = num_copy_threads()
        self._threads = ThreadPoolExecutor(self._num_threads, "publish-copy")

    def place(self, chunk: Chunk) -> memoryview:
        return self._file(chunk).view[chunk.offset : chunk.offset + chunk.length]

    def whole(self, chunks: Sequence[Chunk], data: memoryview) -> list[bytes]:
        runs = self._runs(chunks, data)
        found = map(self._copy, runs) if len(runs) == 1 else self._threads.map(self._copy, runs)
        return [one for digests in found for one in digests]

    def joined(self, chunk: Chunk) -> bytes:
        found = digest(self.place(chunk))
        self._connection.present([Header(Kind.PRESENT, chunk.index, 0, chunk.length, found)])
        return found

    def close(self) -> None:
        self._threads.shutdown()

    def _file(self, chunk: Chunk) -> MappedFile:
        place = self._places[chunk.file]
        assert place is not None, "an empty file has no chunks"
        return place

    def _runs(self, chunks: Sequence[Chunk], data: memoryview) -> list[tuple[Sequence[Chunk], memoryview]]:
        """Shares for the threads that copy, none longer than RUN_BYTES_MAX."""
        length = chunks[0].length
        share = len(chunks) if len(chunks) < 2 * CHUNKS_PER_THREAD_MIN else -(-len(chunks) // self._num_threads)
        share = max(1, min(share, RUN_BYTES_MAX // length))
        first = chunks[0].offset
        return [
            (run, data[run[0].offset - first : run[-1].offset + run[-1].length - first])
            for run in (chunks[at : at + share] for at in range(0, len(chunks), share))
        ]

    def _copy(self, run: tuple[Sequence[Chunk], memoryview]) -> list[bytes]:
        chunks, data = run
        place, first = self._file(chunks[0]), chunks[0].offset
        place.populate(first, len(data))
        pieces = [[data[one.offset - first : one.offset + one.length - first]] for one in chunks]
        found = stream.copy(place.view[first : first + len(data)], pieces)
        self._connection.present(
            Header(Kind.PRESENT, one.index, 0, one.length, its) for one, its in zip(chunks, found, strict=True)
        )
        return found


class TcpSink:
    """Chunks go over the data port; those within one tensor straight from its memory."""

    def __init__(self, connection: PublisherConnection) -> None:
        self._connection = connection
        self._parted: dict[int, memoryview] = {}

    def place(self, chunk: Chunk) -> memoryview:
        if chunk.index not in self._parted:
            self._parted[chunk.index] = memoryview(bytearray(chunk.length))
        return self._parted[chunk.index]

    def whole(self, chunks: Sequence[Chunk], data: memoryview) -> list[bytes]:
        first = chunks[0].offset
        return [self._send(one, data[one.offset - first : one.offset + one.length - first]) for one in chunks]

    def joined(self, chunk: Chunk) -> bytes:
        return self._send(chunk, self._parted.pop(chunk.index))

    def close(self) -> None:
        self._parted.clear()

    def _send(self, chunk: Chunk, data: memoryview) -> bytes:
        found = digest(data)
        self._connection.send(Header(Kind.DATA, chunk.index, 0, chunk.length, found), data)
        return found


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies: the number of its file, its first byte there, and its size."""

    file: int
    offset: int
    size_bytes: int


class Assembly:
    """The chunks of one publisher's files, and which bytes of them are still to come. Owned by one thread."""

    def __init__(self, sizes: Sequence[int], mine: Mapping[int, FileLayout], chunk_bytes: int) -> None:
        self.chunks = ChunkMap(sizes, chunk_bytes)
        self.indices = [index for file in sorted(mine) for index in self.chunks.range_of(file)]
        self.digests: dict[int, bytes] = {}
        self._missing = {index: self.chunks.chunk(index).length for index in self.indices}
        self._places = {
            tensor.name: _Place(number, tensor.offset, tensor.size_bytes)
            for number, file in mine.items()
            for tensor in file.tensors
        }
        self._given = dict.fromkeys((name for name, place in self._places.items() if place.size_bytes), 0)

    def heads(self, mine: Mapping[int, FileLayout], sink: Sink) -> None:
        """Takes the headers of the files."""
        for number, file in sorted(mine.items()):
            if file.head:
                self._take(number, 0, memoryview(file.head), sink)

    def take(self, name: str, data: memoryview, sink: Sink) -> None:
        """Takes the next bytes of a tensor. InvalidRequest for a name or bytes beyond what was announced."""
        place = self._places.get(name)
        if place is None:
            raise InvalidRequest(f"tensor {name!r} was not announced", hint="its name has to be in the manifest")
        at = self._given.get(name, 0)
        if at + len(data) > place.size_bytes or (not data and at == place.size_bytes and place.size_bytes):
            raise InvalidRequest(
                f"tensor {name!r} came with more than its {place.size_bytes} bytes", hint="give each tensor once"
            )
        if data:
            self._take(place.file, place.offset + at, data, sink)
            self._given[name] = at + len(data)

    def take_chunks(self, first: int, num: int, data: memoryview, sink: Sink) -> None:
        """Takes `num` whole chunks of one file from number `first` on; writers of one file agree on who gives which."""
        chunks = [self.chunks.chunk(index) for index in range(first, first + num)]
        digests = sink.whole(chunks, data)
        self.digests.update((one.index, its) for one, its in zip(chunks, digests, strict=True))

    def pieces(self, name: str, bytes_max: int) -> Iterator[tuple[int, int]]:
        """Ranges of a tensor's bytes to be given one after the other; they end where chunks end, as far as they can."""
        place, chunk_bytes = self._places[name], self.chunks.chunk_bytes
        start = 0
        while start < place.size_bytes:
            end = place.offset + start + max(bytes_max, chunk_bytes)
            end = min(end - end % chunk_bytes - place.offset, place.size_bytes)
            yield start, end
            start = end

    def absent(self) -> list[str]:
        """Names of tensors that have not come, or not whole."""
        return [name for name, at in self._given.items() if at < self._places[name].size_bytes]

    def _take(self, file: int, start: int, data: memoryview, sink: Sink) -> None:
        first, size = self.chunks.range_of(file).start, self.chunks.chunk_bytes
        indices = range(first + start // size, first + (start + len(data) - 1) // size + 1)
        chunks = [self.chunks.chunk(index) for index in indices]
        inner = [one for one in chunks if start <= one.offset and one.offset + one.length <= start + len(data)]
        for one in chunks:
            if not inner or not inner[0].index <= one.index <= inner[-1].index:
                self._part(one, start, data, sink)
        if inner:
            whole = data[inner[0].offset - start : inner[-1].offset + inner[-1].length - start]
            digests = sink.whole(inner, whole)
            self.digests.update((one.index, its) for one, its in zip(inner, digests, strict=True))

    def _part(self, chunk: Chunk, start: int, data: memoryview, sink: Sink) -> None:
        low, high = max(chunk.offset, start), min(chunk.offset + chunk.length, start + len(data))
        sink.place(chunk)[low - chunk.offset : high - chunk.offset] = data[low - start : high - start]
        self._missing[chunk.index] -= high - low
        if not self._missing[chunk.index]:
            self.digests[chunk.index] = sink.joined(chunk)


@dataclass
class _Progress:
    """For the log, when a tensor takes long to be made. Not the writer: it would be in a cycle with its connection."""

    reading: tuple[str, float] | None = None


class StreamWriter:
    """A version being written. One thread calls `write` and `finish`; any thread may call `interrupt`."""

    def __init__(
        self, sock: socket.socket, assembly: Assembly, places: Sequence[MappedFile | None] | None = None
    ) -> None:
        """`places`: the relay's files, mapped; None: the bytes go over `sock`."""
        self._sock = sock
        self._assembly = assembly
        self._places = places
        self._progress = _Progress()
        self._connection = PublisherConnection(sock, self._progress)
        self._sink: Sink = TcpSink(self._connection) if places is None else MappedSink(places, self._connection)
        self._mutex = threading.Lock()
        self._closed = False
        self._connection.__enter__()

    def begin(self, mine: Mapping[int, FileLayout]) -> None:
        with self._refusals():
            self._assembly.heads(mine, self._sink)

    def pieces(self, name: str, bytes_max: int) -> Iterator[tuple[int, int]]:
        """See `Assembly.pieces`."""
        return self._assembly.pieces(name, bytes_max)

    def write(self, name: str, data: memoryview) -> None:
        """Writes the next bytes of tensor `name`, whole or in pieces that follow each other.

        Raises InvalidRequest for what was not announced, LinkBroken when the relay is gone, else its refusal.
        """
        self._progress.reading = None
        with self._refusals():
            self._assembly.take(name, data.cast("B"), self._sink)
        self._progress.reading = (f"the one after {name}", time.monotonic())

    @property
    def chunks(self) -> ChunkMap:
        return self._assembly.chunks

    @property
    def digests(self) -> Mapping[int, bytes]:
        """Of the chunks that were written here."""
        return self._assembly.digests

    def write_chunks(self, first: int, num: int, data: memoryview) -> None:
        """Writes `num` whole chunks of one file, from number `first` on. Raises like `write`."""
        self._progress.reading = None
        with self._refusals():
            self._assembly.take_chunks(first, num, data, self._sink)
        self._progress.reading = (f"the one after chunk {first + num - 1}", time.monotonic())

    def finish(self) -> list[bytes]:
        """Waits until the relay has all; the digests of this publisher's chunks, in order."""
        self._progress.reading = None
        if absent := self._assembly.absent():
            more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
            raise InvalidRequest(
                f"announced tensors did not come: {', '.join(map(repr, absent[:3]))}{more}",
                hint="the iterator has to give every tensor of the manifest, once",
            )
        with self._refusals():
            self._connection.flush()
            self._connection.__exit__()
            finish(self._sock)
        for place in self._places or ():
            if place is not None and len(self._assembly.indices) == self._assembly.chunks.num_chunks:
                place.warm = True
        return [self._assembly.digests[index] for index in self._assembly.indices]

    def interrupt(self) -> None:
        """Makes a `write` or `finish` that waits for the relay fail soon, and all that follow."""
        with self._mutex:
            if not self._closed:
                with contextlib.suppress(OSError):  # the other side has ended it
                    self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection; may be called twice."""
        self._connection.__exit__()
        self._sink.close()
        with self._mutex:
            if not self._closed:
                leave(self._places or ())
            self._closed = True
            self._sock.close()

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except LinkBroken as error:
            if found := refusal(self._sock):
                raise found from error
            raise


def open_mapped(path: Path, greeting: Greeting, mine: Mapping[int, FileLayout], mappings: Mappings) -> StreamWriter:
    """Writes through the relay's own descriptors, which it passes over the unix socket at `path`. NotItsSocket where it
    is not the one there."""
    sock, manifest = connect_unix(path, greeting)
    try:
        sizes = [file.size_bytes for file in manifest.files]
        places = mappings.map_all(receive_fds(sock, len(sizes)), sizes)
        return _begun(StreamWriter(sock, Assembly(sizes, mine, manifest.chunk_bytes), places), mine)
    except BaseException:
        sock.close()
        raise


def open_tcp(
    address: str, greeting: Greeting, mine: Mapping[int, FileLayout], *, access: DataAccess | None = None
) -> StreamWriter:
    """Writes to the data port at `address`."""
    sock, _ = open_connection(address, PUBLISH_STALL_S, greeting, access)
    try:
        manifest = frames.receive_welcome(sock, silence_s=PUBLISH_STALL_S).manifest
        sizes = [file.size_bytes for file in manifest.files]
        return _begun(StreamWriter(sock, Assembly(sizes, mine, manifest.chunk_bytes)), mine)
    except BaseException:
        sock.close()
        raise


def _begun(writer: StreamWriter, mine: Mapping[int, FileLayout]) -> StreamWriter:
    try:
        writer.begin(mine)
    except BaseException:
        writer.close()
        raise
    return writer
