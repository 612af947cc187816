"""System calls that a run is denied besides what the sandboxes deny themselves, and the filter that does it.

The reasons: memory that no limit counts (memfd, System V and POSIX queues), kernel attack surface that no test of a
function needs, namespaces in which the run could mount a tmpfs of its own, and with sandlock, which does not change
the user or hide other processes, what acts on files and processes of the same user without opening them.
"""

from __future__ import annotations

import platform
import struct

NUMBERS: dict[str, tuple[int, int]] = {
    "add_key": (248, 217),
    "bpf": (321, 280),
    "fsopen": (430, 430),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "perf_event_open": (298, 241),
    "pivot_root": (155, 41),
    "ptrace": (101, 117),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setns": (308, 268),
    "shmget": (29, 194),
    "socket": (41, 198),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
"""Denied with bubblewrap: the number on x86_64 and on aarch64 (include/uapi/asm-generic/unistd.h of Linux)."""

SANDLOCK = (
    *("memfd_create", "memfd_secret", "shmget", "msgget", "semget", "mq_open"),
    *("io_uring_setup", "userfaultfd", "bpf", "perf_event_open", "add_key", "request_key", "keyctl"),
    *("mount", "umount2", "unshare", "setns", "pivot_root", "ptrace", "process_vm_readv", "process_vm_writev"),
    # Landlock does not restrict these on files of the same user.
    *("fchmod", "fchmodat", "fchmodat2", "fchown", "fchownat", "utimensat"),
    *("setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr"),
    # Nor these on processes of the same user.
    *("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"),
    *("setpriority", "ioprio_set"),
)
_SANDLOCK_X86_64 = ("chmod", "chown", "lchown", "utime", "utimes", "futimesat")
"""Older forms of the same, which other machines do not have."""

_MACHINES = {"x86_64": (0, 0xC000003E, 56), "aarch64": (1, 0xC00000B7, 220)}
"""The column in NUMBERS, AUDIT_ARCH_*, and the number of `clone`."""
_CLONE3 = 435
_X32 = 0x40000000
_CLONE_NEW_ANY = 0x7E020000
"""CLONE_NEWNS, CLONE_NEWUSER and the other flags that make a namespace."""
_LOAD, _EQUAL, _GREATER_EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _EPERM, _ENOSYS, _ALLOW = 0x80000000, 0x00050001, 0x00050026, 0x7FFF0000


def denied_by_sandlock() -> list[str]:
    return [*SANDLOCK, *(_SANDLOCK_X86_64 if platform.machine() == "x86_64" else ())]


def has_filter() -> bool:
    """Whether `compile_filter` knows this machine's numbers."""
    return platform.machine() in _MACHINES


def compile_filter() -> bytes:
    """The program for `bwrap --seccomp`, in classic BPF (seccomp(2), struct seccomp_data)."""
    column, architecture, clone = _MACHINES[platform.machine()]
    program = [
        _step(_LOAD, 4),  # the architecture
        _step(_EQUAL, architecture, 1, 0),
        _step(_RETURN, _KILL),  # the numbers of another one mean other calls
        _step(_LOAD, 0),  # the call's number
        _step(_GREATER_EQUAL, _X32, 0, 1),
        _step(_RETURN, _EPERM),
        _step(_EQUAL, _CLONE3, 0, 1),
        _step(_RETURN, _ENOSYS),  # its flags lie in memory, which a filter cannot read; libc falls back to clone
    ]
    for numbers in NUMBERS.values():
        program += [_step(_EQUAL, numbers[column], 0, 1), _step(_RETURN, _EPERM)]
    program += [
        _step(_EQUAL, clone, 0, 3),
        _step(_LOAD, 16),  # its flags: the low half of the first argument
        _step(_ANY_BIT, _CLONE_NEW_ANY, 0, 1),
        _step(_RETURN, _EPERM),
        _step(_RETURN, _ALLOW),
    ]
    return b"".join(program)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
