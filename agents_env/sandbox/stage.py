"""What the keeper does to itself before it starts a sandbox: a `/tmp` of bounded size, another user, and limits.

In this order, because each takes away what the one before it needs. Raises SandboxRefused with the bound that cannot
be had.
"""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path

from agents_env.sandbox.limits import Limits, SandboxRefused

UID_BASE = 2_000_000_000
"""A run started by root runs as the user UID_BASE + the keeper's process id: it owns no file and no process, and the
kernel counts this run's processes alone. Process ids are below 2**22, user ids here below 2**31 (bwrap)."""

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 2, 4, 16384, 1 << 18
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36

_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent has ended."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def enter(limits: Limits) -> None:
    """Takes the stage; the process must have one thread."""
    if limits.disk_bytes:
        _mount_tmp(limits)
    if os.geteuid() == 0:
        _become_nobody()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits.disk_bytes, limits.disk_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits.open_files_max, limits.open_files_max))
    # A second line behind the keeper's deadline: of each process, and the keeper itself needs a fraction of a second.
    cpu_s = int(limits.time_s) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))


def _mount_tmp(limits: Limits) -> None:
    """Covers `/tmp` by a tmpfs in a mount namespace, which goes with its last process."""
    options = f"size={limits.disk_bytes},nr_inodes={limits.files_max},mode=1777"
    try:
        if os.geteuid() == 0:
            _check(_libc.unshare(_CLONE_NEWNS))
        else:
            _enter_user_namespace()
        _mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        _mount(b"tmpfs", b"/tmp", b"tmpfs", _MS_NOSUID | _MS_NODEV, options.encode())
    except OSError as error:
        raise SandboxRefused(
            "disk",
            f"no tmpfs of bounded size can be mounted here ({error}); that takes root with CAP_SYS_ADMIN, or user "
            "namespaces. A run without any writable folder does not need it: set disk_bytes to 0",
        ) from error


def _enter_user_namespace() -> None:
    uid, gid = os.geteuid(), os.getegid()
    _check(_libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def _become_nobody() -> None:
    number = UID_BASE + os.getpid()
    # sandlock makes System V memory and semaphores for each user and leaves them: they end with this namespace. Where
    # CAP_SYS_ADMIN lacks (a run without a writable folder does not need it), they stay.
    _libc.unshare(_CLONE_NEWIPC)
    try:
        os.setgroups([])
        os.setresgid(number, number, number)
        os.setresuid(number, number, number)
    except OSError as error:
        raise SandboxRefused(
            "processes",
            f"root's processes cannot be counted, and root cannot become another user here ({error}); run as a user "
            "other than root, or with CAP_SETUID and CAP_SETGID",
        ) from error
    # The change has made this process's files in /proc root's; the sandboxes write their user map there.
    _check(_libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0))


def _mount(source: bytes, target: bytes, kind: bytes | None, flags: int, options: bytes | None) -> None:
    _check(_libc.mount(source, target, kind, ctypes.c_ulong(flags), options))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
