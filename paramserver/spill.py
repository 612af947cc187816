"""Versions kept on disk: written when they are shown, read back through the same fetch as any other source.

Invariants:
- one thread writes, one version at a time; of those that wait only the newest of a model is written;
- a spilled version counts only whole; a full or failing disk costs the spill, never the relay;
- reading back trusts nothing: the fetch checks every chunk's digest, and the seal decides.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from paramserver import kept
from paramserver.config import show_bytes
from paramserver.core.records import ChunkMap, Manifest
from paramserver.core.transfer import Want
from paramserver.data.transport import Arrived, Link, Source
from paramserver.data.wire import Greeting, LinkBroken
from paramserver.kept import Kept
from paramserver.store import Snapshot
from protos.errors import NotFound, Unavailable

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
        self._changed = threading.Condition()
        self._closing = False
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

    def close(self) -> None:
        """Waits for the version that is being written."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _write_all(self) -> None:
        while (taken := self._take()) is not None:
            snapshot, root_digest = taken
            try:
                with snapshot.linked():  # a reason to keep it a while, though not when its room is needed
                    self._write(snapshot, root_digest)
            except NotFound as error:
                log.info("not spilled: %s", error)
            except OSError as error:
                self.failures += 1
                log.error("%s is not spilled to %s: %s", snapshot, self.directory, error.strerror)

    def _take(self) -> tuple[Snapshot, str] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._wanted)
            if self._closing:
                return None
            model = min(self._wanted)
            return self._wanted.pop(model)

    def _write(self, snapshot: Snapshot, root_digest: str) -> None:
        manifest, started = snapshot.manifest, time.monotonic()
        made = Kept(self.directory, manifest, root_digest, tuple(snapshot.digests()))
        kept.copy_out([file.view() for file in snapshot.files], made, snapshot.reading)
        seconds = time.monotonic() - started
        log.info("%s spilled, %s in %.2f s", snapshot, show_bytes(manifest.size_bytes), seconds)
        with self._changed:
            self._found[manifest.model, manifest.version] = made
            old = sorted(version for model, version in self._found if model == manifest.model)[: -self._retain]
            gone = [self._found.pop((manifest.model, version)) for version in old]
        for one in gone:
            kept.remove(one)
        self._wrote(manifest)


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
