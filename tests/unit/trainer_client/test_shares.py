"""Which rank writes which chunks of a sharded version: every byte once, from a rank that has it."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from paramserver.client import ChunkMap, TensorSpec
from paramserver.core.layout import plan_layout
from protos.errors import InvalidRequest
from trainer_client.streaming.shares import EACH, HEAD, Extent, Piece, extents_of, pieces_of, rounds_of


def rows_of(num_rows: int, num_ranks: int) -> list[tuple[int, int]]:
    """As torch.chunk shares them out: the last ranks may have none."""
    share = -(-num_rows // num_ranks)
    return [(min(rank * share, num_rows), min((rank + 1) * share, num_rows)) for rank in range(num_ranks)]


def plan(seed: int) -> tuple[list[Piece], dict[str, list[Extent]], ChunkMap, int, dict[str, tuple[int, int]]]:
    dice = random.Random(seed)
    num_ranks = dice.randint(1, 5)
    specs = [
        TensorSpec(f"t{i}", dice.choice(["F32", "BF16", "U8"]), (dice.randint(0, 40), dice.randint(1, 9)))
        for i in range(dice.randint(1, 12))
    ]
    files = plan_layout(specs, file_bytes_max=dice.choice([1 << 30, 400]))
    chunks = ChunkMap([file.size_bytes for file in files], dice.choice([16, 64, 100, 4096]))
    extents: dict[str, list[Extent]] = {}
    for number, spec in enumerate(specs):
        rows = [(0, spec.shape[0])] * num_ranks if dice.random() < 0.2 else rows_of(spec.shape[0], num_ranks)
        extents[spec.name] = extents_of(spec.name, spec.shape[0], spec.size_bytes, rows, number)
    places = {place.name: (number, place.offset) for number, file in enumerate(files) for place in file.tensors}
    return list(pieces_of(files, chunks, extents, num_ranks)), extents, chunks, num_ranks, places


@pytest.mark.parametrize("seed", range(60))
def test_every_chunk_is_written_once_from_bytes_that_lie_in_its_place(seed: int) -> None:
    pieces, extents, chunks, num_ranks, places = plan(seed)
    assert [index for piece in pieces for index in range(piece.first, piece.first + piece.num)] == list(
        range(chunks.num_chunks)
    )
    for piece in pieces:
        assert 0 <= piece.owner < num_ranks
        first, last = chunks.chunk(piece.first), chunks.chunk(piece.first + piece.num - 1)
        at = first.offset
        for extent in piece.extents:
            assert extent.num_bytes > 0
            file, offset = (piece.file, 0) if extent.name == HEAD else places[extent.name]
            assert (file, offset + extent.start) == (piece.file, at)
            if extent.name != HEAD:
                assert any(
                    one.holder == extent.holder and one.start <= extent.start and extent.end <= one.end
                    for one in extents[extent.name]
                )
            at += extent.num_bytes
        assert at == last.offset + last.length
        if piece.num > 1:
            assert len(piece.extents) == 1
            assert not piece.moved_bytes


def test_the_rank_with_most_of_a_chunk_writes_it_and_large_shards_do_not_move() -> None:
    spec = TensorSpec("w", "U8", (1000, 100))
    [file] = plan_layout([spec])
    chunks = ChunkMap([file.size_bytes], 1024)
    extents = {"w": extents_of("w", 1000, spec.size_bytes, rows_of(1000, 2), 0)}
    pieces = list(pieces_of([file], chunks, extents, 2))
    assert sum(piece.moved_bytes for piece in pieces) < 512
    written = Counter[int]()
    for piece in pieces:
        written[piece.owner] += piece.num
    assert abs(written[0] - written[1]) <= 1


def test_replicas_of_rows_take_turns() -> None:
    rows = [(0, 5), (5, 10), (0, 5), (5, 10)]  # HSDP of two by two
    found = [[one.holder for one in extents_of("w", 10, 100, rows, number)] for number in range(2)]
    assert found == [[0, 1], [2, 3]]
    assert [one.holder for one in extents_of("w", 10, 100, [(0, 10)] * 4, 0)] == [EACH]


def test_rows_that_no_rank_has_are_named() -> None:
    with pytest.raises(InvalidRequest, match="rows 5 to 6 of tensor 'w' are on no rank"):
        extents_of("w", 10, 100, [(0, 5), (7, 10)], 0)
    with pytest.raises(InvalidRequest, match="rows 5 to 9 of tensor 'w' are on no rank"):
        extents_of("w", 10, 100, [(0, 5), (0, 0)], 0)


@pytest.mark.parametrize("seed", range(10))
def test_rounds_keep_the_order_and_their_bound(seed: int) -> None:
    pieces, _, _, _, _ = plan(seed)
    gathered = {"t0": 300, "t1": 10}
    rounds = list(rounds_of(iter(pieces), gathered, round_bytes=200))
    assert [piece for one in rounds for piece in one] == pieces
    seen: set[str] = set()
    for one in rounds:
        due = {extent.name for piece in one for extent in piece.extents if extent.name in gathered} - seen
        seen |= due
        cost = sum(piece.moved_bytes for piece in one) + sum(gathered[name] for name in due)
        assert cost <= 200 or len(one) == 1
