"""Which rank writes which chunks of a version whose tensors lie in shards: decisions without tensors or I/O.

Invariants:
- every rank computes the same pieces and rounds from the same layout and rows;
- every chunk is written whole, by one rank: the one that holds most of its bytes. Only what other ranks hold of it
  moves between ranks, so of large tensors next to nothing does;
- a round moves and gathers ROUND_BYTES at most, or one piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from paramserver.client import ChunkMap, FileLayout
from protos.errors import InvalidRequest

EACH = -1
"""The holder of what every rank has."""
HEAD = ""
"""In the place of a tensor's name: the head of the file."""
ROUND_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [start, end) of tensor `name`, which rank `holder` has."""

    holder: int
    name: str
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start

    def moves_to(self, owner: int) -> bool:
        return self.holder not in (EACH, owner)


@dataclass(frozen=True, slots=True)
class Piece:
    """Chunks side by side in one file, from number `first` on, that rank `owner` writes; several only of one extent."""

    file: int
    first: int
    num: int
    owner: int
    extents: tuple[Extent, ...]

    @property
    def moved_bytes(self) -> int:
        return sum(extent.num_bytes for extent in self.extents if extent.moves_to(self.owner))


def extents_of(name: str, num_rows: int, size_bytes: int, rows: Sequence[tuple[int, int]], number: int) -> list[Extent]:
    """Who gives which bytes of a tensor; `rows`: [start, end) of each rank.

    Of ranks that hold the same rows, as in HSDP, one gives them; `number` makes them take turns. InvalidRequest when
    rows are on no rank.
    """
    if all((start, end) == (0, num_rows) for start, end in rows):
        return [Extent(EACH, name, 0, size_bytes)]
    row_bytes, at, found = size_bytes // max(num_rows, 1), 0, []
    while at < num_rows:
        here = [(rank, end) for rank, (start, end) in enumerate(rows) if start <= at < end]
        if not here:
            until = min((start for start, end in rows if at < start < end), default=num_rows)
            raise InvalidRequest(
                f"rows {at} to {until - 1} of tensor {name!r} are on no rank",
                hint="every rank that holds a shard calls this, in the same publish",
            )
        rank, end = here[number % len(here)]
        found.append(Extent(rank, name, at * row_bytes, end * row_bytes))
        at = end
    return found


def pieces_of(
    files: Sequence[FileLayout], chunks: ChunkMap, extents: Mapping[str, Sequence[Extent]], num_ranks: int
) -> Iterator[Piece]:
    """All chunks of a version, in order; `extents` by the tensor's name."""
    for number, file in enumerate(files):
        spans = [(0, Extent(EACH, HEAD, 0, len(file.head)))] if file.head else []
        spans += [(place.offset + one.start, one) for place in file.tensors for one in extents[place.name]]
        first, at, position = chunks.range_of(number).start, 0, 0
        while at < file.size_bytes:
            while spans[position][0] + spans[position][1].num_bytes <= at:
                position += 1
            start, extent = spans[position]
            index = first + at // chunks.chunk_bytes
            to_end = start + extent.num_bytes - at
            num = to_end // chunks.chunk_bytes
            if start + extent.num_bytes == file.size_bytes and to_end % chunks.chunk_bytes:
                num += 1  # the last chunk of a file may be shorter
            if num:
                end = min(at + num * chunks.chunk_bytes, file.size_bytes)
                parts: tuple[Extent, ...] = (_cut(start, extent, at, end),)
            else:
                num, end = 1, min(at + chunks.chunk_bytes, file.size_bytes)
                parts = tuple(_shared(spans, position, at, end))
            yield Piece(number, index, num, _owner(parts, index, num_ranks), parts)
            at = end


def _shared(spans: Sequence[tuple[int, Extent]], position: int, at: int, end: int) -> Iterator[Extent]:
    while position < len(spans) and spans[position][0] < end:
        start, extent = spans[position]
        if extent.num_bytes:
            yield _cut(start, extent, at, end)
        position += 1


def _cut(start: int, extent: Extent, low: int, high: int) -> Extent:
    """What lies of an extent, which begins at `start` in its file, within [low, high) of the file."""
    shift = extent.start - start
    return Extent(extent.holder, extent.name, max(low, start) + shift, min(high, start + extent.num_bytes) + shift)


def _owner(parts: Sequence[Extent], index: int, num_ranks: int) -> int:
    """The rank with most of the bytes; of what each rank has they take turns."""
    held = [0] * num_ranks
    for part in parts:
        if part.holder != EACH:
            held[part.holder] += part.num_bytes
    return max(range(num_ranks), key=lambda rank: (held[rank], -rank)) if any(held) else index % num_ranks


def rounds_of(
    pieces: Iterator[Piece], gathered: Mapping[str, int], round_bytes: int = ROUND_BYTES
) -> Iterator[list[Piece]]:
    """Pieces in groups; `gathered`: the sizes of tensors that every rank gathers when their first piece is due."""
    found: list[Piece] = []
    filled, seen = 0, set[str]()
    for piece in pieces:
        due = {extent.name for extent in piece.extents if extent.name in gathered} - seen
        cost = piece.moved_bytes + sum(gathered[name] for name in due)
        if found and filled + cost > round_bytes:
            yield found
            found, filled = [], 0
        found.append(piece)
        filled += cost
        seen |= due
    if found:
        yield found
