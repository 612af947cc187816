"""`paramserver pull`: one version from a relay into a directory, resumable, every digest checked.

Invariants:
- one pull at a time writes into a directory: whatever another put there would count as verified;
- files are written under names ending in `.partial` and renamed only when the version's root matched the sealed one;
- the journal holds the digest of every chunk that was verified, and only grows until the pull is finished; on
  resuming, what is on disk is hashed against it, so a torn write costs its chunk and nothing else;
- a file that has its own name already was put there by nobody else only if the journal proves every chunk of it: a
  pull was killed while it gave files their names. Any other is refused, and left as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console

from paramserver.client.progress import bytes_progress
from paramserver.client.relay import Lease, RelayClient
from paramserver.config import show_bytes
from paramserver.core.records import DIGEST_BYTES, PARTIAL, ChunkMap, FileSpec, Manifest, digest, version_root
from paramserver.data.fetch import Fetch
from paramserver.data.frames import Greeting
from paramserver.data.secured import DataAccess
from paramserver.data.tcp import TcpLink, dialer
from paramserver.data.transport import Source
from protos import terminal
from protos.errors import Conflict, Corrupt, LaminarError, Unavailable
from protos.terminal import say

log = logging.getLogger(__name__)

JOURNAL = ".laminar-pull"
_ENTRY = struct.Struct(f"!I{DIGEST_BYTES}s")
POLL_S = 0.1
PIN_TTL_S = 30.0


class PartialFiles:
    """The files of a version on disk, filled chunk by chunk; a sink for `Fetch`."""

    def __init__(self, manifest: Manifest, root_digest: str, directory: Path) -> None:
        self.manifest = manifest
        self.chunks = ChunkMap.of(manifest)
        self._directory = directory
        self._root_digest = root_digest
        self._digests: list[bytes | None] = [None] * self.chunks.num_chunks
        self._named: set[int] = set()  # files that a killed pull finished: they have their own names
        self._maps: list[mmap.mmap | None] = []
        self._journal = -1
        self._journal_end = 0  # of what it has whole
        self._journal_failed = False

    def __enter__(self) -> Self:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._lock()
            entries = self._entries()
            self._refuse_present(entries)
            self._maps = [self._map(self._path(number), spec.size_bytes) for number, spec in self._files()]
            self._resume(entries)
        except LaminarError:
            self._close()
            raise
        except OSError as error:
            self._close()
            raise Unavailable(
                f"cannot write {show_bytes(self.manifest.size_bytes)} to {self._directory}: {error.strerror}",
                hint="choose another --out directory",
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._journal >= 0:
            os.close(self._journal)
            self._journal = -1
        self._maps = []

    @property
    def bytes_present(self) -> int:
        return sum(self.chunks.chunk(i).length for i, known in enumerate(self._digests) if known is not None)

    def place(self, index: int) -> memoryview:
        chunk = self.chunks.chunk(index)
        mapping = self._maps[chunk.file]
        assert mapping is not None
        return memoryview(mapping)[chunk.offset : chunk.offset + chunk.length]

    def present(self, index: int, chunk_digest: bytes) -> None:
        self._digests[index] = chunk_digest
        if self._journal_failed:
            return
        try:
            os.write(self._journal, _ENTRY.pack(index, chunk_digest))
        except OSError as error:  # the files have their room: what this costs is work, if the pull is cut
            self._journal_failed = True
            log.warning("%s is written no further: %s", self._directory / JOURNAL, error)

    def missing(self) -> list[int]:
        return [index for index, known in enumerate(self._digests) if known is None]

    def finish(self) -> None:
        """Checks the root and gives the files their names. Corrupt when it is not the sealed version; Unavailable."""
        root = version_root(self.manifest, [known for known in self._digests if known is not None])
        if root != self._root_digest:
            raise Corrupt(
                f"the files have root {root}, version {self.manifest.version} was sealed as {self._root_digest}"
            )
        try:
            for (number, spec), mapping in zip(self._files(), self._maps, strict=True):
                if mapping is not None:
                    mapping.flush()
                if number not in self._named:
                    os.rename(self._path(number), self._directory / spec.name)
            (self._directory / JOURNAL).unlink()
        except OSError as error:
            raise Unavailable(f"cannot finish the files in {self._directory}: {error}") from error

    def _files(self) -> Iterator[tuple[int, FileSpec]]:
        return enumerate(self.manifest.files)

    def _path(self, number: int) -> Path:
        """Where the file of that number is as long as the pull is not finished."""
        return self._directory / (self.manifest.files[number].name + ("" if number in self._named else PARTIAL))

    def _map(self, path: Path, size: int) -> mmap.mmap | None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(fd, size)
            if size:  # a full disk refuses here; met while writing through the mapping, it would kill
                os.posix_fallocate(fd, 0, size)
            return mmap.mmap(fd, size) if size else None
        finally:
            os.close(fd)

    def _lock(self) -> None:
        """Opens the journal for this pull alone. Conflict while another has it."""
        path = self._directory / JOURNAL
        self._journal = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.fstat(self._journal).st_nlink > 0  # else one that ended just now has removed it
        except BlockingIOError:
            mine = False
        if not mine:
            raise Conflict(f"another pull writes there: {self._directory}", hint="give each its own --out, or wait")

    def _entries(self) -> dict[int, set[bytes]]:
        """Digests in the journal, by chunk. It begins with the root it belongs to: none of another version's count."""
        found = (self._directory / JOURNAL).read_bytes()
        head = f"{self._root_digest}\n".encode()
        ours = found.startswith(head)
        num_entries = (len(found) - len(head)) // _ENTRY.size if ours else 0
        entries: dict[int, set[bytes]] = {}
        for number in range(num_entries):
            index, chunk_digest = _ENTRY.unpack_from(found, len(head) + number * _ENTRY.size)
            entries.setdefault(index, set()).add(chunk_digest)
        self._journal_end = len(head) + num_entries * _ENTRY.size if ours else 0
        return entries

    def _refuse_present(self, entries: dict[int, set[bytes]]) -> None:
        for number, spec in self._files():
            path = self._directory / spec.name
            if not path.exists():
                continue
            if not self._is_proven(number, path, entries):
                if os.fstat(self._journal).st_size == 0:  # made just now, and nothing was to be resumed
                    (self._directory / JOURNAL).unlink()
                raise Conflict(f"{path} exists", hint="choose an empty --out directory")
            self._named.add(number)

    def _is_proven(self, number: int, path: Path, entries: dict[int, set[bytes]]) -> bool:
        """Whether every byte of that file is what a pull of this version has verified."""
        if not entries or not path.is_file() or path.stat().st_size != self.manifest.files[number].size_bytes:
            return False
        with path.open("rb") as file:
            for index in range(self.chunks.num_chunks):
                chunk = self.chunks.chunk(index)
                if chunk.file == number:
                    file.seek(chunk.offset)
                    if digest(file.read(chunk.length)) not in entries.get(index, ()):
                        return False
        return True

    def _resume(self, entries: dict[int, set[bytes]]) -> None:
        """Takes what is on disk and in the journal alike; the journal keeps what it has, so a kill costs nothing."""
        os.ftruncate(self._journal, self._journal_end)  # a torn entry is its last one
        os.lseek(self._journal, 0, os.SEEK_END)
        if not self._journal_end:
            os.write(self._journal, f"{self._root_digest}\n".encode())
        for index in range(self.chunks.num_chunks):
            if index in entries and (found := digest(self.place(index))) in entries[index]:
                self._digests[index] = found


