"""Pools that no relay holds: what a relay that is gone left in memory, beside it the data of an etcd of its own.

Invariants:
- who holds a directory has the lock in it; nothing is removed without both locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from paramserver.config import OWN_ETCD, own_etcd_dir, show_bytes
from paramserver.memory.stored import LOCK, POOLS, lock_directory, refuse_foreign
from protos.errors import Conflict, Unavailable

ETCDS = {LOCK, "port", "port.partial", "etcd"}
"""All that an etcd of a relay's own puts into its directory."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """A pool's directory that no relay holds, and the bytes in it and in its etcd's."""

    directory: Path
    size_bytes: int


def orphans(parent: Path) -> list[Orphan]:
    """Those directly below `parent` that have some memory."""
    found = []
    names = {lock.parent.name for lock in parent.glob(f"*/{LOCK}")} if parent.is_dir() else set()
    for name in sorted({name.removesuffix(OWN_ETCD) for name in names}):
        directory = parent / name
        both = [path for path in (directory, own_etcd_dir(directory)) if (path / LOCK).exists()]
        if not any(_held(path / LOCK) for path in both) and (size := sum(map(size_of, both))):
            found.append(Orphan(directory, size))
    return found


def clear_hint(parent: Path) -> str:
    """How the memory of orphans below `parent` comes back; empty when there are none."""
    found = orphans(parent)
    commands = "; ".join(f"`paramserver clear --pool-dir {one.directory}`" for one in found)
    size = show_bytes(sum(one.size_bytes for one in found))
    return f"{size} are in pools that no relay holds, and come back with {commands}" if found else ""


def clear(directory: Path) -> int:
    """Gives back what a relay that is gone left; returns the bytes. Conflict while it runs, and where a directory holds
    anything that is no relay's."""
    both = {directory: POOLS, own_etcd_dir(directory): ETCDS}
    there = {path: names for path, names in both.items() if (path / LOCK).exists()}
    for path, names in there.items():
        refuse_foreign(path, names, "give the --pool-dir of a relay")
    with contextlib.ExitStack() as locks:
        for path in there:
            try:
                locks.callback(os.close, lock_directory(path, "--pool-dir"))
            except Conflict as error:
                raise Conflict(f"{path} is in use: its relay runs", hint="stop that one first") from error
        freed = sum(map(size_of, there))
        for path in there:
            _remove(path)
    return freed


def _remove(directory: Path) -> None:
    """The lock last; the directory itself may be a mount point, or stand in one that is somebody else's."""
    try:
        for path in sorted(directory.iterdir(), key=lambda path: path.name == LOCK):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    except OSError as error:
        raise Unavailable(f"cannot clear {directory}: {error}", hint="run it as the relay's user") from error
    with contextlib.suppress(OSError):
        directory.rmdir()


def size_of(directory: Path) -> int:
    """The memory, or the room on a disk, that a directory's files take."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def _held(lock: Path) -> bool:
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # gone meanwhile, or somebody else's: nothing to be cleared from here
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
