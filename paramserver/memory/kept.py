"""What outlives a relay's process: snapshots in shared memory after a crash, and spilled ones on disk.

Invariants:
- beside the files of a snapshot, never among them, stands a record: manifest, root, and every chunk's digest;
- a record is written whole before it has its name, and none is believed: sizes are compared at once, bytes hashed
  before they count, and the root must be the one that the registry has sealed.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paramserver.core.records import DIGEST_BYTES, PARTIAL, ChunkMap, Manifest, version_root
from protos.decoding import decode_json
from protos.errors import Corrupt, NotFound, OutOfCapacity

log = logging.getLogger(__name__)

RECORDS = "records"
SNAPSHOTS = "snapshots"
SPARES = ".spare"  # among the records; no model has such a name
NUM_SPARES = 4
SPARE_BYTES = 64 << 10
COPY_BYTES = 16 << 20


class _Head(msgspec.Struct, frozen=True):
    manifest: Manifest
    root_digest: str


@dataclass(frozen=True, slots=True)
class Kept:
    """A snapshot found below `base`, its bytes not yet checked."""

    base: Path
    manifest: Manifest
    root_digest: str
    digests: tuple[bytes, ...]

    @property
    def directory(self) -> Path:
        return self.base / SNAPSHOTS / relative_path(self.manifest)

    @property
    def record(self) -> Path:
        return self.base / RECORDS / relative_path(self.manifest)

    @property
    def files(self) -> list[Path]:
        return [self.directory / file.name for file in self.manifest.files]

    @property
    def paths(self) -> list[Path]:
        """All that must stay for it to be found again."""
        return [*self.files, self.record]


def keep_spare_records(base: Path) -> None:
    """Allocates room for the next records below `base`, as a pool does for the files that they stand beside.

    From now on a version that fits the pool is recorded although others fill the file system: `reserve_record` takes a
    spare one, and the record of a version that goes becomes one again. OutOfCapacity when there is no room even now.
    """
    spares = base / RECORDS / SPARES
    spares.mkdir(parents=True, exist_ok=True)
    for at in range(NUM_SPARES):
        _allocate(spares / f"spare-{at}", SPARE_BYTES, base)


def reserve_record(base: Path, manifest: Manifest) -> None:
    """Room for a snapshot's record, taken before its first byte comes. OutOfCapacity when the file system is full."""
    path = _partial(base, manifest)
    path.parent.mkdir(parents=True, exist_ok=True)
    spare = min((base / RECORDS / SPARES).glob("spare-*"), default=None)
    if spare is not None:
        spare.rename(path)
    head = len(msgspec.json.encode(_Head(manifest, "0" * 2 * DIGEST_BYTES))) + 1
    _allocate(path, head + DIGEST_BYTES * ChunkMap.of(manifest).num_chunks, base)


def _allocate(path: Path, size_bytes: int, base: Path) -> None:
    """Grows the file to `size_bytes`; it never gives up memory that it has. OutOfCapacity leaves none."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        _discard(base, path)
        if error.errno != errno.ENOSPC:
            raise
        raise OutOfCapacity(f"the file system of {base} is full", hint="make room on it") from error
    finally:
        os.close(fd)


def write_record(
    base: Path, manifest: Manifest, root_digest: str, digests: Sequence[bytes], *, durable: bool = False
) -> None:
    """Writes the record of a snapshot, into what was reserved for it; durable if so wanted, as far as `base` is."""
    partial = _partial(base, manifest)
    partial.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644), "wb") as file:
        file.write(msgspec.json.encode(_Head(manifest, root_digest)) + b"\n")
        file.write(b"".join(digests))
        file.truncate()
        file.flush()
        if durable:
            os.fsync(file.fileno())
    partial.rename(base / RECORDS / relative_path(manifest))


def remove_record(base: Path, manifest: Manifest) -> None:
    _discard(base, base / RECORDS / relative_path(manifest))
    _discard(base, _partial(base, manifest))


def _discard(base: Path, record: Path) -> None:
    """The file's memory is for the next record where spare ones are kept; else it is given up."""
    spares = base / RECORDS / SPARES
    if not record.exists():
        return
    if spares.is_dir() and record.parent != spares and len(list(spares.iterdir())) < NUM_SPARES:
        record.rename(spares / f"spare-{record.parent.name}-{record.name}")
    else:
        record.unlink()