async def pull(
    relay: RelayClient, model: str, version: int | None, out: Path, *, num_stripes: int, patience_s: float
) -> None:
    """Brings a version into `out`; the pin on it is renewed while it comes. Closes the client in the end."""
    console = terminal.console(stderr=True)
    async with relay as client:
        lease = await client.acquire(model, version, holder=f"pull:{os.getpid()}", ttl_s=PIN_TTL_S)
        try:
            status = await client.status()
            source = Source(status.relay, status.data_address)
            greeting = Greeting("fetch", model, lease.version, f"pull:{os.getpid()}")
            manifest = await asyncio.to_thread(_query_manifest, source, greeting, client.data_access)
            with PartialFiles(manifest, lease.root_digest, out) as files:
                if files.bytes_present:
                    say(f"resuming: {show_bytes(files.bytes_present)} are here already, and verified", err=True)
                dial = dialer(access=client.data_access)
                fetch = Fetch(files, greeting, lambda: [[source]], dial, num_stripes=num_stripes, patience_s=patience_s)
                await _fetch(fetch, manifest, client, lease, console)
                await asyncio.to_thread(files.finish)
        except BaseException:
            with contextlib.suppress(LaminarError):  # the user needs the first error
                await client.release(lease)
            raise
        await client.release(lease)
    say(f"{model} version {lease.version} (step {lease.step}) is in {out}, root {lease.root_digest}", err=True)


async def _fetch(fetch: Fetch, manifest: Manifest, client: RelayClient, lease: Lease, console: Console) -> None:
    """Runs the fetch in a thread, with a progress bar, renewing the pin."""
    work = asyncio.create_task(asyncio.to_thread(fetch.run))
    renewing = asyncio.create_task(client.keep_pinned(lease))
    try:
        with bytes_progress(console) as progress:
            bar = progress.add_task(f"{manifest.model} v{manifest.version}", total=manifest.size_bytes)
            while not work.done():
                progress.update(bar, completed=fetch.bytes_done)
                await asyncio.wait([work], timeout=POLL_S)
            progress.update(bar, completed=fetch.bytes_done)
    finally:
        fetch.cancel()
        renewing.cancel()
        await asyncio.wait([work, renewing])
    work.result()


def _query_manifest(source: Source, greeting: Greeting, access: DataAccess | None = None) -> Manifest:
    link = TcpLink(source, greeting, access=access)
    link.close()
    manifest = link.manifest
    if (manifest.model, manifest.version) != (greeting.model, greeting.version):
        raise Corrupt(
            f"{source.name} answers a request for version {greeting.version} of {greeting.model} with version "
            f"{manifest.version} of {manifest.model}"
        )
    return manifest
