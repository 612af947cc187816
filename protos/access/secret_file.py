"""Reading files that hold secrets, and noticing that they have changed.

Invariant: a file that others than its owner and group may read, or others than its owner may write, is not used.
"""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

from protos.errors import InvalidRequest

SETTLED_S = 2.0
"""A file that changed less than this ago may change again within the resolution of its times: it is read again."""
FORBIDDEN = stat.S_IRWXO | stat.S_IWGRP

Signature = tuple[int, int, int, int, int, int]


def read_secret(path: Path, bytes_max: int, *, what: str, hint: str) -> tuple[bytes, Signature | None]:
    """The bytes of a file, and its signature, which is None until the file has settled. InvalidRequest, with `hint`,
    where it cannot be used; `what` it should be."""
    return _read(path, bytes_max, FORBIDDEN, what, hint)


def read_public(path: Path, bytes_max: int, *, what: str, hint: str) -> tuple[bytes, Signature | None]:
    """The same of a file that everybody may read: certificates."""
    return _read(path, bytes_max, stat.S_IWGRP | stat.S_IWOTH, what, hint)


def signature(status: os.stat_result) -> Signature:
    return (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,  # a change of the mode alone
        stat.S_IMODE(status.st_mode),
    )


def _read(path: Path, bytes_max: int, forbidden: int, what: str, hint: str) -> tuple[bytes, Signature | None]:
    try:
        # O_NONBLOCK: a pipe without a writer must not hold the daemon; what is no file is refused below.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            _check(path, status, forbidden, hint)
            with open(descriptor, "rb", closefd=False) as file:  # of a directory it raises, and closes nothing
                raw = file.read(bytes_max + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}", hint=hint) from error
    if len(raw) > bytes_max:
        raise InvalidRequest(f"{path} is larger than {_size(bytes_max)}", hint=f"is it {what}?")
    settled = abs(time.time() - max(status.st_mtime, status.st_ctime)) > SETTLED_S
    return raw, signature(status) if settled else None


def _size(num: int) -> str:
    return f"{num >> 20} MiB" if num >= 1 << 20 else f"{num >> 10} KiB"


def _check(path: Path, status: os.stat_result, forbidden: int, hint: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise InvalidRequest(f"{path} is no file", hint=hint)
    if status.st_mode & forbidden:
        may = "read or write the keys in it" if forbidden == FORBIDDEN else "write it"
        raise InvalidRequest(
            f"{path} has the mode {stat.S_IMODE(status.st_mode):04o}: others may {may}",
            hint=f"chmod {'600' if forbidden == FORBIDDEN else '644'} {path}",
        )
