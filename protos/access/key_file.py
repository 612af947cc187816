"""The file of API keys: made, read for a client, and followed by a daemon while it runs.

Invariants:
- a file that others than its owner and group may read, or others than its owner may write, is not used;
- a file that cannot be used leaves the keys of the last one that could, and `failure` says why until it is mended;
- keys are in memory as digests, and never in a message.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from protos.access.roles import ROLES, ApiKey, Keys, Role, new_line, newest_key, parse_keys
from protos.access.secret_file import Signature, read_secret, signature
from protos.errors import Conflict, InvalidRequest

log = logging.getLogger(__name__)

BYTES_MAX = 8 << 20
REFRESH_S = 1.0
"""Between two looks at the file."""


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
            if self._seen is not None and signature(os.stat(self.path)) == self._seen:
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
        text, seen = _read(self.path)
        return parse_keys(text, str(self.path)), seen


def make_key_file(path: Path) -> None:
    """A new file with a key for each role, named after it, for this user alone. Raises Conflict where there is one, and
    InvalidRequest where none can be."""
    text = "".join(f"{new_line(role, role)}\n" for role in ROLES)
    try:
        descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # of the mode 0600
        try:
            with open(descriptor, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.link(scratch, path)  # whole or not there, and nothing is overwritten
        finally:
            os.unlink(scratch)
    except FileExistsError as error:
        raise Conflict(f"{path} exists", hint=f"`gateway keys new ROLE NAME >> {path}` adds a key to it") from error
    except OSError as error:
        raise InvalidRequest(
            f"cannot write {path}: {error.strerror}", hint="name a file in a directory of yours"
        ) from error


def key_in(path: Path, role: Role, name: str | None = None) -> str:
    """A key of the file, for the client that it belongs to. Raises InvalidRequest, as `newest_key` does."""
    return newest_key(_read(path)[0], str(path), role, name)


def _read(path: Path) -> tuple[str, Signature | None]:
    what = "a file of API keys"
    raw, seen = read_secret(path, BYTES_MAX, what=what, hint=f"`gateway keys init {path}` makes {what}")
    try:
        return raw.decode(), seen
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is no text", hint=f"is it {what}?") from error
