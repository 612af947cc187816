"""The file of API keys that a daemon follows while it runs.

Invariants:
- a file that others than its owner and group may read, or others than its owner may write, is not used;
- a file that cannot be used leaves the keys of the last one that could, and `failure` says why until it is mended;
- keys are in memory as digests, and never in a message.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from pathlib import Path

from protos.access.roles import ApiKey, Keys, Role, parse_keys
from protos.errors import InvalidRequest

log = logging.getLogger(__name__)

BYTES_MAX = 8 << 20
REFRESH_S = 1.0
"""Between two looks at the file."""
SETTLED_S = 2.0
"""A file that changed less than this ago may change again within the resolution of its times: it is read again."""
FORBIDDEN = stat.S_IRWXO | stat.S_IWGRP

Signature = tuple[int, int, int, int, int, int]


class KeyFile:
    """The keys of the file at `path`. `failure`: why the file as it is now is not used; empty while it is."""

    def __init__(self, path: Path) -> None:
        """Raises InvalidRequest for a file that cannot be used."""
        self.path = path
        self.failure = ""
        self._seen: Signature | None = None  # of the file that was read last, once it settled
        self._keys, self._seen = self._read()

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key: str) -> ApiKey | None:
        return self._keys.find(key)

    def by_role(self) -> dict[Role, int]:
        return dict(self._keys.by_role())

    def refresh(self) -> None:
        """Reads the file again if it has changed. For a thread: it waits for the disk."""
        try:
            if self._seen is not None and _signature(os.stat(self.path)) == self._seen:
                return
            before = self._keys
            self._keys, self._seen = self._read()
        except (InvalidRequest, OSError) as error:
            failure = str(error) if isinstance(error, InvalidRequest) else f"cannot read {self.path}: {error.strerror}"
            if failure != self.failure:
                log.error("the API keys stay as they were: %s", failure)
            self.failure, self._seen = failure, None
            return
        if self.failure or before != self._keys:
            log.info("%s has %d keys", self.path, len(self._keys))
        self.failure = ""

    def _read(self) -> tuple[Keys, Signature | None]:
        try:
            # O_NONBLOCK: a pipe without a writer must not hold the daemon; what is no file is refused below.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                status = os.fstat(descriptor)
                _check(self.path, status)
                raw = file.read(BYTES_MAX + 1)
        except OSError as error:
            raise InvalidRequest(
                f"cannot read {self.path}: {error.strerror}", hint="--api-keys takes a file of API keys"
            ) from error
        if len(raw) > BYTES_MAX:
            raise InvalidRequest(f"{self.path} is larger than {BYTES_MAX >> 20} MiB", hint="is it a file of API keys?")
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"{self.path} is no text", hint="is it a file of API keys?") from error
        settled = abs(time.time() - max(status.st_mtime, status.st_ctime)) > SETTLED_S
        return parse_keys(text, str(self.path)), _signature(status) if settled else None


def _signature(status: os.stat_result) -> Signature:
    return (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,  # a change of the mode alone
        stat.S_IMODE(status.st_mode),
    )


def _check(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise InvalidRequest(f"{path} is no file", hint="--api-keys takes a file of API keys")
    if status.st_mode & FORBIDDEN:
        raise InvalidRequest(
            f"{path} has the mode {stat.S_IMODE(status.st_mode):04o}: others may read or write the keys in it",
            hint=f"chmod 600 {path}",
        )
