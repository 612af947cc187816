"""The buffer pool: whole files in shared memory, allocated and touched before the relay is ready, reused only
when no other process maps them.

Invariants:
- files in use, free and quarantined together with the unallocated rest never exceed `pool_bytes`;
- whatever the kernel may take long for (allocating, freeing, touching) happens outside `_mutex`, so that an event loop
  may take that one at any time; only the holder of `_shaping` makes files or changes their sizes, in its own thread;
- room is promised (`reserve`) before it is there (`fill`): what was promised to one version is refused to all others;
- the relay keeps exactly one open description per file, so that a write lease on it (`F_SETLEASE F_WRLCK`) is
  refused exactly while a reader elsewhere still has the file open or mapped; a hard link counts as a reader;
- free files give way to those that are wanted where descriptors are scarce, too;
- a file leaves its published path before it is checked, and is never shortened while a foreign mapping may live;
- memory is allocated with `fallocate`: a full tmpfs refuses here and kills no writer later.

Why reuse needs a check: an mmap cannot be revoked. A reader whose pin lapsed, or that never had one, may keep the file
mapped for as long as it likes. Written again under it, the file would silently show that reader the next version;
shortened, it would kill the reader with SIGBUS. So the end of the last pin starts a check and never a reuse: first the
path goes, so that no new reader can come, then the kernel is queried about the readers that are left. A file that still
has one is quarantined, counted, and checked again. A publisher maps through the relay's own descriptor, so it does not
block the check; it may write only until its commit.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import mmap
import os
import resource
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paramserver.config import show_apart, show_bytes
from paramserver.memory.mapping import HUGE_BYTES, IN_MEMORY, FileMapping, available_memory, mount_of
from paramserver.memory.orphans import clear_hint
from paramserver.memory.stored import LOCK, POOLS, lock_directory, refuse_foreign
from protos.errors import OutOfCapacity, TooLarge, Unavailable

log = logging.getLogger(__name__)

NUM_BLANKS = 4  # the pool starts as at least as many warm files: two retained, one in transit, one quarantined
BLANK_BYTES_MAX = (4 << 30) + (1 << 20)  # a file of the SDK's default size with its header is cut without allocating
LAYOUTS_MAX = 16  # models for whose next version the pool keeps files of the right sizes
PIECE_BYTES = 256 << 20  # allocated, or touched, at once: how long a stop may wait
SMALL_BYTES = 1 << 20  # a smaller file is not worth cutting from a warm one


class PoolFile:
    """One file of the pool: its only open description, and the relay's kept mapping of it.

    `found`: it is there already, left by an earlier life.
    """

    def __init__(self, path: Path, size_bytes: int, *, found: bool = False) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (0 if found else os.O_CREAT | os.O_EXCL), 0o644)
        self._map: FileMapping | None = None

    def allocate(self, grown: Callable[[int], None]) -> None:
        """Gets its memory from the kernel. `grown` is called with each piece, and may raise to stop: the file goes
        then.

        In huge pages, as far as the kernel gives them. Raises OutOfCapacity when the file system has less.
        """
        try:
            os.ftruncate(self.fd, self.size_bytes)
            huge = True
            for start in range(0, self.size_bytes, PIECE_BYTES):
                piece = min(PIECE_BYTES, self.size_bytes - start)
                huge = huge and self._allocate_huge(start, piece)
                os.posix_fallocate(self.fd, start, piece)  # the rest: what is there already stays as it is
                grown(piece)
        except BaseException as error:
            self.destroy()
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise OutOfCapacity(
                    f"the file system of {self.path.parent} has no room for {show_bytes(self.size_bytes)}",
                    hint="lower --pool-bytes, or point --pool-dir at a larger tmpfs",
                ) from error
            raise

    def _allocate_huge(self, start: int, num_bytes: int) -> bool:
        """The whole huge pages of a range, each grown from one small page; whether the kernel gave them.

        Nothing beyond the file's end: the pool counts files by their sizes.
        """
        num_bytes -= num_bytes % HUGE_BYTES
        for at in range(start, start + num_bytes, HUGE_BYTES):
            os.posix_fallocate(self.fd, at, mmap.PAGESIZE)
        try:
            if num_bytes:
                self._mapping().collapse(start, num_bytes)
        except OSError as error:  # an older kernel, no tmpfs, or memory in small pieces only
            _log_small(error.strerror)
            return False
        return True

    def _mapping(self) -> FileMapping:
        if self._map is None:
            self._map = FileMapping(self.fd, self.size_bytes)
        return self._map

    def view(self) -> memoryview:
        """The whole file, writable; the mapping is made once and stored."""
        return self._mapping().view() if self.size_bytes else memoryview(bytearray())

    def touch(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Brings every page in, so that the first version is not slower than the next; some of them when stopped."""
        if not self.size_bytes:
            return
        with contextlib.suppress(OSError):  # small pages are fine
            self._mapping().prefer_huge()
        for start in range(0, self.size_bytes, PIECE_BYTES):
            if stopped():
                return
            self._mapping().populate(start, min(PIECE_BYTES, self.size_bytes - start))

    def move(self, path: Path) -> None:
        os.rename(self.path, path)
        self.path = path

    def shrink(self, size_bytes: int) -> None:
        """Only for a free file that was checked: nobody else maps it."""
        self._unmap()
        os.ftruncate(self.fd, size_bytes)
        self.size_bytes = size_bytes

    def mapped_elsewhere(self) -> bool:
        """Whether any other open description (and so any foreign mapping) of this file lives.

        The kernel grants a write lease only to a file's single open description, and a mapping keeps its description
        open. So an attempt to take one answers the question, without a list of processes and without a race: the path
        is gone, hence no new description can appear after the answer. The lease itself is given back at once.
        """
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EBUSY):
                return True
            raise
        fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return False

    def linked_elsewhere(self) -> bool:
        """Whether the file has another name (a hard link), which would show the next version's bytes."""
        return os.fstat(self.fd).st_nlink > 1

    def destroy(self) -> None:
        self.path.unlink(missing_ok=True)
        self.leave()

    def leave(self) -> None:
        """The file stays, for a later life."""
        self._unmap()
        os.close(self.fd)

    def _unmap(self) -> None:
        if self._map is not None:
            self._map.close()
        self._map = None


