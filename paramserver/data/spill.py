"""Versions kept on disk: written when they are shown, read back through the same fetch as any other source.

Invariants:
- one thread writes, one version at a time; of those that wait only the newest of a model is written;
- a spilled version counts only whole; a full or failing disk costs the spill, never the relay;
- reading back trusts nothing: the fetch checks every chunk's digest, and the seal decides.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from paramserver.config import show_bytes
from paramserver.core.records import ChunkMap, Manifest
from paramserver.core.transfer import Want
from paramserver.data.frames import Greeting, LinkBroken
from paramserver.data.transport import Arrived, Link, Source
from paramserver.memory import kept
from paramserver.memory.kept import Kept
from paramserver.memory.store import Snapshot
from protos.errors import Conflict, NotFound, Unavailable

log = logging.getLogger(__name__)

SCHEME = "file:"


class Spill:
    """The versions below `directory`. `wrote` is called from the writing thread with what is on disk now."""

    def __init__(self, directory: Path, *, retain: int, wrote: Callable[[Manifest], None]) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Unavailable(f"cannot use {directory}: {error.strerror}", hint="choose another --spill") from error
        self.directory = directory
        self.failures = 0
        self._retain = retain
        self._wrote = wrote
        self._wanted: dict[str, tuple[Snapshot, str]] = {}
        self._dropped: dict[str, int] = {}  # to be removed
        self._changed = threading.Condition()
        self._closing = False
        self._lock_fd = _lock(directory)
        kept.sweep(directory)
        self._found = {(one.manifest.model, one.manifest.version): one for one in kept.find(directory)}
        self._thread = threading.Thread(target=self._write_all, name="spill", daemon=True)
        self._thread.start()

    def manifests(self) -> list[Manifest]:
        """What is on disk, newest first per model."""
        with self._changed:
            return [one.manifest for _, one in sorted(self._found.items(), reverse=True)]

    def source(self, model: str, version: int) -> Source | None:
        """Whom a fetch asks for a version that is on this disk."""
        with self._changed:
            return Source("spill", f"{SCHEME}{self.directory}") if (model, version) in self._found else None

    def open(self, greeting: Greeting) -> Link:
        with self._changed:
            found = self._found.get((greeting.model, greeting.version))
        if found is None:
            raise NotFound(f"version {greeting.version} of {greeting.model} is not on this disk")
        return FileLink(found)

    def want(self, snapshot: Snapshot, root_digest: str) -> None:
        """Writes a shown version when its turn comes, unless a newer one of its model comes first."""
        manifest = snapshot.manifest
        with self._changed:
            waiting = self._wanted.get(manifest.model)
            if (manifest.model, manifest.version) not in self._found and (
                waiting is None or waiting[0].manifest.version < manifest.version
            ):
                self._wanted[manifest.model] = (snapshot, root_digest)
                self._changed.notify_all()

    def drop(self, model: str, below: int) -> None:
        """Removes all versions of a model below this number, in the writing thread."""
        with self._changed:
            self._dropped[model] = below
            self._changed.notify_all()

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
                    log.info(
                        "version %d of %s leaves the disk: it was dropped", one.manifest.version, one.manifest.model
                    )
                    self._remove(one)
                continue
            snapshot, root_digest = taken
            try:
                with snapshot.linked():  # a reason to keep it a while, though not when its room is needed
                    self._write(snapshot, root_digest)
            except NotFound as error:
                log.info("not spilled: %s", error)
            except OSError as error:
                self.failures += 1
                log.error("%s is not spilled to %s: %s", snapshot, self.directory, error.strerror)
            except Exception as error:
                self.failures += 1
                log.error("%s is not spilled to %s", snapshot, self.directory, exc_info=error)

    def _take(self) -> tuple[Snapshot, str] | list[Kept] | None:
        """What to write next, or versions to remove; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._wanted or self._dropped)
            if self._closing:
                return None
            if self._dropped:
                model, below = self._dropped.popitem()
                if model in self._wanted and self._wanted[model][0].manifest.version < below:
                    del self._wanted[model]
                return [one for (of, version), one in self._found.items() if of == model and version < below]
            model = min(self._wanted)
            return self._wanted.pop(model)

    def _write(self, snapshot: Snapshot, root_digest: str) -> None:
        manifest, started = snapshot.manifest, time.monotonic()
        made = Kept(self.directory, manifest, root_digest, tuple(snapshot.digests()))
        self._make_room(manifest)
        kept.copy_out([file.view() for file in snapshot.files], made, snapshot.reading)
        seconds = time.monotonic() - started
        log.info("%s spilled, %s in %.2f s", snapshot, show_bytes(manifest.size_bytes), seconds)
        with self._changed:
            self._found[manifest.model, manifest.version] = made
        for one in self._older(manifest, self._retain - 1):
            self._remove(one)
        self._wrote(manifest)

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

    def _older(self, manifest: Manifest, keep: int) -> list[Kept]:
        """What is on disk of a model before this version, the oldest first, without the newest `keep` of it."""
        with self._changed:
            of = sorted(v for model, v in self._found if model == manifest.model and v < manifest.version)
            return [self._found[manifest.model, version] for version in of[: max(0, len(of) - keep)]]

    def _remove(self, one: Kept) -> None:
        with self._changed:
            del self._found[one.manifest.model, one.manifest.version]
        kept.remove(one)
        self._wrote(one.manifest)


def _lock(directory: Path) -> int:
    """A relay removes what it finds half-written there, so nobody else may be writing."""
    fd = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise Conflict(f"{directory} is in use by another relay", hint="give each relay its own --spill") from error
    except OSError as error:
        os.close(fd)
        raise Unavailable(f"cannot lock {directory}: {error.strerror}", hint="choose another --spill") from error
    return fd


class FileLink:
    """One stripe's reading of a spilled version, behind the seam that sockets are behind too."""

    transport = "file"
    rtt_s = 0.0

    def __init__(self, found: Kept) -> None:
        self._found = found
        self._chunks = ChunkMap.of(found.manifest)
        self._asked: list[Want] = []
        self._fds: dict[int, int] = {}

    def ask(self, want: Want) -> None:
        self._asked.append(want)

    def receive(self, place: Callable[[int], memoryview], received: Callable[[int, int], None]) -> Arrived:
        want, began_at = self._asked.pop(0), time.monotonic()
        chunk = self._chunks.chunk(want.index)
        target = place(want.index)
        upto = want.from_byte
        while upto < chunk.length:
            try:
                num = os.preadv(self._fd(chunk.file), [target[upto:]], chunk.offset + upto)
            except OSError as error:
                raise LinkBroken(f"reading {self._found.directory}: {error.strerror}") from error
            if num == 0:
                raise LinkBroken(f"{self._found.directory} ends too soon")
            upto += num
            received(want.index, upto)
        return Arrived(want.index, self._found.digests[want.index], upto - want.from_byte, began_at)

    def alive(self) -> None:
        """A file needs no heartbeat."""

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _fd(self, file: int) -> int:
        if file not in self._fds:
            self._fds[file] = os.open(self._found.files[file], os.O_RDONLY | os.O_CLOEXEC)
        return self._fds[file]
