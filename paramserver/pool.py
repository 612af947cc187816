"""The buffer pool: whole files in shared memory, allocated and touched before the relay is ready, reused only
when nobody else maps them.

Invariants:
- files in use, free and quarantined together with the unallocated rest never exceed `pool_bytes`;
- the relay keeps exactly one open description per file, so that a write lease on it (`F_SETLEASE F_WRLCK`) is
  refused exactly while a reader elsewhere still has the file open or mapped;
- a file leaves its published path before it is checked, and is never shortened while a foreign mapping may live;
- memory is allocated with `fallocate`: a full tmpfs refuses here and kills no writer later.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from paramserver.host import mount_of
from protos.errors import Conflict, OutOfCapacity, TooLarge, Unavailable

log = logging.getLogger(__name__)

NUM_BLANKS = 4  # the pool starts as this many warm files: the usual two retained, one in transit, one quarantined
SMALL_BYTES = 1 << 20  # a smaller file is not worth cutting from a warm one
OURS = {".lock", "free", "filling", "snapshots", "records", "publish.sock"}  # all that a relay puts into its directory


class PoolFile:
    """One file of the pool: its only open description, and the relay's kept mapping of it.

    `found`: it is there already, left by an earlier life.
    """

    def __init__(self, path: Path, size_bytes: int, *, found: bool = False) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (0 if found else os.O_CREAT | os.O_EXCL), 0o644)
        self._map: mmap.mmap | None = None
        if size_bytes and not found:
            try:
                os.posix_fallocate(self.fd, 0, size_bytes)
            except OSError as error:
                self.destroy()
                if error.errno == errno.ENOSPC:
                    raise OutOfCapacity(
                        f"the file system of {path.parent} has no room for {size_bytes} bytes",
                        hint="lower --pool-bytes, or point --pool-dir at a larger tmpfs",
                    ) from error
                raise

    def view(self) -> memoryview:
        """The whole file, writable; the mapping is made once and kept."""
        if not self.size_bytes:
            return memoryview(bytearray())
        if self._map is None:
            self._map = mmap.mmap(self.fd, self.size_bytes)
        return memoryview(self._map)

    def touch(self) -> None:
        """Brings every page in, so that the first version is not slower than the next."""
        if self.size_bytes:
            self.view().release()
            assert self._map is not None
            with contextlib.suppress(OSError):  # huge pages, where the tmpfs has huge=advise; none is fine
                self._map.madvise(mmap.MADV_HUGEPAGE)
            self._map.madvise(getattr(mmap, "MADV_POPULATE_WRITE", 23))

    def move(self, path: Path) -> None:
        os.rename(self.path, path)
        self.path = path

    def shrink(self, size_bytes: int) -> None:
        """Only for a free file that was checked: nobody else maps it."""
        self._unmap()
        os.ftruncate(self.fd, size_bytes)
        self.size_bytes = size_bytes

    def mapped_elsewhere(self) -> bool:
        """Whether any other open description (and so any foreign mapping) of this file lives."""
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EBUSY):
                return True
            raise
        fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return False

    def destroy(self) -> None:
        self._unmap()
        self.path.unlink(missing_ok=True)
        os.close(self.fd)

    def _unmap(self) -> None:
        if self._map is None:
            return
        with contextlib.suppress(BufferError):  # a view of it still lives: it goes when that does
            self._map.close()
        self._map = None


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Where the bytes of the pool are."""

    pool_bytes: int
    used_bytes: int
    free_bytes: int
    quarantined_bytes: int