@functools.cache
def _log_small(why: str) -> None:
    """Logs each reason once."""
    log.debug("the pool's memory stays in small pages: %s", why)


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Where the bytes of the pool are."""

    pool_bytes: int
    used_bytes: int
    free_bytes: int
    quarantined_bytes: int


DESCRIPTORS_KEPT = 128
"""Open files that are not a snapshot's: connections of peers and publishers, etcd, the log."""


class Stopped(Unavailable):
    """Memory was not allocated because the relay ends."""


class _GiveWay(Exception):
    """Files are wanted now: cutting those for later stops."""


class Allotment:
    """Room for the files of one version, promised by the pool: those in `files` are there, `fill` makes the others."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.files: dict[int, PoolFile] = {}  # by place in `sizes`
        self.bytes_done = 0  # of those that are there or being made

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def ready(self) -> bool:
        return len(self.files) == len(self.sizes)

    @property
    def promised_bytes(self) -> int:
        """Bytes promised and not there yet."""
        return self.size_bytes - sum(file.size_bytes for file in self.files.values())

    def missing(self) -> list[tuple[int, int]]:
        """(place, size) of the files still to be made, the largest first: they fit the fewest others."""
        left = [(place, size) for place, size in enumerate(self.sizes) if place not in self.files]
        return sorted(left, key=lambda one: -one[1])

    def put(self, place: int, file: PoolFile) -> None:
        self.files[place] = file

    def in_order(self) -> list[PoolFile]:
        return [self.files[place] for place in range(len(self.sizes))]


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
        self._shaping = threading.Lock()
        self._free: list[PoolFile] = []
        self._used: set[PoolFile] = set()
        self._quarantined: set[PoolFile] = set()
        self._condemned: set[PoolFile] = set()  # of those in quarantine: to be destroyed
        self._promised: set[Allotment] = set()
        self._allocated_bytes = 0  # of all files that exist, those being made or destroyed included
        self._layouts: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._num_filling = 0
        self._uncut = False
        self._closing = False
        self._serial = 0
        refuse_foreign(directory, POOLS, "give --pool-dir a directory of its own")
        self._lock_fd = lock_directory(directory, "--pool-dir")
        self._free_directory = directory / "free"
        _clear(directory, keep)
        self._free_directory.mkdir(mode=0o700)
        self._leases = self._has_leases()

    def preallocate(self) -> None:
        """Allocates and touches the whole pool. Raises OutOfCapacity when the file system or the host has less."""
        found = os.statvfs(self.directory)
        here_bytes = self._allocated_bytes  # versions of an earlier life, and the memory of those that were damaged
        new_bytes, room_bytes = self.pool_bytes - here_bytes, found.f_bavail * found.f_frsize + here_bytes
        if self.pool_bytes > room_bytes:  # refused before other processes lose their memory to the try
            wanted, room = show_apart(self.pool_bytes, room_bytes)
            raise OutOfCapacity(
                f"a pool of {wanted}, {self.directory} has room for {room}",
                hint=clear_hint(self.directory.parent) or "lower --pool-bytes, or point --pool-dir at a larger tmpfs",
            )
        kind, _ = mount_of(self.directory.resolve())
        if kind in IN_MEMORY and new_bytes > (memory_bytes := available_memory()):  # Linux would kill for the rest
            wanted, there = show_apart(new_bytes, memory_bytes)
            raise OutOfCapacity(
                f"{self.directory} needs {wanted}, and this host has {there} of memory available",
                hint=clear_hint(self.directory.parent) or "lower --pool-bytes",
            )
        blank = self.pool_bytes // max(NUM_BLANKS, -(-self.pool_bytes // BLANK_BYTES_MAX))
        blank -= blank % mmap.PAGESIZE
        with self._shaping:
            for _ in range(new_bytes // blank if blank > SMALL_BYTES else 0):
                file = self._create(blank, self._unless_closing)
                file.touch(lambda: self._closing)
                self._free.append(file)
        if kind not in (*IN_MEMORY, "hugetlbfs"):
            log.warning(
                "%s is on %s, not in memory: it is slower; choose a --pool-dir below /dev/shm", self.directory, kind
            )
        cold = self.pool_bytes - self._allocated_bytes
        log.info("pool of %s ready in %s (%s cold)", show_bytes(self.pool_bytes), self.directory, show_bytes(cold))

    def adopt(self, paths: Sequence[Path]) -> list[PoolFile]:
        """Takes over files of an earlier life, as they are. OutOfCapacity when the pool is smaller now.

        Free files, those of versions that turned out damaged, make way.
        """
        with self._shaping:
            with self._mutex:
                files = _found_again(paths)
                size_bytes = sum(file.size_bytes for file in files)
                if size_bytes > self._available_bytes():
                    for file in files:
                        file.destroy()
                    wanted, available = show_apart(size_bytes, self._available_bytes())
                    raise OutOfCapacity(f"{wanted} wanted, {available} left of --pool-bytes")
                self._used.update(files)
                self._allocated_bytes += size_bytes
                going: list[PoolFile] = []
                while self._allocated_bytes - sum(file.size_bytes for file in going) > self.pool_bytes:
                    going.append(self._free.pop())
            self._give_up(going)
            return files

    # ---- taking memory

    def take(self, sizes: Sequence[int]) -> list[PoolFile]:
        """Files of exactly these sizes, warm ones where there are; blocks. OutOfCapacity when they do not fit now."""
        allotment = self.reserve(sizes)
        self.fill(allotment)
        return allotment.in_order()

    def reserve(self, sizes: Sequence[int]) -> Allotment:
        """Promises room for files of these sizes; those that are free in exactly such a size are in it at once."""
        with self._mutex:
            self._sweep()
            if len(sizes) > (spare := self._spare_descriptors()):
                raise OutOfCapacity(
                    f"{len(sizes)} files wanted, and the limit of open files leaves {max(0, spare)}",
                    hint="raise it (ulimit -n), or publish in fewer, larger files",
                )
            if sum(sizes) > self._available_bytes():
                wanted, available = show_apart(sum(sizes), self._available_bytes())
                raise OutOfCapacity(f"{wanted} wanted, {available} available in the pool")
            allotment = Allotment(sizes)
            self._take_exact(allotment)
            self._promised.add(allotment)
            return allotment

    def fill(self, allotment: Allotment) -> None:
        """Makes what is missing; blocks, for minutes where a large version is allocated. Raises OutOfCapacity.

        Whatever is raised, nothing of the allotment is promised any more and what was made of it is free.
        """
        with self._mutex:
            self._num_filling += 1
        try:
            with self._shaping:
                with self._mutex:
                    self._take_exact(allotment)  # files made meanwhile for a version that was given up
                for place, size in allotment.missing():
                    self._make_one(allotment, place, size)
        except OSError:  # such as for want of descriptors, which those that were made would keep from everybody
            with self._mutex:
                made = list(allotment.files.values())
                allotment.files.clear()
            self.release(allotment)
            self._destroy(made)
            raise
        except BaseException:
            self.release(allotment)
            raise
        finally:
            with self._mutex:
                self._num_filling -= 1
        with self._mutex:
            self._promised.discard(allotment)

    def claim(self, allotment: Allotment) -> list[PoolFile]:
        """The files of a filled allotment, in order: from now on they are given back, not released."""
        with self._mutex:
            self._promised.discard(allotment)
            return allotment.in_order()

    def release(self, allotment: Allotment) -> None:
        """The version is not wanted after all: its files stay in the pool as they are, for the next."""
        with self._mutex:
            self._promised.discard(allotment)
            files = list(allotment.files.values())
            allotment.files.clear()
            self._used.difference_update(files)
            self._free.extend(files)
            self._uncut = True

    def give_back(self, files: Sequence[PoolFile], *, reuse: bool = True) -> int:
        """Takes files off their path; free when nobody maps them, else quarantined. Returns quarantined bytes.

        `reuse=False` destroys them: an aborted publisher may still be writing through its mapping. On file systems
        without leases they always are, since a reader's mapping would not be seen; readers keep what they map.
        """
        if not (reuse and self._leases):
            self._destroy(files)
            return 0
        with self._mutex:
            for file in files:
                self._used.discard(file)
                if file.linked_elsewhere():
                    log.warning(
                        "%s has another name (a hard link): its memory comes back when that is removed", file.path
                    )
                file.move(self._next_path())
                self._quarantined.add(file)
            self._sweep()
            return sum(file.size_bytes for file in files if file in self._quarantined)

    def sweep(self) -> int:
        """Frees what is no longer mapped; returns the bytes that stay quarantined."""
        with self._mutex:
            self._sweep()
            return self._quarantined_bytes()

    # ---- cut in advance

    def expect(self, what: str, sizes: Sequence[int]) -> None:
        """The next version of `what` probably has files of these sizes: `cut` makes them ready before it comes."""
        with self._mutex:
            self._layouts[what] = tuple(sizes)
            self._layouts.move_to_end(what)
            if len(self._layouts) > LAYOUTS_MAX:
                self._layouts.popitem(last=False)
            self._uncut = True

    def forget(self, what: str) -> None:
        """No further version of it is expected."""
        with self._mutex:
            self._layouts.pop(what, None)

    @property
    def uncut(self) -> bool:
        """Whether `cut` may have something to do."""
        return self._uncut

    def cut(self) -> None:
        """Makes free files of the sizes that are expected out of other free memory; blocks, and gives way to `fill`."""
        with self._mutex:
            condemned = list(self._condemned)
        self._destroy(condemned)
        while (size := self._next_cut()) is not None:
            with self._shaping:
                try:
                    self._cut_one(size)
                except _GiveWay:
                    return
                except (OutOfCapacity, OSError) as error:
                    self._uncut = False  # until memory comes back, or another version
                    log.info("the memory of the next version is allocated when it comes: %s", error)
                    return

    def _next_cut(self) -> int | None:
        """The size of a file that an expected version lacks. Only what completes a version is worth cutting."""
        with self._mutex:
            self._uncut = False
            free = Counter(file.size_bytes for file in self._free)
            spare_bytes = self._available_bytes()
            for sizes in reversed(self._layouts.values()):
                wanted = Counter(sizes)
                missing = wanted - free
                if sum(sizes) > spare_bytes or len(sizes) + len(self._free) > self._spare_descriptors():
                    continue
                if missing:
                    self._uncut = True
                    return max(missing)
                free -= wanted
                spare_bytes -= sum(sizes)
            return None

    def _cut_one(self, size: int) -> None:
        def stopped() -> bool:
            return self._closing or self._num_filling > 0

        def grown(_: int) -> None:
            if stopped():
                raise _GiveWay

        if stopped():
            raise _GiveWay
        file = self._shrink_one(size, expected=False) or self._allocate(size, grown, expected=False)
        if file is None:
            raise OutOfCapacity("what is free is expected to be wanted by other models")
        file.touch(stopped)
        with self._mutex:
            self._free.append(file)

    def statistics(self) -> PoolStatistics:
        with self._mutex:
            return PoolStatistics(
                self.pool_bytes,
                self._used_bytes() + self._promised_bytes(),
                self._available_bytes(),
                self._quarantined_bytes(),
            )

    def stop(self) -> None:
        """Files under way stop at their next piece, and none is begun."""
        self._closing = True

    def close(self, *, keep: Collection[Path] = ()) -> None:
        """Removes every file but those in `keep`; readers that still map one keep their bytes until they unmap."""
        self.stop()
        with self._shaping, self._mutex:
            for file in [*self._free, *self._used, *self._quarantined]:
                if file.path in keep:
                    file.leave()
                else:
                    file.destroy()
            self._free, self._used, self._quarantined = [], set(), set()
            _clear(self.directory, keep)
            os.close(self._lock_fd)

    def _has_leases(self) -> bool:
        """Whether this file system knows leases; some network and user-space ones do not.

        Without them there is no way to see a reader, so no file is ever used again: each goes when its version does,
        and the next version gets new memory, which costs its allocation each time.
        """
        probe = PoolFile(self._next_path(), 0)
        try:
            probe.mapped_elsewhere()
        except OSError as error:
            log.warning(
                "%s knows no leases (%s): memory is not used again but allocated anew for each version; "
                "choose a --pool-dir on a tmpfs",
                self.directory,
                error.strerror,
            )
            return False
        finally:
            probe.destroy()
        return True

    # ---- sums; `_mutex` is held

    def _used_bytes(self) -> int:
        return sum(file.size_bytes for file in self._used)

    def _quarantined_bytes(self) -> int:
        return sum(file.size_bytes for file in self._quarantined)

    def _promised_bytes(self) -> int:
        return sum(allotment.promised_bytes for allotment in self._promised)

    def _available_bytes(self) -> int:
        return self.pool_bytes - self._used_bytes() - self._quarantined_bytes() - self._promised_bytes()

    def _spare_descriptors(self) -> int:
        """How many files more may be promised: the relay has one descriptor for each."""
        return self._unused_descriptors() - sum(len(allotment.missing()) for allotment in self._promised)

    def _unused_descriptors(self) -> int:
        """How many files may be open besides those in use and in quarantine."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit == resource.RLIM_INFINITY:
            return sys.maxsize
        return limit - DESCRIPTORS_KEPT - len(self._used) - len(self._quarantined)

    def _too_many_free(self) -> list[PoolFile]:
        """Free files, the smallest first, that have to go before one more file is opened; taken off the free ones."""
        excess = max(0, len(self._free) + 1 - self._unused_descriptors())
        going = sorted(self._free, key=lambda file: file.size_bytes)[:excess]
        self._free = [file for file in self._free if file not in going]
        return going

    def _sweep(self) -> None:
        for file in sorted(self._quarantined - self._condemned, key=lambda file: file.path):
            try:
                in_use = file.linked_elsewhere() or file.mapped_elsewhere()
            except OSError as error:  # such as a file of another user's: unknown counts as read, for good
                log.warning("%s cannot be checked for readers and is given up: %s", file.path, error)
                self._condemned.add(file)
                self._uncut = True
                continue
            if not in_use:
                self._quarantined.discard(file)
                self._free.append(file)
                self._uncut = True

    def _take_exact(self, allotment: Allotment) -> None:
        by_size: dict[int, list[int]] = {}
        for place, size in allotment.missing():
            by_size.setdefault(size, []).append(place)
        left = []
        for file in self._free:
            places = by_size.get(file.size_bytes)
            if places:
                self._hand_out(allotment, places.pop(0), file)
            else:
                left.append(file)
        self._free = left

    def _hand_out(self, allotment: Allotment, place: int, file: PoolFile) -> None:
        self._used.add(file)
        allotment.files[place] = file
        allotment.bytes_done = sum(one.size_bytes for one in allotment.files.values())

    # ---- making files; `_shaping` is held, `_mutex` is not

    def _make_one(self, allotment: Allotment, place: int, size: int) -> None:
        def grown(num_bytes: int) -> None:
            self._unless_closing(num_bytes)
            allotment.bytes_done += num_bytes

        self._unless_closing(0)
        file = None
        for expected in (False, True):  # what is ready for another model's next version comes last
            file = file or self._shrink_one(size, expected=expected) or self._allocate(size, grown, expected=expected)
        if file is None:
            raise OutOfCapacity(f"{show_bytes(size)} were promised, and the pool has them no more")
        with self._mutex:
            self._hand_out(allotment, place, file)

    def _unless_closing(self, _: int) -> None:
        if self._closing:
            raise Stopped("the relay ends")

    def _shrink_one(self, size: int, *, expected: bool) -> PoolFile | None:
        """The smallest free file that is not smaller, cut to `size`: warm memory costs nothing."""
        if size < SMALL_BYTES:
            return None
        with self._mutex:
            fitting = [file for file in self._spare(expected) if file.size_bytes >= size]
            if not fitting:
                return None
            file = min(fitting, key=lambda file: file.size_bytes)
            self._free.remove(file)
        self._resize(file, size)
        return file

    def _allocate(self, size: int, grown: Callable[[int], None], *, expected: bool) -> PoolFile | None:
        """A new file, for which other free memory makes room. None when those that may be spared are not enough."""
        while (missing := self._allocated_bytes + size - self.pool_bytes) > 0:
            with self._mutex:
                spare = list(self._spare(expected))
                if sum(file.size_bytes for file in spare) < missing:
                    return None
                victim = max(spare, key=lambda file: file.size_bytes)
                if victim.size_bytes - missing < SMALL_BYTES:
                    victim = min(spare, key=lambda file: file.size_bytes)
                self._free.remove(victim)
            if victim.size_bytes - missing >= SMALL_BYTES:
                self._resize(victim, victim.size_bytes - missing)
                with self._mutex:
                    self._free.append(victim)
            else:
                self._give_up([victim])
        with self._mutex:
            going = self._too_many_free()
        self._give_up(going)
        return self._create(size, grown)

    def _give_up(self, free: Sequence[PoolFile]) -> None:
        for file in free:
            self._resize(file, 0)  # its publisher may have kept a mapping, which would keep the memory
        self._destroy(free)

    def _spare(self, expected: bool) -> Iterator[PoolFile]:
        """Free files, without those that an expected version will take unless `expected`."""
        if expected:
            yield from self._free
            return
        kept = sum((Counter(sizes) for sizes in self._layouts.values()), Counter[int]())
        for file in self._free:
            if kept[file.size_bytes]:
                kept[file.size_bytes] -= 1
            else:
                yield file

    def _resize(self, file: PoolFile, size: int) -> None:
        freed = file.size_bytes - size
        if freed:
            file.shrink(size)
        with self._mutex:
            self._allocated_bytes -= freed

    def _destroy(self, files: Sequence[PoolFile]) -> None:
        for file in files:
            size = file.size_bytes
            file.destroy()
            with self._mutex:
                self._used.discard(file)
                self._quarantined.discard(file)
                self._condemned.discard(file)
                self._allocated_bytes -= size
                self._uncut = True

    def _create(self, size: int, grown: Callable[[int], None]) -> PoolFile:
        with self._mutex:
            path = self._next_path()
            self._allocated_bytes += size
        try:
            file = PoolFile(path, size)
            file.allocate(grown)
        except BaseException:
            with self._mutex:
                self._allocated_bytes -= size
            raise
        return file

    def _next_path(self) -> Path:
        self._serial += 1
        return self._free_directory / f"{self._serial:08d}"


def _found_again(paths: Sequence[Path]) -> list[PoolFile]:
    files: list[PoolFile] = []
    try:
        files.extend(PoolFile(path, path.stat().st_size, found=True) for path in paths)
    except OSError:
        for file in files:
            file.leave()
        raise
    return files


def _clear(directory: Path, keep: Collection[Path] = ()) -> None:
    """Reclaims what an earlier life left, except the lock and what is to be stored."""
    for root, names, files in os.walk(directory, topdown=False):
        for path in (Path(root) / name for name in files):
            if path.name != LOCK and path not in keep:
                path.unlink()
        for path in (Path(root) / name for name in names):
            if not any(path in stays.parents for stays in keep):
                path.rmdir()
