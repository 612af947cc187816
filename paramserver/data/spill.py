"""The spill: versions on disk, written when they are shown, read back by the same fetch as from any other source.

Invariants:
- one thread writes, one version at a time; of those that wait only the newest of a model is written;
- a spilled version counts only whole, and for the very version that was announced: a disk may have another registry's
  version of its number;
- a full or failing disk costs the spill, never the relay nor the thread that writes;
- what is read back is checked like what a peer sends: every chunk by its digest, the whole by its sealed root;
- a copy that is damaged, or that cannot be read, is offered no more, and leaves the disk: it would keep the next best
  version from its turn.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from paramserver.config import show_bytes
from paramserver.core.notices import Notices
from paramserver.core.records import ChunkMap, Manifest, Sealed, digest
from paramserver.core.transfer import Want
from paramserver.data.frames import Greeting, LinkBroken
from paramserver.data.transport import Arrived, Link, Source
from paramserver.memory import stored
from paramserver.memory.store import Snapshot
from paramserver.memory.stored import StoredSnapshot
from protos.errors import NotFound

log = logging.getLogger(__name__)

SCHEME = "file:"


class Spill:
    """The versions below `directory`."""

    def __init__(self, directory: Path, *, retain: int, notices: Notices) -> None:
        self.directory = directory
        self.failures = 0
        self._retain, self._notices = retain, notices
        self._wanted: dict[str, tuple[Snapshot, Sealed]] = {}
        self._dropped: dict[str, int] = {}  # to be removed
        self._bad: list[StoredSnapshot] = []  # to be removed, and offered no more
        self._changed = threading.Condition()
        self._closing = False
        self._lock_fd = stored.lock_directory(directory, "--spill")  # what is half-written there is removed
        found = stored.find(directory)
        stored.sweep(directory, found)
        self._found = {(one.manifest.model, one.manifest.version): one for one in found}
        self._thread = threading.Thread(target=self._write_all, name="spill", daemon=True)
        self._thread.start()

    def versions(self) -> list[StoredSnapshot]:
        """The versions on disk, newest first per model."""
        with self._changed:
            return [one for _, one in sorted(self._found.items(), reverse=True)]

    def _has(self, manifest: Manifest) -> bool:
        found = self._found.get((manifest.model, manifest.version))
        return found is not None and found.manifest == manifest

    def source(self, manifest: Manifest) -> Source | None:
        """The source of a version that is on this disk."""
        with self._changed:
            return Source("spill", f"{SCHEME}{self.directory}") if self._has(manifest) else None

    def open(self, greeting: Greeting) -> Link:
        with self._changed:
            found = self._found.get((greeting.model, greeting.version))
        if found is None or found.manifest.epoch != greeting.epoch:
            raise NotFound(f"version {greeting.version} of {greeting.model} is not on this disk")
        return FileLink(found, self)

    def want(self, snapshot: Snapshot, sealed: Sealed) -> None:
        """Writes a shown version when its turn comes, unless a newer one of its model comes first."""
        manifest = snapshot.manifest
        with self._changed:
            waiting = self._wanted.get(manifest.model)
            if not self._has(manifest) and (waiting is None or waiting[0].manifest.version < manifest.version):
                self._wanted[manifest.model] = (snapshot, sealed)
                self._changed.notify_all()

    def drop(self, model: str, below: int) -> None:
        """Removes all versions of a model below this number, in the writing thread."""
        with self._changed:
            self._dropped[model] = below
            self._changed.notify_all()

    def withdraw(self, one: StoredSnapshot, why: str) -> None:
        """Offers a copy no more and removes it, in the writing thread. Any thread may call it."""
        with self._changed:
            if self._found.get((one.manifest.model, one.manifest.version)) is not one:
                return  # another stripe found it
            # Noted first: the writing thread may say at once that it cannot be removed.
            self._note(f"{_name(one)} in {self.directory} is offered no more, and removed: {why}")
            self._bad.append(self._found.pop((one.manifest.model, one.manifest.version)))
            self._changed.notify_all()

    def _note(self, text: str) -> None:
        log.error("%s", text)
        self._notices.add(text, time.time())

    def _failed(self, what: str, error: OSError) -> None:
        self.failures += 1
        self._note(f"{what} {self.directory}: {error.strerror}")

    def close(self) -> None:
        """Waits for the version that is being written."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _write_all(self) -> None:
        while (taken := self._take()) is not None:
            if isinstance(taken, list):
                for one in taken:
                    self._remove(one)
                continue
            snapshot, sealed = taken
            try:
                with snapshot.linked():  # keeps it while it is written, unless its room is needed
                    self._write(snapshot, sealed)
            except NotFound as error:
                log.info("not spilled: %s", error)
            except OSError as error:
                self._failed(f"{snapshot} is not spilled to", error)
            except Exception as error:
                self.failures += 1
                log.error("%s is not spilled to %s", snapshot, self.directory, exc_info=error)

    def _take(self) -> tuple[Snapshot, Sealed] | list[StoredSnapshot] | None:
        """The snapshot to write next, or versions to remove; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._wanted or self._dropped or self._bad)
            if self._closing:
                return None
            if self._bad:
                bad, self._bad = self._bad, []
                return bad
            if self._dropped:
                model, below = self._dropped.popitem()
                if model in self._wanted and self._wanted[model][0].manifest.version < below:
                    del self._wanted[model]
                log.info("versions of %s below %d leave the disk: they were dropped", model, below)
                return [one for (of, version), one in self._found.items() if of == model and version < below]
            model = min(self._wanted)
            return self._wanted.pop(model)

    def _write(self, snapshot: Snapshot, sealed: Sealed) -> None:
        manifest, started = snapshot.manifest, time.monotonic()
        made = StoredSnapshot(self.directory, manifest, sealed, tuple(snapshot.digests()))
        before = self._found.get((manifest.model, manifest.version))
        if before is not None:
            of = before.manifest.epoch
            self._note(f"{_name(before)} in {self.directory}, of {of}, makes way for the registry's of that number")
            self._remove(before)
        self._make_room(manifest)
        stored.copy_out([file.view() for file in snapshot.files], made, snapshot.reading)
        seconds = time.monotonic() - started
        log.info("%s spilled, %s in %.2f s", snapshot, show_bytes(manifest.size_bytes), seconds)
        with self._changed:
            self._found[manifest.model, manifest.version] = made
        for one in self._older(manifest, self._retain - 1):
            self._remove(one)

    def _make_room(self, manifest: Manifest) -> None:
        """Where the disk is full, its older versions go before their time. OSError when even that is too little.

        Nothing is removed for a version that will not fit all the same.
        """
        found = os.statvfs(self.directory)
        missing = manifest.size_bytes - found.f_bavail * found.f_frsize
        older = self._older(manifest, 0)
        if missing > sum(one.manifest.size_bytes for one in older):
            raise OSError(errno.ENOSPC, f"{show_bytes(missing)} are missing on it, and older versions have less")
        while missing > 0:
            one = older.pop(0)
            log.info(
                "version %d of %s leaves the disk for version %d",
                one.manifest.version,
                one.manifest.model,
                manifest.version,
            )
            self._remove(one)
            missing -= one.manifest.size_bytes

    def _older(self, manifest: Manifest, keep: int) -> list[StoredSnapshot]:
        """The versions on disk before this one, of its model, the oldest first, without the newest `keep`."""
        with self._changed:
            of = sorted(v for model, v in self._found if model == manifest.model and v < manifest.version)
            return [self._found[manifest.model, version] for version in of[: max(0, len(of) - keep)]]

    def _remove(self, one: StoredSnapshot) -> None:
        with self._changed:
            self._found.pop((one.manifest.model, one.manifest.version), None)
        try:
            stored.remove(one)
        except OSError as error:
            self._failed(f"{_name(one)}, which is offered no more, cannot be removed from", error)


def _name(one: StoredSnapshot) -> str:
    return f"version {one.manifest.version} of {one.manifest.model}"


NOT_THE_DISKS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR}
"""Errors of a read for which the copy on disk may be as good as ever."""


class FileLink:
    """One stripe's reading of a spilled version, as a `Link`."""

    transport = "file"
    rtt_s = 0.0

    def __init__(self, found: StoredSnapshot, spill: Spill) -> None:
        self._found, self._spill = found, spill
        self._chunks = ChunkMap.of(found.manifest)
        self._requested: list[Want] = []
        self._fds: dict[int, int] = {}

    def request(self, want: Want) -> None:
        self._requested.append(want)

    def receive(self, place: Callable[[int], memoryview], received: Callable[[int, int], None]) -> Arrived:
        want, began_at = self._requested.pop(0), time.monotonic()
        chunk = self._chunks.chunk(want.index)
        target = place(want.index)
        upto = want.from_byte
        while upto < chunk.length:
            try:
                num = os.preadv(self._fd(chunk.file), [target[upto:]], chunk.offset + upto)
            except OSError as error:
                if error.errno not in NOT_THE_DISKS:
                    self._spill.withdraw(self._found, f"chunk {want.index} cannot be read: {error.strerror}")
                raise LinkBroken(f"reading {self._found.directory}: {error.strerror}") from error
            if num == 0:
                self._spill.withdraw(self._found, f"it ends before chunk {want.index} does")
                raise LinkBroken(f"{self._found.directory} ends too soon")
            upto += num
            received(want.index, upto)
        if want.suspect and digest(target[: chunk.length]) != self._found.digests[want.index]:
            self._spill.withdraw(self._found, f"chunk {want.index} is damaged")  # the fetch finds it, too
        return Arrived(want.index, self._found.digests[want.index], upto - want.from_byte, began_at)

    def alive(self) -> None:
        """A file needs no heartbeat."""

    def break_off(self) -> None:
        """A disk is not waited for longer than a read takes."""

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _fd(self, file: int) -> int:
        if file not in self._fds:
            self._fds[file] = os.open(self._found.files[file], os.O_RDONLY | os.O_CLOEXEC)
        return self._fds[file]
