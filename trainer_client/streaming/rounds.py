"""The rounds of a sharded publish: what moves between ranks, and what this one writes.

Invariants: `one` never stops in the middle of what other ranks wait for; after an error it sends zeros, and writes no
more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import ParamSpec, TypeVar

from paramserver.client import PLAIN, StreamedVersion
from trainer_client.streaming.beside import Beside
from trainer_client.streaming.ranks import TorchRanks
from trainer_client.streaming.shards import LocalBytes
from trainer_client.streaming.shares import HEAD, Extent, Piece
from trainer_client.streaming.staging import STAGING_BYTES

P = ParamSpec("P")
T = TypeVar("T")


class Rounds:
    """What one rank does of a version. `failed`: its first error."""

    def __init__(self, version: StreamedVersion, ranks: TorchRanks, local: LocalBytes, others: Beside) -> None:
        """`others`: what is written besides the trainer's tensors; nothing but on rank 0."""
        self._version, self._ranks, self._local = version, ranks, local
        self._others: Mapping[str, Callable[[], memoryview]] = {
            **{source.name: source.read for source in others.tensors},
            **{PLAIN + file.name: file.read for file in others.files},
        }
        chunk_bytes = version.chunks.chunk_bytes
        self._run_bytes = max(1, STAGING_BYTES // chunk_bytes) * chunk_bytes
        self.failed: BaseException | None = None

    def one(self, pieces: Sequence[Piece], gathered: Collection[str]) -> None:
        """Gathers, swaps and writes what these pieces need of it. `gathered`: tensors that no rank has rows of."""
        self._local.gather({extent.name for piece in pieces for extent in piece.extents if extent.name in gathered})
        received = self._swap(pieces)
        for piece in pieces:
            if piece.owner == self._ranks.index:
                parts = [self._part(piece, extent, received) for extent in piece.extents]
                self._guarded(self._write, piece, parts)

    def _swap(self, pieces: Sequence[Piece]) -> list[Iterator[memoryview]] | None:
        """For each rank what it sent to this one, extent by extent; None when nothing moves."""
        moving = [(piece, one) for piece in pieces for one in piece.extents if one.moves_to(piece.owner)]
        if not moving:
            return None
        me, sends = self._ranks.index, [list[memoryview]() for _ in range(self._ranks.count)]
        lengths = [list[int]() for _ in range(self._ranks.count)]
        for piece, extent in moving:
            if extent.holder == me:
                sends[piece.owner].append(self._read(piece, extent))
            if piece.owner == me:
                lengths[extent.holder].append(extent.num_bytes)
        found = self._ranks.swap(sends, [sum(one) for one in lengths])
        return [_cut(whole, parts) for whole, parts in zip(found, lengths, strict=True)]

    def _part(self, piece: Piece, extent: Extent, received: list[Iterator[memoryview]] | None) -> memoryview | None:
        """What another rank sent; None for what lies here."""
        if not extent.moves_to(piece.owner):
            return None
        assert received is not None, "what moves was swapped"
        return next(received[extent.holder])

    def _write(self, piece: Piece, parts: Sequence[memoryview | None]) -> None:
        if len(parts) == 1:
            self._write_run(piece)
            return
        whole = bytearray()
        for extent, part in zip(piece.extents, parts, strict=True):
            whole += self._bytes_of(piece, extent) if part is None else part
        self._version.write_chunks(piece.first, 1, memoryview(whole))

    def _write_run(self, piece: Piece) -> None:
        """Chunks of one extent that lies here, from where it lies."""
        (extent,), chunk_bytes = piece.extents, self._version.chunks.chunk_bytes
        if extent.name == HEAD or extent.name in self._others:
            self._version.write_chunks(piece.first, piece.num, self._bytes_of(piece, extent))
            return
        for before, data in self._local.pieces(extent.name, extent.start, extent.end, self._run_bytes):
            num = -(-len(data) // chunk_bytes)
            self._version.write_chunks(piece.first + before // chunk_bytes, num, data)

    def _read(self, piece: Piece, extent: Extent) -> memoryview:
        """The bytes for another rank, or zeros: it waits for as many, whatever fails here."""
        found = self._guarded(self._bytes_of, piece, extent)
        return memoryview(bytes(extent.num_bytes)) if found is None else found

    def _bytes_of(self, piece: Piece, extent: Extent) -> memoryview:
        if extent.name == HEAD:
            return memoryview(self._version.files[piece.file].head)[extent.start : extent.end]
        if (read := self._others.get(extent.name)) is not None:
            return read().cast("B")[extent.start : extent.end]
        return self._local.read(extent.name, extent.start, extent.end)

    def _guarded(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """The result of `work`; None after an error, now or before."""
        if self.failed is None:
            try:
                return work(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001  (raised by every rank, after the last round)
                self.failed = error
        return None


def _cut(whole: memoryview, lengths: Sequence[int]) -> Iterator[memoryview]:
    at = 0
    for length in lengths:
        yield whole[at : at + length]
        at += length
