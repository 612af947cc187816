"""Snapshots: the files of one version in the pool, filled chunk by chunk, then published under one path.

Invariants:
- a chunk counts as present only with its digest known and matching; waiters wake then, never before;
- a number has one snapshot at most: from its opening, or from a start that found it, until `remove` has returned;
- a snapshot's directory appears under its published path by one rename, when it is shown, and leaves it by one;
- what an earlier life left stays where it is until it is offered again: a start that fails leaves it to the next, and
  an end leaves what is shown;
- bytes are served only inside `reading`, and a snapshot's memory goes back only when nobody is inside: otherwise a peer
  would be sent what the next version writes there.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paramserver.config import show_apart, show_bytes
from paramserver.core.records import ChunkMap, Holding, Manifest, Sealed, digest, version_root
from paramserver.memory.pool import Allotment, Pool, PoolFile
from paramserver.memory.stored import (
    StoredSnapshot,
    keep_spare_records,
    relative_path,
    remove_record,
    reserve_record,
    write_record,
)
from paramserver.memory.stored import remove as remove_stored
from protos.errors import Conflict, Corrupt, NotFound, OutOfCapacity, TooLarge, Unavailable

log = logging.getLogger(__name__)

GRACE_S = 5.0  # readers of a version that goes may finish their chunk; then their connections are ended
WRITER_WAIT_S = 5.0  # the old connection of a publisher that reconnects may still be at a chunk


class Snapshot:
    """One version on this relay. Threads call it; a condition guards the chunk table."""

    def __init__(self, manifest: Manifest, files: list[PoolFile], directory: Path) -> None:
        self.manifest = manifest
        self.chunks = ChunkMap.of(manifest)
        self.files = files
        self.directory = directory
        self.written_elsewhere = False  # a publisher got the descriptors
        self.sealed: Sealed | None = None  # once it is shown, or was in an earlier life
        self.record_failed = False
        self.leaving = False  # its memory is being given back
        self.holding = Holding()  # how a fetch brought it here
        self.num_links = 0  # peers connected to fetch it
        self._late: Counter[str] = Counter()  # links of each late joiner
        self._digests: list[bytes | None] = [None] * self.chunks.num_chunks
        self._num_present = 0
        self._bytes_present = 0
        self._readers: dict[object, Callable[[], None]] = {}  # who is inside, and what makes it leave
        self._writers: set[int] = set()  # chunks that a publisher is sending
        self._closed: str | None = None
        self._changed = threading.Condition()

    @property
    def complete(self) -> bool:
        return self._num_present == self.chunks.num_chunks

    @property
    def bytes_present(self) -> int:
        return self._bytes_present

    def place(self, index: int) -> memoryview:
        """The chunk's bytes in the mapped file, writable."""
        chunk = self.chunks.chunk(index)
        return self.files[chunk.file].view()[chunk.offset : chunk.offset + chunk.length]

    def where(self, index: int) -> tuple[int, int, int]:
        """The chunk's bytes as (descriptor of the file, first byte, byte after the last)."""
        chunk = self.chunks.chunk(index)
        return self.files[chunk.file].fd, chunk.offset, chunk.offset + chunk.length

    def present(self, index: int, chunk_digest: bytes) -> None:
        """The chunk's bytes lie in place and match `chunk_digest`."""
        with self._changed:
            if self._closed is not None:
                raise Conflict(f"{self} was closed: {self._closed}")
            if self._digests[index] not in (None, chunk_digest):
                raise Conflict(f"chunk {index} of {self} is present with another digest")
            if self._digests[index] is None:
                self._num_present += 1
                self._bytes_present += self.chunks.chunk(index).length
            self._digests[index] = chunk_digest
            self._changed.notify_all()

    def digest_of(self, index: int) -> bytes | None:
        return self._digests[index]

    def wait_chunk(self, index: int, timeout_s: float) -> bytes | None:
        """The chunk's digest once it is present; None after `timeout_s`. NotFound when the snapshot is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._digests[index] is not None or self._closed, timeout_s)
            if self._closed is not None:
                raise NotFound(f"{self} is gone: {self._closed}")
            return self._digests[index]

    def check_open(self) -> None:
        """NotFound when it is closed, and why."""
        with self._changed:
            if self._closed is not None:
                raise NotFound(f"{self} is gone: {self._closed}")

    def missing(self) -> list[int]:
        with self._changed:
            return [index for index, known in enumerate(self._digests) if known is None]

    def digests(self) -> list[bytes]:
        """The digests known, in order; all of them once it is complete."""
        return [known for known in self._digests if known is not None]

    def root(self) -> str:
        return version_root(self.manifest, self.digests())

    def recheck(self, index: int) -> None:
        """Hashes the chunk again, since a peer received other bytes. Raises Corrupt when it is bad here."""
        if digest(self.place(index)) != self._digests[index]:
            raise Corrupt(f"chunk {index} of {self} changed in memory since it was verified")

    @contextmanager
    def writing(self, index: int, timeout_s: float = WRITER_WAIT_S) -> Iterator[memoryview]:
        """The place of a chunk for one writer at a time. Conflict once it is present: verified bytes do not change."""
        with self._changed:
            self._changed.wait_for(lambda: index not in self._writers, timeout_s)
            if index in self._writers or self._digests[index] is not None:
                raise Conflict(f"chunk {index} of {self} is {'present' if self._digests[index] else 'being written'}")
            self._writers.add(index)
        try:
            yield self.place(index)
        finally:
            with self._changed:
                self._writers.discard(index)
                self._changed.notify_all()

    @contextmanager
    def reading(self, break_off: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Holds the memory. `break_off` makes whoever is inside leave soon; any thread may call it."""
        reader = object()
        with self._changed:
            if self._closed is not None:
                raise NotFound(f"{self} is gone: {self._closed}")
            self._readers[reader] = break_off
        try:
            yield
        finally:
            with self._changed:
                del self._readers[reader]
                self._changed.notify_all()

    @contextmanager
    def linked(self, late_joiner: str = "", late_joiners_max: int = 0) -> Iterator[None]:
        """A peer is fetching: a reason to keep the version a little, but no hold on its memory.

        OutOfCapacity for a late joiner beyond the first `late_joiners_max`; each may have several links.
        """
        with self._changed:
            if late_joiner and late_joiner not in self._late and len(self._late) >= late_joiners_max:
                raise OutOfCapacity(
                    f"{self} goes to {', '.join(self._late)} already", hint="use another holder, or try again soon"
                )
            self.num_links += 1
            self._late += Counter([late_joiner] if late_joiner else [])
        try:
            yield
        finally:
            with self._changed:
                self.num_links -= 1
                self._late -= Counter([late_joiner])

    def close(self, why: str, timeout_s: float = 30.0) -> None:
        """Refuses new readers and waits until those inside are out; the slow ones are broken off.

        Conflict when somebody is inside still after `timeout_s`: its memory must not be given back then.
        """
        with self._changed:
            self._closed = why
            self._changed.notify_all()
            if self._changed.wait_for(lambda: not self._readers, min(GRACE_S, timeout_s)):
                return
            for break_off in self._readers.values():
                break_off()
            if not self._changed.wait_for(lambda: not self._readers, timeout_s):
                raise Conflict(f"{self} still has {len(self._readers)} readers after {timeout_s} s")

    def __str__(self) -> str:
        return f"version {self.manifest.version} of {self.manifest.model}"


