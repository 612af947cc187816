"""Chunk numbering and roots."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramserver.core.records import (
    Announced,
    ChunkMap,
    Epoch,
    FileSpec,
    Manifest,
    Plan,
    Rank,
    Sealed,
    check_model_name,
    digest,
    version_root,
)
from protos.decoding import decode_json
from protos.errors import InvalidRequest

MANIFEST = Manifest("policy", 3, "run", 7, Epoch("store", 5), (FileSpec("a", 5), FileSpec("b", 3)), chunk_bytes=4)
DIGESTS = [digest(b"one"), digest(b"two"), digest(b"three")]


@given(st.lists(st.integers(0, 40), max_size=6), st.integers(1, 9))
def test_chunks_cover_every_byte_of_every_file_once(sizes: list[int], chunk_bytes: int) -> None:
    chunks = ChunkMap(sizes, chunk_bytes)
    seen = [
        (chunk.file, byte)
        for chunk in map(chunks.chunk, range(chunks.num_chunks))
        for byte in range(chunk.offset, chunk.offset + chunk.length)
    ]
    assert seen == [(file, byte) for file, size in enumerate(sizes) for byte in range(size)]
    assert [i for f in range(len(sizes)) for i in chunks.range_of(f)] == list(range(chunks.num_chunks))


def test_a_chunk_out_of_range_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="chunk 3 of 3"):
        ChunkMap.of(MANIFEST).chunk(3)


@pytest.mark.parametrize(
    "other",
    [
        {"model": "critic"},
        {"version": 4},
        {"epoch": Epoch("store", 6)},
        {"epoch": Epoch("other", 5)},
        {"files": (FileSpec("a", 5), FileSpec("c", 3))},
    ],
)
def test_the_root_binds_model_version_epoch_and_layout(other: dict[str, object]) -> None:
    changed = msgspec.structs.replace(MANIFEST, **other)
    assert version_root(changed, DIGESTS) != version_root(MANIFEST, DIGESTS)


def test_the_root_binds_every_chunk_in_order() -> None:
    root = version_root(MANIFEST, DIGESTS)
    assert root == version_root(MANIFEST, list(DIGESTS))
    assert root != version_root(MANIFEST, [DIGESTS[1], DIGESTS[0], DIGESTS[2]])
    assert root != version_root(MANIFEST, [*DIGESTS[:2], digest(b"four")])


def test_run_and_step_are_labels_that_the_root_does_not_cover() -> None:
    relabelled = msgspec.structs.replace(MANIFEST, run="other", step=90)
    assert version_root(relabelled, DIGESTS) == version_root(MANIFEST, DIGESTS)


@pytest.mark.parametrize("name", ["", "a/b", "..", "-x", "x" * 65, "é"])
def test_model_names_that_would_break_paths_and_keys_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot name a model"):
        check_model_name(name)


NO_NAMES = [
    "../outside/authorized_keys",
    "/etc/passwd",
    "..",
    ".",
    "",
    "a/b",
    ".laminar-pull",
    "a\0b",
    "a\nb",
    "x.partial",
]


@pytest.mark.parametrize("name", [*NO_NAMES, "n" * 201])
def test_a_manifest_from_elsewhere_names_files_that_stay_in_their_directory(name: str) -> None:
    """The record of another host becomes paths here."""
    encoded = msgspec.json.encode(MANIFEST).replace(b'"name":"a"', b'"name":' + msgspec.json.encode(name))
    with pytest.raises(msgspec.ValidationError, match="cannot name a file of a version"):
        msgspec.json.decode(encoded, type=Manifest)
    with pytest.raises(InvalidRequest, match="cannot name a file of a version"):
        FileSpec(name, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "../elsewhere"}, "cannot name a model"),
        ({"version": 0}, "version 0 in chunks"),
        ({"chunk_bytes": 0}, "chunks of 0 bytes"),
        ({"files": (FileSpec("a", 1), FileSpec("a", 2))}, "two files of one name"),
        ({"files": (FileSpec("a", 1 << 40),), "chunk_bytes": 1}, "more than 67108864 chunks"),
    ],
)
def test_a_manifest_that_nobody_could_act_on_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        msgspec.structs.replace(MANIFEST, **change)


def test_there_are_only_so_many_ranks_of_a_trainer() -> None:
    with pytest.raises(InvalidRequest, match="3000000 ranks of one trainer"):
        Rank(0, 3_000_000)


ANNOUNCED = Announced(MANIFEST, Plan(Epoch("store", 5), 1, ("a",)))
SEALED = Sealed("policy", 3, 7, "run", "root", 8, 1.5)


@pytest.mark.parametrize("record", [ANNOUNCED, SEALED])
def test_a_record_without_labels_is_the_one_that_an_older_relay_writes_and_reads(record: Announced | Sealed) -> None:
    written = msgspec.json.encode(record)
    assert b"labels" not in written
    assert decode_json(written, type(record)) == record
    labelled = msgspec.structs.replace(record, labels={"note": "n"})
    assert decode_json(msgspec.json.encode(labelled), type(record)) == labelled


class OlderSealed(msgspec.Struct, frozen=True):
    """As releases before labels have it."""

    model: str
    version: int
    step: int
    run: str
    root_digest: str
    size_bytes: int
    sealed_unix_s: float


def test_an_older_relay_reads_a_record_with_labels_and_passes_over_them() -> None:
    written = msgspec.json.encode(msgspec.structs.replace(SEALED, labels={"note": "n"}))
    assert decode_json(written, OlderSealed) == OlderSealed("policy", 3, 7, "run", "root", 8, 1.5)
