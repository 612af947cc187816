"""Snapshots as files with a record: those that a crash leaves in shared memory, and spilled ones on disk.

Invariants:
- beside the files of a snapshot, never among them, stands a record: manifest, seal, and every chunk's digest;
- a record is written whole before it has its name, and none is trusted: sizes are compared at once, bytes hashed
  before they count, and the root must be the one that the registry has sealed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paramserver.core.records import DIGEST_BYTES, PARTIAL, ChunkMap, Manifest, Sealed, version_root
from protos.decoding import decode_json
from protos.errors import Conflict, Corrupt, NotFound, OutOfCapacity, Unavailable

log = logging.getLogger(__name__)

LOCK = ".lock"
RECORDS = "records"
SNAPSHOTS = "snapshots"
SPARES = ".spare"  # among the records; no model has such a name
NUM_SPARES = 4
SPARE_BYTES = 64 << 10
COPY_BYTES = 16 << 20
PUBLISH_SOCKET = "publish.sock"
POOLS = {LOCK, "free", "filling", SNAPSHOTS, RECORDS, PUBLISH_SOCKET, "grpc.sock"}  # the last of earlier releases
"""All that a relay puts into the directory of its pool; what a killed one left there is no obstacle to the next."""
LONGEST_TIME_S = 1234567890.1234567  # no time of day takes more characters


class _Head(msgspec.Struct, frozen=True):
    manifest: Manifest
    root_digest: str
    sealed_unix_s: float = 0.0  # 0: by a release that kept neither this nor labels
    labels: dict[str, str] = {}

    @classmethod
    def of(cls, manifest: Manifest, sealed: Sealed) -> _Head:
        return cls(manifest, sealed.root_digest, sealed.sealed_unix_s, sealed.labels)


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A snapshot found below `base`, its bytes not yet checked."""

    base: Path
    manifest: Manifest
    sealed: Sealed
    digests: tuple[bytes, ...]

    @property
    def root_digest(self) -> str:
        return self.sealed.root_digest

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
        """The files that must stay for it to be found again."""
        return [*self.files, self.record]


def refuse_foreign(directory: Path, names: Collection[str], hint: str) -> None:
    """Everything below is cleared: a home directory given by mistake must not be. Conflict for any but these names."""
    try:
        foreign = sorted(set(os.listdir(directory)) - set(names))
    except FileNotFoundError:
        return
    except OSError as error:
        raise Unavailable(f"cannot use {directory}: {error.strerror}", hint="choose another --pool-dir") from error
    if foreign:
        raise Conflict(f"{directory} holds {foreign[0]!r}, which is no relay's", hint=hint)


