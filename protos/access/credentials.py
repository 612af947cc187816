"""A fleet's credentials as one process has them: a directory with a certificate, its key, the CAs that are trusted and
the fleet key, followed while the process runs.

Invariants:
- private and fleet keys that others than their owner and group may read are not used;
- a directory that cannot be used as it is, because half of it was copied or a certificate has expired, leaves what the
  last good one had, and `failure` says why until it is mended;
- no key is in a message, a log line or a `repr`.

`paramserver credentials` makes such directories.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from protos.access.fleet import BYTES_ROLES, Identity
from protos.access.secret_file import Signature, read_public, read_secret, signature
from protos.errors import InvalidRequest

log = logging.getLogger(__name__)

CREDENTIALS_VARIABLE = "LAMINAR_CREDENTIALS"
CA_FILE, CERTIFICATE_FILE, KEY_FILE, FLEET_KEY_FILE = "ca.pem", "cert.pem", "key.pem", "fleet.key"
FILES = (CA_FILE, CERTIFICATE_FILE, KEY_FILE, FLEET_KEY_FILE)
FILE_BYTES_MAX = 64 << 10
REFRESH_S = 1.0
"""Between two looks at the files."""
FLEET_KEY_BYTES = 32
FLEET_KEYS_MAX = 2
"""Valid at a time: the present one, and the one before or after it."""
HINT = "--credentials takes a directory that `paramserver credentials init` or `issue` made"
_FLEET_KEY = re.compile(rf"[0-9a-f]{{{2 * FLEET_KEY_BYTES}}}")


@dataclass(frozen=True, slots=True)
class Material:
    """What the files of a directory say. `hosts`: those that the certificate proves to be its holder's. `cas`: the
    fingerprints of the CAs that are trusted. `fleet_keys`: the first proves, all are accepted; none for roles that use
    no data port."""

    identity: Identity
    hosts: tuple[str, ...]
    expires_unix_s: float
    cas: tuple[str, ...]
    ca: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)
    fleet_keys: tuple[bytes, ...] = field(repr=False)


class Credentials:
    """The credentials in `directory`. Any thread may use it; `material` is another object after each change."""

    def __init__(self, directory: Path) -> None:
        """Raises InvalidRequest for a directory that cannot be used."""
        self.directory = directory
        self.failure = ""
        self._mutex = threading.Lock()
        self._looked_at = time.monotonic()
        self._material, self._seen = read(directory)

    def __repr__(self) -> str:
        return f"Credentials({str(self.directory)!r})"

    @property
    def material(self) -> Material:
        """As it is now: the files are looked at once in `REFRESH_S`, and read when they have changed."""
        if time.monotonic() - self._looked_at > REFRESH_S and self._mutex.acquire(blocking=False):
            try:
                self._refresh()
            finally:
                self._mutex.release()
        return self._material

    @property
    def identity(self) -> Identity:
        return self._material.identity

    def refresh(self) -> None:
        """Reads the files if they have changed, whenever that was looked at last."""
        with self._mutex:
            self._refresh()

    def _refresh(self) -> None:
        self._looked_at = time.monotonic()
        try:
            if self._seen is not None and _signatures(self.directory) == self._seen:
                return
            found, seen = read(self.directory)
            self._refuse_other_role(found)
        except InvalidRequest as error:
            if str(error) != self.failure:
                log.error("the credentials stay as they were: %s", error)
            self.failure, self._seen = str(error), None
            return
        self._seen, self.failure = seen, ""
        if found != self._material:
            log.info("%s has other credentials now, those of %s", self.directory, found.identity)
            self._material = found

    def _refuse_other_role(self, found: Material) -> None:
        """What a process may do is decided at its start, and does not change with a file."""
        if found.identity.role != self._material.identity.role:
            raise InvalidRequest(
                f"{self.directory} has the certificate of {found.identity} in place of {self._material.identity}'s",
                hint="start again with the other one",
            )


def from_environment() -> Credentials | None:
    """Those of the directory that LAMINAR_CREDENTIALS names; None where it names none."""
    named = os.environ.get(CREDENTIALS_VARIABLE, "")
    return Credentials(Path(named)) if named else None


def credentials_in(directory: Path | str | None) -> Credentials | None:
    """Those of `directory`; of the environment where it is None."""
    return from_environment() if directory is None else Credentials(Path(directory))


def read(directory: Path) -> tuple[Material, dict[str, Signature] | None]:
    """What the directory says, and the signatures of its files, None until all have settled. InvalidRequest."""
    from protos.access import certificates  # it imports `cryptography`: for those who have credentials

    found: dict[str, bytes] = {}
    seen: dict[str, Signature] = {}
    for name in FILES:
        path = directory / name
        if name == FLEET_KEY_FILE and not path.exists():
            continue
        look = read_secret if name in (KEY_FILE, FLEET_KEY_FILE) else read_public
        found[name], settled = look(path, FILE_BYTES_MAX, what="a file of credentials", hint=HINT)
        if settled is not None:
            seen[name] = settled
    where = {name: str(directory / name) for name in FILES}
    cas = certificates.read_cas(found[CA_FILE], where[CA_FILE])
    certificate = certificates.read_certificates(found[CERTIFICATE_FILE], where[CERTIFICATE_FILE])[0]
    certificates.check_pair(certificate, found[KEY_FILE], where[KEY_FILE])
    certificates.check_issued(certificate, cas, where[CERTIFICATE_FILE])
    certificates.check_time(certificate, time.time(), where[CERTIFICATE_FILE])
    identity = certificates.identity_in(certificate)
    material = Material(
        identity,
        certificates.hosts_in(certificate),
        certificates.expires_unix_s(certificate),
        tuple(map(certificates.fingerprint, cas)),
        found[CA_FILE],
        found[CERTIFICATE_FILE],
        found[KEY_FILE],
        parse_fleet_keys(found.get(FLEET_KEY_FILE, b""), where[FLEET_KEY_FILE]),
    )
    if identity.role in BYTES_ROLES and not material.fleet_keys:
        raise InvalidRequest(f"{where[FLEET_KEY_FILE]} is not there, and a {identity.role} needs it", hint=HINT)
    return material, seen if len(seen) == len(found) else None


def parse_fleet_keys(raw: bytes, source: str) -> tuple[bytes, ...]:
    """The keys of a file, one in hexadecimal on each line. InvalidRequest names a line, and no part of it."""
    keys: list[bytes] = []
    for number, line in enumerate(raw.decode("ascii", "replace").split("\n"), 1):
        if not (word := line.strip()):
            continue
        if not _FLEET_KEY.fullmatch(word):
            raise InvalidRequest(
                f"{source}, line {number} is no fleet key", hint=f"{2 * FLEET_KEY_BYTES} hexadecimal digits"
            )
        keys.append(bytes.fromhex(word))
    if len(keys) > FLEET_KEYS_MAX:
        raise InvalidRequest(f"{source} has {len(keys)} keys", hint=f"{FLEET_KEYS_MAX} at most are valid at a time")
    return tuple(keys)


def _signatures(directory: Path) -> dict[str, Signature]:
    found = {}
    for name in FILES:
        with contextlib.suppress(OSError):  # a file that went away is a change, which reading reports
            found[name] = signature(os.stat(directory / name))
    return found