class Pool:
    """All memory for snapshots of one relay, below one locked directory.

    Files of an earlier life are reclaimed, but for those in `keep`, which `adopt` then takes over.
    """

    def __init__(self, directory: Path, pool_bytes: int, *, keep: Collection[Path] = ()) -> None:
        if pool_bytes <= 0:
            raise TooLarge(f"a pool of {pool_bytes} bytes", hint="give --pool-bytes a positive size")
        self.directory = directory
        self.pool_bytes = pool_bytes
        self._mutex = threading.Lock()
        self._free: list[PoolFile] = []
        self._used: set[PoolFile] = set()
        self._quarantined: set[PoolFile] = set()
        self._serial = 0
        self._lock_fd = _lock_directory(directory)
        self._free_directory = directory / "free"
        _clear(directory, keep)
        self._free_directory.mkdir(mode=0o700)

    def preallocate(self) -> None:
        """Allocates and touches the whole pool. Raises OutOfCapacity when the file system has less."""
        found = os.statvfs(self.directory)
        new_bytes = self.pool_bytes - self._used_bytes()
        if new_bytes > found.f_bavail * found.f_frsize:  # said before the memory of others is squeezed out
            raise OutOfCapacity(
                f"a pool of {self.pool_bytes} bytes, {self.directory} has room for {found.f_bavail * found.f_frsize}",
                hint="lower --pool-bytes, or point --pool-dir at a larger tmpfs",
            )
        blank, rest = divmod(self.pool_bytes, NUM_BLANKS)
        blank -= blank % mmap.PAGESIZE
        for _ in range(new_bytes // blank if blank > SMALL_BYTES else 0):
            file = self._create(blank)
            file.touch()
            self._free.append(file)
        kind, _ = mount_of(self.directory.resolve())
        if kind not in ("tmpfs", "ramfs", "hugetlbfs"):
            log.warning(
                "%s is on %s, not in memory: it is slower; choose a --pool-dir below /dev/shm", self.directory, kind
            )
        log.info("pool of %d bytes ready in %s (%d cold)", self.pool_bytes, self.directory, rest)

    def adopt(self, paths: Sequence[Path]) -> list[PoolFile]:
        """Takes over files of an earlier life, as they are. OutOfCapacity when the pool is smaller now."""
        with self._mutex:
            files = [PoolFile(path, path.stat().st_size, found=True) for path in paths]
            if sum(file.size_bytes for file in files) > self._available_bytes():
                for file in files:
                    file.destroy()
                raise OutOfCapacity(f"what was found does not fit in a pool of {self.pool_bytes} bytes")
            self._used.update(files)
            return files

    def take(self, sizes: list[int]) -> list[PoolFile]:
        """Files of exactly these sizes, warm ones where there are. OutOfCapacity when they do not fit now."""
        with self._mutex:
            self._sweep()
            if sum(sizes) > self.pool_bytes - self._used_bytes() - self._quarantined_bytes():
                raise OutOfCapacity(f"{sum(sizes)} bytes wanted, {self._available_bytes()} available in the pool")
            taken: list[PoolFile] = []
            try:
                taken.extend(self._take_one(size) for size in sizes)
            except (OSError, OutOfCapacity):
                self._free.extend(taken)
                self._used.difference_update(taken)
                raise
            return taken

    def give_back(self, files: list[PoolFile], *, reuse: bool = True) -> int:
        """Takes files off their path; free when nobody maps them, else quarantined. Returns quarantined bytes.

        `reuse=False` destroys them: an aborted publisher may still be writing through its mapping.
        """
        with self._mutex:
            for file in files:
                self._used.discard(file)
                if reuse:
                    file.move(self._next_path())
                    self._quarantined.add(file)
                else:
                    file.destroy()
            self._sweep()
            return sum(file.size_bytes for file in files if file in self._quarantined)

    def sweep(self) -> int:
        """Frees what is no longer mapped; returns the bytes that stay quarantined."""
        with self._mutex:
            self._sweep()
            return self._quarantined_bytes()

    def statistics(self) -> PoolStatistics:
        with self._mutex:
            return PoolStatistics(
                self.pool_bytes, self._used_bytes(), self._available_bytes(), self._quarantined_bytes()
            )

    def close(self) -> None:
        """Removes every file; readers that still map one keep their bytes until they unmap."""
        with self._mutex:
            for file in [*self._free, *self._used, *self._quarantined]:
                file.destroy()
            self._free, self._used, self._quarantined = [], set(), set()
            _clear(self.directory)
            os.close(self._lock_fd)

    def _used_bytes(self) -> int:
        return sum(file.size_bytes for file in self._used)

    def _quarantined_bytes(self) -> int:
        return sum(file.size_bytes for file in self._quarantined)

    def _available_bytes(self) -> int:
        return self.pool_bytes - self._used_bytes() - self._quarantined_bytes()

    def _sweep(self) -> None:
        for file in sorted(self._quarantined, key=lambda file: file.path):
            if not file.mapped_elsewhere():
                self._quarantined.discard(file)
                self._free.append(file)

    def _take_one(self, size: int) -> PoolFile:
        fitting = [file for file in self._free if file.size_bytes >= size]
        exact = next((file for file in fitting if file.size_bytes == size), None)
        if exact is None and size >= SMALL_BYTES and fitting:
            exact = min(fitting, key=lambda file: file.size_bytes)
            exact.shrink(size)
        if exact is not None:
            self._free.remove(exact)
        else:
            self._make_room(size)
            exact = self._create(size)
        self._used.add(exact)
        return exact

    def _make_room(self, size: int) -> None:
        """Cuts from the largest free file, or destroys small ones, until `size` more bytes fit in the pool."""
        while self._free and (missing := size - (self._available_bytes() - self._free_bytes())) > 0:
            largest = max(self._free, key=lambda file: file.size_bytes)
            if largest.size_bytes - missing >= SMALL_BYTES:
                largest.shrink(largest.size_bytes - missing)
            else:
                smallest = min(self._free, key=lambda file: file.size_bytes)
                self._free.remove(smallest)
                smallest.destroy()

    def _free_bytes(self) -> int:
        return sum(file.size_bytes for file in self._free)

    def _create(self, size: int) -> PoolFile:
        return PoolFile(self._next_path(), size)

    def _next_path(self) -> Path:
        self._serial += 1
        return self._free_directory / f"{self._serial:08d}"


def _lock_directory(directory: Path) -> int:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        foreign = sorted(set(os.listdir(directory)) - OURS)
        if foreign:  # everything below is cleared: a home directory given by mistake must not be
            raise Conflict(
                f"{directory} holds {foreign[0]!r}, which is no relay's", hint="give --pool-dir a directory of its own"
            )
        fd = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Unavailable(f"cannot use {directory}: {error.strerror}", hint="choose another --pool-dir") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise Conflict(
            f"the pool directory {directory} is in use by another relay", hint="give each relay its own --pool-dir"
        ) from error
    return fd


def _clear(directory: Path, keep: Collection[Path] = ()) -> None:
    """Reclaims what an earlier life left, except the lock and what is to be kept."""
    for root, names, files in os.walk(directory, topdown=False):
        for path in (Path(root) / name for name in files):
            if path.name != ".lock" and path not in keep:
                path.unlink()
        for path in (Path(root) / name for name in names):
            if not any(path in kept.parents for kept in keep):
                path.rmdir()
