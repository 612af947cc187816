"""Sealed snapshots on disk without a relay: files and record as a relay leaves them, so that plugins can prove them."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from paramserver.core.records import CHUNK_BYTES, ChunkMap, Epoch, FileSpec, Manifest, Sealed, digest, version_root
from paramserver.memory.stored import RECORDS, SNAPSHOTS, relative_path, write_record

TORN_BYTES = 100


@dataclass(frozen=True)
class SealedSnapshot:
    """As a lease tells it."""

    path: Path
    version: int
    digest: str

    @property
    def record(self) -> Path:
        """The file that stands beside the snapshot, with its digests."""
        return self.path.parents[2] / RECORDS / self.path.parent.name / self.path.name

    def flip(self, at: int) -> None:
        """One bit of its (only) file, in place; again, and it is as it was."""
        [file] = self.path.glob("*.safetensors")
        data = bytearray(file.read_bytes())
        data[at] ^= 1
        file.write_bytes(data)


def seal(
    base: Path, version: int, weights: Path, model: str = "policy", *, chunk_bytes: int = CHUNK_BYTES
) -> SealedSnapshot:
    """`weights`, a directory of safetensors files, as a version of `model` below `base`."""
    files = sorted(weights.glob("*.safetensors"))
    specs = tuple(FileSpec(file.name, file.stat().st_size) for file in files)
    manifest = Manifest(model, version, "run", version, Epoch("store", 1), specs, chunk_bytes)
    directory = base / SNAPSHOTS / relative_path(manifest)
    directory.mkdir(parents=True)
    for file in files:
        shutil.copyfile(file, directory / file.name)
    chunks, data = ChunkMap.of(manifest), [file.read_bytes() for file in files]
    digests = [
        digest(data[chunk.file][chunk.offset : chunk.offset + chunk.length])
        for chunk in map(chunks.chunk, range(chunks.num_chunks))
    ]
    root = version_root(manifest, digests)
    write_record(base, manifest, Sealed.of(manifest, root, time.time(), {}), digests)
    return SealedSnapshot(directory, version, root)


def tear(snapshot: SealedSnapshot) -> SealedSnapshot:
    """Cuts the end of its last file off, record and digest as they were: what no load may survive."""
    last = sorted(snapshot.path.glob("*.safetensors"))[-1]
    with last.open("rb+") as file:
        file.truncate(last.stat().st_size - TORN_BYTES)
    return snapshot
