"""Mappings of files in shared memory, placed so that the kernel can map their huge pages whole.

Invariants:
- a mapping begins at a multiple of HUGE_BYTES: else a huge page of the file is mapped by 512 small entries;
- the interpreter's lock is free while the kernel makes or maps pages, which may take long;
- a mapping goes with its last view; one that is detached lets go of its file at once, whatever views live.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from pathlib import Path

HUGE_BYTES = 2 << 20  # on x86-64, and on arm64 with pages of 4 KiB; elsewhere nothing is gained by it, and nothing lost
COLLAPSE = 25  # MADV_COLLAPSE, Linux 6.1; named by no Python yet
POPULATE_WRITE = getattr(mmap, "MADV_POPULATE_WRITE", 23)  # Linux 5.14; named by Python from 3.14 on
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _madvise = _libc.mmap, _libc.madvise
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_mmap.restype = ctypes.c_void_p
_madvise.argtypes, _madvise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int


class FileMapping:
    """A file of `size_bytes` (not 0) mapped whole, shared and writable. The descriptor may be closed afterwards."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        # Python's mmap cannot choose an address: it reserves room for any, and the file is mapped over a part of that.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._room = mmap.mmap(-1, size_bytes + HUGE_BYTES, flags=flags)
        room = ctypes.addressof(ctypes.c_char.from_buffer(self._room))
        self._start, self._size_bytes = -room % HUGE_BYTES, size_bytes
        self._address = room + self._start
        self._put(mmap.MAP_SHARED, fd)

    def _put(self, flags: int, fd: int) -> None:
        """Maps the whole range, in place of what is there."""
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        if _mmap(self._address, self._size_bytes, writable, flags | _MAP_FIXED, fd, 0) == _MAP_FAILED:
            raise _last_error()

    def __len__(self) -> int:
        return self._size_bytes

    def view(self) -> memoryview:
        """The whole file, writable."""
        return memoryview(self._room)[self._start : self._start + self._size_bytes]

    def collapse(self, start: int, num_bytes: int) -> None:
        """Makes huge pages of a range of whole ones, in each of which a page is there; a hole is filled with zeros.

        OSError where the kernel will not, or has no memory in such pieces: then the pages stay as they were.
        """
        self._advise(COLLAPSE, start, num_bytes)

    def populate(self, start: int, num_bytes: int) -> None:
        """Maps the pages of a range for writing, in one call. OSError where the kernel lacks it."""
        begin = start - start % mmap.PAGESIZE
        self._advise(POPULATE_WRITE, begin, start + num_bytes - begin)

    def prefer_huge(self) -> None:
        """For what is allocated later, on a tmpfs mounted with huge=advise."""
        self._advise(mmap.MADV_HUGEPAGE, 0, self._size_bytes)

    def _advise(self, advice: int, start: int, num_bytes: int) -> None:
        if _madvise(self._address + start, num_bytes, advice):
            raise _last_error()

    def detach(self) -> None:
        """Lets go of the file. Views that live see zeros from now on, and what is written through them goes nowhere."""
        self._put(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)

    def close(self) -> None:
        """Unmaps, unless a view lives: then with that."""
        with contextlib.suppress(BufferError):
            self._room.close()


def _last_error() -> OSError:
    error = ctypes.get_errno()
    return OSError(error, os.strerror(error))


IN_MEMORY = ("tmpfs", "ramfs")
"""File systems whose files are made of the host's ordinary memory."""


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that Linux can give to new files in memory, swap included; a tmpfs promises more than that. In a container
    with a limit (cgroup v2) at most what it leaves."""
    host = _numbers(root / "proc/meminfo")
    limits = [(host["MemAvailable"] + host["SwapFree"]) << 10]
    group = root / "sys/fs/cgroup"  # a container sees its own here; a host's has no limit
    with contextlib.suppress(FileNotFoundError, ValueError):  # ValueError: the limit is "max"
        limit = int((group / "memory.max").read_text())
        used, kinds = int((group / "memory.current").read_text()), _numbers(group / "memory.stat")
        limits.append(max(0, limit - used + kinds["active_file"] + kinds["inactive_file"]))
    return min(limits)


def _numbers(path: Path) -> dict[str, int]:
    words = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {name: int(number) for name, number, *_ in words}


def mount_of(directory: Path) -> tuple[str, str]:
    """Kind and options of the file system: that of the deepest mount point above, the last mounted there."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    above = [
        (len(point), number, kind, options)
        for number, (_, point, kind, options, *_) in enumerate(mounts)
        if directory.is_relative_to(point)
    ]
    _, _, kind, options = max(above)
    return kind, options