def _partial(base: Path, manifest: Manifest) -> Path:
    return (base / RECORDS / relative_path(manifest)).with_suffix(PARTIAL)


def sweep(base: Path) -> None:
    """Removes what a life that ended while it wrote left below `base`: whatever belongs to no whole record."""
    for path in (base / RECORDS).glob(f"*/v*{PARTIAL}"):
        path.unlink()
    for path in (base / SNAPSHOTS).glob("*/v*"):
        if path.suffix == PARTIAL or not (base / RECORDS / path.parent.name / path.name).exists():
            log.info("removing %s: it was never whole", path)
            shutil.rmtree(path)


def find(base: Path) -> list[Kept]:
    """Every snapshot below `base` with a whole record and files of the right sizes, newest first per model."""
    found = [kept for path in sorted((base / RECORDS).glob("*/v*"), reverse=True) for kept in _read(base, path)]
    return [kept for kept in found if kept.record.exists()]


def beside(directory: Path) -> Kept:
    """The record of the snapshot in `directory`, told by the relay that put it there; its bytes are not yet checked.

    NotFound without one; Corrupt when it and the files do not fit each other.
    """
    base = directory.parent.parent.parent
    path = base / RECORDS / directory.parent.name / directory.name
    try:
        kept = _parse(base, path.read_bytes())
    except OSError as error:
        raise NotFound(
            f"{directory} has no record: {error}", hint="give the path that a relay's acquire returned"
        ) from error
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{path} is damaged: {error}") from error
    if why := _wrong(kept, path):
        raise Corrupt(f"{path} does not fit {directory}: {why}")
    return kept


def _read(base: Path, path: Path) -> Iterator[Kept]:
    if path.suffix == PARTIAL:
        return
    try:
        kept = _parse(base, path.read_bytes())
    except msgspec.MsgspecError as error:
        log.warning("%s is damaged: %s", path, error)
        return
    why = _wrong(kept, path)
    if why:
        log.warning("what %s names is not there: %s", path, why)
    else:
        yield kept


def _parse(base: Path, record: bytes) -> Kept:
    head, _, tail = record.partition(b"\n")
    told = decode_json(head, _Head)
    digests = tuple(tail[start : start + DIGEST_BYTES] for start in range(0, len(tail), DIGEST_BYTES))
    return Kept(base, told.manifest, told.root_digest, digests)


def _wrong(kept: Kept, path: Path) -> str:
    if kept.record != path:
        return f"it names {relative_path(kept.manifest)}"
    if len(kept.digests) != ChunkMap.of(kept.manifest).num_chunks or any(
        len(one) != DIGEST_BYTES for one in kept.digests
    ):
        return "digests are missing"
    if version_root(kept.manifest, kept.digests) != kept.root_digest:
        return "its digests do not give its root"
    for file, spec in zip(kept.files, kept.manifest.files, strict=True):
        if not file.is_file() or file.stat().st_size != spec.size_bytes:
            return f"{file.name} is missing or has another size"
    return ""


def copy_out(files: Sequence[memoryview], kept: Kept, reading: Callable[[], AbstractContextManager[None]]) -> None:
    """Writes a snapshot's files and record below `kept.base`. Whatever is raised, nothing of it is left there then.

    `reading` holds the snapshot's memory for one piece; it raises when that memory was wanted back meanwhile.
    """
    partial = kept.directory.with_suffix(PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        for spec, view in zip(kept.manifest.files, files, strict=True):
            _write(partial / spec.name, view, reading)
        shutil.rmtree(kept.directory, ignore_errors=True)
        partial.rename(kept.directory)
        write_record(kept.base, kept.manifest, kept.root_digest, kept.digests, durable=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        kept.record.with_suffix(PARTIAL).unlink(missing_ok=True)
        raise


def _write(path: Path, view: memoryview, reading: Callable[[], AbstractContextManager[None]]) -> None:
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(view), COPY_BYTES):
            with reading():
                rest = view[start : start + COPY_BYTES]
                while rest:
                    rest = rest[file.write(rest) :]
        os.fsync(file.fileno())


def remove(kept: Kept) -> None:
    """The record first: without it the files are nobody's."""
    kept.record.unlink(missing_ok=True)
    shutil.rmtree(kept.directory, ignore_errors=True)


def relative_path(manifest: Manifest) -> str:
    """Where a version's files, or its record, lie below the folder of their kind."""
    return f"{manifest.model}/v{manifest.version:08d}"