def lock_directory(directory: Path, option: str) -> int:
    """Makes a directory this process's own: the descriptor that holds its lock. Conflict while another relay has it.

    `option`: the flag that names the directory, for hints.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        fd = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Unavailable(f"cannot use {directory}: {error.strerror}", hint=f"choose another {option}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.fstat(fd).st_nlink:
            raise BlockingIOError("it was cleared just now")
    except OSError as error:
        os.close(fd)
        if isinstance(error, BlockingIOError):
            hint = f"give each relay its own {option}"
            raise Conflict(f"{directory} is in use by another relay", hint=hint) from error
        raise Unavailable(f"cannot lock {directory}: {error.strerror}", hint=f"choose another {option}") from error
    return fd


def keep_spare_records(base: Path) -> None:
    """Allocates room for the next records below `base`, as a pool does for the files that they stand beside.

    From now on a version that fits the pool is recorded although others fill the file system: `reserve_record` takes a
    spare one, and the record of a version that goes becomes one again. OutOfCapacity when there is no room even now.
    """
    spares = base / RECORDS / SPARES
    spares.mkdir(parents=True, exist_ok=True)
    for at in range(NUM_SPARES):
        _allocate(spares / f"spare-{at}", SPARE_BYTES, base)


def reserve_record(base: Path, manifest: Manifest, labels: dict[str, str]) -> None:
    """Room for a snapshot's record, taken before its first byte comes. OutOfCapacity when the file system is full.

    `labels`: those that it will be sealed with.
    """
    path = _partial(base, manifest)
    path.parent.mkdir(parents=True, exist_ok=True)
    spare = min((base / RECORDS / SPARES).glob("spare-*"), default=None)
    if spare is not None:
        spare.rename(path)
    sealed = Sealed.of(manifest, "0" * 2 * DIGEST_BYTES, LONGEST_TIME_S, labels)
    head = len(msgspec.json.encode(_Head.of(manifest, sealed))) + 1
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
    base: Path, manifest: Manifest, sealed: Sealed, digests: Sequence[bytes], *, durable: bool = False
) -> None:
    """Writes the record of a snapshot, into what was reserved for it; durable if so wanted, as far as `base` is."""
    partial = _partial(base, manifest)
    partial.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644), "wb") as file:
        file.write(msgspec.json.encode(_Head.of(manifest, sealed)) + b"\n")
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


def sweep(base: Path, found: Collection[StoredSnapshot]) -> None:
    """Removes all below `base` that is not `found` there: damaged, or left by a life that ended while it wrote."""
    records, directories = {one.record for one in found}, {one.directory for one in found}
    for path in (base / RECORDS).glob("*/v*"):
        if path not in records:
            path.unlink()
    for path in (base / SNAPSHOTS).glob("*/v*"):
        if path not in directories:
            log.info("removing %s: it is not whole", path)
            shutil.rmtree(path)


def find(base: Path) -> list[StoredSnapshot]:
    """Every snapshot below `base` with a whole record and files of the right sizes.

    Where there is room for some of them only, the first ones are to be kept: every model's newest, those sealed last
    before others, then every model's next one.
    """
    places: Counter[str] = Counter()
    ranked: list[tuple[int, float, StoredSnapshot]] = []
    for path in sorted((base / RECORDS).glob("*/v*"), reverse=True):
        for stored in _read(base, path):
            ranked.append((places[stored.manifest.model], -stored.sealed.sealed_unix_s, stored))
            places[stored.manifest.model] += 1
    return [stored for *_, stored in sorted(ranked, key=lambda one: one[:2])]


def beside(directory: Path) -> StoredSnapshot:
    """The snapshot in `directory`, by the record that a relay wrote beside it; its bytes are not yet checked.

    NotFound without one; Corrupt when it and the files do not fit each other.
    """
    base = directory.parent.parent.parent
    path = base / RECORDS / directory.parent.name / directory.name
    try:
        stored = _parse(base, path)
    except OSError as error:
        raise NotFound(
            f"{directory} has no record: {error}", hint="give the path that a relay's acquire returned"
        ) from error
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{path} is damaged: {error}") from error
    if why := _wrong(stored, path):
        raise Corrupt(f"{path} does not fit {directory}: {why}")
    return stored


def _read(base: Path, path: Path) -> Iterator[StoredSnapshot]:
    if path.suffix == PARTIAL:
        return
    try:
        stored = _parse(base, path)
    except msgspec.MsgspecError as error:
        log.warning("%s is damaged: %s", path, error)
        return
    why = _wrong(stored, path)
    if why:
        log.warning("what %s names is not there: %s", path, why)
    else:
        yield stored


def _parse(base: Path, record: Path) -> StoredSnapshot:
    head, _, tail = record.read_bytes().partition(b"\n")
    found = decode_json(head, _Head)
    digests = tuple(tail[start : start + DIGEST_BYTES] for start in range(0, len(tail), DIGEST_BYTES))
    sealed_unix_s = found.sealed_unix_s or record.stat().st_mtime  # it was written when the version was shown
    sealed = Sealed.of(found.manifest, found.root_digest, sealed_unix_s, found.labels)
    return StoredSnapshot(base, found.manifest, sealed, digests)


def _wrong(stored: StoredSnapshot, path: Path) -> str:
    if stored.record != path:
        return f"it names {relative_path(stored.manifest)}"
    if len(stored.digests) != ChunkMap.of(stored.manifest).num_chunks or any(
        len(one) != DIGEST_BYTES for one in stored.digests
    ):
        return "digests are missing"
    if version_root(stored.manifest, stored.digests) != stored.root_digest:
        return "its digests do not give its root"
    for file, spec in zip(stored.files, stored.manifest.files, strict=True):
        if not file.is_file() or file.stat().st_size != spec.size_bytes:
            return f"{file.name} is missing or has another size"
    return ""


def copy_out(
    files: Sequence[memoryview], stored: StoredSnapshot, reading: Callable[[], AbstractContextManager[None]]
) -> None:
    """Writes a snapshot's files and record below `stored.base`. Whatever is raised, nothing of it is left there then.

    `reading` holds the snapshot's memory for one piece; it raises when that memory was wanted back meanwhile.
    """
    partial = stored.directory.with_suffix(PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        for spec, view in zip(stored.manifest.files, files, strict=True):
            _write(partial / spec.name, view, reading)
        shutil.rmtree(stored.directory, ignore_errors=True)
        partial.rename(stored.directory)
        write_record(stored.base, stored.manifest, stored.sealed, stored.digests, durable=True)
    except BaseException:
        for directory in (partial, stored.directory):  # without a record either is no copy
            shutil.rmtree(directory, ignore_errors=True)
        stored.record.with_suffix(PARTIAL).unlink(missing_ok=True)
        raise


def _write(path: Path, view: memoryview, reading: Callable[[], AbstractContextManager[None]]) -> None:
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(view), COPY_BYTES):
            with reading():
                rest = view[start : start + COPY_BYTES]
                while rest:
                    rest = rest[file.write(rest) :]
        os.fsync(file.fileno())


def remove(stored: StoredSnapshot) -> None:
    """The record first: files without one are reclaimed, so a removal that is cut short leaves no half of it."""
    stored.record.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(stored.directory)


def relative_path(manifest: Manifest) -> str:
    """Where a version's files, or its record, lie below the folder of their kind."""
    return f"{manifest.model}/v{manifest.version:08d}"