@dataclass(frozen=True, slots=True)
class Key:
    model: str
    version: int


class Store:
    """The snapshots of one relay. `left`: those of an earlier life, for `find_again`."""

    def __init__(self, pool: Pool, left: Sequence[StoredSnapshot] = ()) -> None:
        self.pool = pool
        self._snapshots: dict[Key, Snapshot] = {}
        self._left = {Key(one.manifest.model, one.manifest.version): one for one in left}  # and not yet offered again
        self._aside: dict[Key, Snapshot] = {}  # of those left
        self._leaving: set[Key] = set()  # their removal has not returned
        self._unrecorded: dict[Key, Snapshot] = {}  # shown, and their records not yet written
        self._changed = threading.Condition()
        for name in ("filling", "snapshots"):
            (pool.directory / name).mkdir(exist_ok=True)
        keep_spare_records(pool.directory)

    def check_size(self, what: str, size_bytes: int) -> None:
        """TooLarge when `what` can never fit."""
        if size_bytes > self.pool.pool_bytes:
            wanted, pool = show_apart(size_bytes, self.pool.pool_bytes)
            raise TooLarge(
                f"{what} takes {wanted}, the pool has {pool}",
                hint=f"start the relay with --pool-bytes of at least {show_bytes(4 * size_bytes)}",
            )

    def check(self, manifest: Manifest) -> None:
        """TooLarge when the version can never fit, OutOfCapacity as long as another of its number is here."""
        self.check_size(f"version {manifest.version} of {manifest.model}", manifest.size_bytes)
        if self.is_taken(manifest):
            raise OutOfCapacity(f"another version {manifest.version} of {manifest.model} is still on its way out")

    def is_taken(self, manifest: Manifest) -> bool:
        """Whether a snapshot of this number is here, or on its way out."""
        key = Key(manifest.model, manifest.version)
        return any(key in taken for taken in (self._snapshots, self._left, self._leaving))

    def open(
        self, manifest: Manifest, allotment: Allotment | None = None, labels: dict[str, str] | None = None
    ) -> Snapshot:
        """Begins a version in the memory of `allotment`, filled; without one takes memory here, which may block.

        `labels`: those that it will be sealed with.
        """
        self.check(manifest)
        reserve_record(self.pool.directory, manifest, labels or {})
        sizes = [file.size_bytes for file in manifest.files]
        files = self.pool.take(sizes) if allotment is None else self.pool.claim(allotment)
        directory = self._directory("filling", manifest)
        directory.mkdir(parents=True)
        for file, spec in zip(files, manifest.files, strict=True):
            file.move(directory / spec.name)
        snapshot = Snapshot(manifest, files, directory)
        with self._changed:
            self._snapshots[Key(manifest.model, manifest.version)] = snapshot
            self._changed.notify_all()
        return snapshot

    def find_again(self, stored: StoredSnapshot) -> Snapshot:
        """A snapshot that an earlier life left, every chunk hashed again.

        Corrupt when it is damaged, OutOfCapacity when the pool is smaller now: it is gone then. Else Unavailable.

        It is not among the snapshots before `open_again`.
        """
        try:
            files = self.pool.adopt(stored.files)
        except OutOfCapacity as error:
            manifest = stored.manifest
            del self._left[Key(manifest.model, manifest.version)]
            remove_stored(stored)
            raise OutOfCapacity(
                f"version {manifest.version} of {manifest.model}, left by an earlier life, is dropped: {error.message}"
            ) from error
        except OSError as error:
            raise Unavailable(
                f"{stored.directory}, left by an earlier life, cannot be read: {error.strerror}"
            ) from error
        snapshot = Snapshot(stored.manifest, files, stored.directory)
        snapshot.sealed = stored.sealed
        for index, expected in enumerate(stored.digests):
            if digest(snapshot.place(index)) != expected:
                self.remove(snapshot, "damaged")
                raise Corrupt(f"chunk {index} of {snapshot}, left by an earlier life, is damaged")
            snapshot.present(index, expected)
        return snapshot

    def open_again(self, snapshot: Snapshot) -> None:
        """A snapshot of `find_again` is a version like any other from now on."""
        key = Key(snapshot.manifest.model, snapshot.manifest.version)
        self._left.pop(key, None)
        with self._changed:
            self._snapshots[key] = snapshot
            self._changed.notify_all()

    def keep_aside(self, snapshot: Snapshot) -> None:
        """A snapshot of `find_again` that is nobody's now: it keeps its memory as long as nothing else needs that."""
        self._aside[Key(snapshot.manifest.model, snapshot.manifest.version)] = snapshot

    def take_aside(self, model: str, version: int) -> Snapshot | None:
        """The one of this number that was kept aside, to be opened again or removed; None when there is none."""
        return self._aside.pop(Key(model, version), None)

    def give_up_aside(self) -> Snapshot | None:
        """The one kept aside that is to be removed first, for its room; None when there is none."""
        return self._aside.popitem()[1] if self._aside else None

    def get(self, model: str, version: int) -> Snapshot | None:
        return self._snapshots.get(Key(model, version))

    def snapshots(self) -> list[Snapshot]:
        return list(self._snapshots.values())

    def wait(self, model: str, version: int, timeout_s: float) -> Snapshot | None:
        """The snapshot, waiting for it to be opened; None after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: Key(model, version) in self._snapshots, timeout_s)
            return self.get(model, version)

    def publish(self, snapshot: Snapshot, sealed: Sealed) -> Path:
        """Makes the version, sealed so, visible to readers; returns its directory."""
        path = self._directory("snapshots", snapshot.manifest)
        path.parent.mkdir(parents=True, exist_ok=True)
        snapshot.directory.rename(path)
        snapshot.directory = path
        for file, spec in zip(snapshot.files, snapshot.manifest.files, strict=True):
            file.path = path / spec.name
        snapshot.sealed = sealed
        self._unrecorded[Key(snapshot.manifest.model, snapshot.manifest.version)] = snapshot
        self.record_shown()
        return path

    def record_shown(self) -> None:
        """Writes the records of what is shown; what could not be written is tried again by the next call."""
        for key, snapshot in list(self._unrecorded.items()):
            assert snapshot.sealed is not None, "it was published"
            try:
                write_record(self.pool.directory, snapshot.manifest, snapshot.sealed, snapshot.digests())
            except OSError as error:
                if not snapshot.record_failed:
                    log.error("the record of %s cannot be written, so no engine can prove it: %s", snapshot, error)
                snapshot.record_failed = True
            else:
                del self._unrecorded[key]
                if snapshot.record_failed:
                    log.info("the record of %s is written now", snapshot)

    def remove(self, snapshot: Snapshot, why: str) -> int:
        """Gives the memory back after the reuse check; returns the bytes that had to be quarantined.

        Conflict while a reader is still inside: then it is to be called again. An incomplete snapshot whose descriptors
        were passed to a publisher is destroyed instead of reused: its publisher shares the relay's open descriptions,
        so the check for foreign mappings does not see it, and it may go on writing.
        """
        key = Key(snapshot.manifest.model, snapshot.manifest.version)
        with self._changed:
            if self._snapshots.get(key) is snapshot:
                del self._snapshots[key]
            self._leaving.add(key)
        self._left.pop(key, None)
        self._unrecorded.pop(key, None)
        snapshot.close(why)
        reuse = snapshot.complete or not snapshot.written_elsewhere  # nobody gets descriptors once it is closed
        remove_record(self.pool.directory, snapshot.manifest)
        quarantined = self.pool.give_back(snapshot.files, reuse=reuse)
        shutil.rmtree(snapshot.directory)
        self._leaving.discard(key)
        return quarantined

    def close(self, *, forget: bool = False) -> list[StoredSnapshot]:
        """Gives memory back, without that of versions which the next life finds again: they are returned. All of it to
        `forget`."""
        for snapshot in list(self._snapshots.values()):
            snapshot.close("the relay ends")
        kept = [] if forget else [*self._left.values(), *self._recorded()]
        self.pool.close(keep=[path for stored in kept for path in stored.paths])
        return kept

    def _recorded(self) -> Iterator[StoredSnapshot]:
        for key, snapshot in self._snapshots.items():
            if snapshot.sealed is not None and key not in self._unrecorded:
                digests = tuple(snapshot.digests())
                yield StoredSnapshot(self.pool.directory, snapshot.manifest, snapshot.sealed, digests)

    def _directory(self, kind: str, manifest: Manifest) -> Path:
        return self.pool.directory / kind / relative_path(manifest)
