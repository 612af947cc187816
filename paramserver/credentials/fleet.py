"""The directory of a fleet's credentials, on its operator's machine.

    DIR/ca.pem, ca.key     the CA; ca.key is used here alone
    DIR/fleet.key          what the data ports' peers prove to know
    DIR/NAME/              what the holder NAME gets: ca.pem, cert.pem, key.pem, and fleet.key if its role moves bytes

Invariants:
- nothing that exists is overwritten but by `renew` and `rotate`, and then a file at a time, whole;
- keys have the mode 0600, directories 0700, from their first moment on;
- a rotation has three steps, and after each of them every holder that has the files of the step before, or of this one,
  is understood by every other. One that was interrupted is gone through again from its beginning.
"""

from __future__ import annotations

import datetime
import os
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cryptography import x509

from paramserver.credentials.authority import LOOPBACK, Authority
from protos.access import certificates
from protos.access.credentials import (
    CA_FILE,
    CERTIFICATE_FILE,
    FILE_BYTES_MAX,
    FLEET_KEY_BYTES,
    FLEET_KEY_FILE,
    HINT,
    KEY_FILE,
    parse_fleet_keys,
)
from protos.access.fleet import BYTES_ROLES, FLEET_ROLES, Identity, identity_for
from protos.access.secret_file import read_public, read_secret
from protos.errors import Conflict, InvalidRequest

CA_KEY_FILE, NEXT_CA_KEY_FILE = "ca.key", "ca-next.key"
RESERVED = frozenset({CA_FILE, CA_KEY_FILE, NEXT_CA_KEY_FILE, FLEET_KEY_FILE})

Step = Literal["add", "use", "drop"]


@dataclass(frozen=True, slots=True)
class Holder:
    """A certificate of the fleet, as `show` reports it. `ca`: the fingerprint of the CA that issued it."""

    identity: Identity
    directory: Path
    hosts: tuple[str, ...]
    expires_unix_s: float
    ca: str


class Fleet:
    """The credentials in `directory`, which `Fleet.init` made."""

    def __init__(self, directory: Path) -> None:
        """InvalidRequest where there are none."""
        self.directory = directory
        self._ca = read_public(directory / CA_FILE, FILE_BYTES_MAX, what="a CA", hint=_MADE)[0]
        self._fleet_key = _secret(directory / FLEET_KEY_FILE)
        parse_fleet_keys(self._fleet_key, str(directory / FLEET_KEY_FILE))

    @classmethod
    def init(cls, directory: Path, hosts: Sequence[str], days: int) -> Fleet:
        """A CA, a fleet key, and a certificate for each role, named after it. Conflict where the directory has any."""
        if directory.exists() and any(directory.iterdir()):
            raise Conflict(f"{directory} is not empty", hint="name a new directory: nothing is overwritten")
        authority = Authority.new(_now())
        authority.issue(Identity("relay", "relay"), hosts, days, _now())  # what is no host is refused before any file
        _make_directory(directory)
        _write(directory / CA_KEY_FILE, authority.key_pem)
        _write(directory / FLEET_KEY_FILE, _lines([_new_fleet_key()]))
        _write(directory / CA_FILE, authority.pem)
        fleet = cls(directory)
        for role in FLEET_ROLES:
            fleet.issue(role, role, hosts if role == "relay" else (), days)
        return fleet

    def issue(self, role: str, name: str, hosts: Sequence[str], days: int) -> Holder:
        """A certificate for a further holder, in a directory of its name. Conflict where that exists."""
        identity = identity_for(role, name)
        if hosts and identity.role != "relay":
            raise InvalidRequest(f"--host is for relays: a {role} does not serve")
        if name in RESERVED or (self.directory / name).exists():
            raise Conflict(
                f"{self.directory / name} exists", hint=f"another name, or `paramserver credentials renew DIR {name}`"
            )
        authority = self._authority(CA_KEY_FILE)
        hosts = list(dict.fromkeys([*LOOPBACK, *hosts])) if identity.role == "relay" else []
        issued = authority.issue(identity, hosts, days, _now())
        with tempfile.TemporaryDirectory(dir=self.directory, prefix=".new-") as scratch:
            made = Path(scratch) / name
            _make_directory(made)
            _write(made / KEY_FILE, issued.key)
            _write(made / CERTIFICATE_FILE, issued.certificate)
            in_use_first = 1 if (self.directory / NEXT_CA_KEY_FILE).exists() else -1
            self._share(made, identity, self._fleet_keys()[::in_use_first])
            made.rename(self.directory / name)  # complete, or not there
        return self._holder(self.directory / name)

    def renew(self, names: Sequence[str], days: int) -> list[Holder]:
        """New keys and certificates for holders that there are, with the same role, name and hosts; all of them where
        none is named."""
        known = {holder.identity.name: holder for holder in self.holders()}
        for name in names:
            if name not in known:
                raise InvalidRequest(f"{self.directory} has no holder {name[:80]!r}", hint=f"known: {', '.join(known)}")
        authority = self._authority(CA_KEY_FILE)
        return [self._renew(known[name], authority, days) for name in names or sorted(known)]

    def rotate(self, days: int) -> Step:
        """The next step in replacing the CA and the fleet key: both are *added* beside the present ones, then *used*,
        then the former ones are *dropped*. Returns the step that was made."""
        cas = certificates.read_cas(self._ca, str(self.directory / CA_FILE))
        following = self._next_authority()
        if following is None and len(cas) == 1:
            self._add(Authority.new(_now()))
            return "add"
        if following is None:
            self._drop()
            return "drop"
        is_used = self._ca.startswith(following.pem)  # that was interrupted, and so is gone through again
        if not is_used and not all(map(self._has_what_is_shared, self.holders())):
            self._add(following)
            return "add"
        self._use(following, days)
        return "use"

    def holders(self) -> Iterator[Holder]:
        for path in sorted(self.directory.iterdir()):
            if (path / CERTIFICATE_FILE).exists():
                yield self._holder(path)

    def cas(self) -> list[x509.Certificate]:
        return certificates.read_cas(self._ca, str(self.directory / CA_FILE))

    @property
    def num_fleet_keys(self) -> int:
        return len(self._fleet_keys())

    # ---- steps of a rotation

    def _add(self, following: Authority) -> None:
        """Both CAs are trusted, and both keys accepted; the former ones are used. The new CA's key goes first: without
        it nobody could use what the others trust then."""
        _write(self.directory / NEXT_CA_KEY_FILE, following.key_pem)
        keys = self._fleet_keys()
        if len(keys) == 1:
            keys.append(_new_fleet_key())
        self._replace_root([self._authority(CA_KEY_FILE).pem, following.pem], keys)
        self._share_with_all(keys)

    def _use(self, following: Authority, days: int) -> None:
        """Certificates are the new CA's, and the new key proves; the former ones are still accepted."""
        keys = self._fleet_keys()
        self._replace_root([following.pem, self._authority(CA_KEY_FILE).pem], keys)
        self._share_with_all(keys[::-1])
        for holder in self.holders():
            self._renew(holder, following, days)
        (self.directory / NEXT_CA_KEY_FILE).rename(self.directory / CA_KEY_FILE)

    def _drop(self) -> None:
        """The files by which the next step is known change when everything else has."""
        self._ca, keys = self._authority(CA_KEY_FILE).pem, self._fleet_keys()[-1:]
        self._share_with_all(keys)
        self._replace_root([self._ca], keys)

    def _share_with_all(self, keys: list[str]) -> None:
        for holder in self.holders():
            self._share(holder.directory, holder.identity, keys)

    def _replace_root(self, cas: list[bytes], keys: list[str]) -> None:
        """Keys of the fleet stand here in the order in which they were made."""
        self._ca, self._fleet_key = b"".join(cas), _lines(keys)
        _write(self.directory / FLEET_KEY_FILE, self._fleet_key)
        _write(self.directory / CA_FILE, self._ca)

    # ---- parts

    def _fleet_keys(self) -> list[str]:
        return [key.hex() for key in parse_fleet_keys(self._fleet_key, str(self.directory / FLEET_KEY_FILE))]

    def _share(self, directory: Path, identity: Identity, keys: list[str]) -> None:
        """What a holder has besides its own certificate. The first of `keys` proves."""
        _write(directory / CA_FILE, self._ca)
        if identity.role in BYTES_ROLES:
            _write(directory / FLEET_KEY_FILE, _lines(keys))

    def _renew(self, holder: Holder, authority: Authority, days: int) -> Holder:
        issued = authority.issue(holder.identity, holder.hosts, days, _now())
        _write(holder.directory / KEY_FILE, issued.key)
        _write(holder.directory / CERTIFICATE_FILE, issued.certificate)
        return self._holder(holder.directory)

    def _authority(self, key_file: str) -> Authority:
        path = self.directory / key_file
        found = Authority.read(self._ca, _secret(path), str(path))
        if found is None:
            raise InvalidRequest(f"{path} is the key of no CA in {self.directory / CA_FILE}", hint=_MADE)
        return found

    def _next_authority(self) -> Authority | None:
        """The CA that a rotation has added. None where there is none, or nobody trusts it: it was interrupted."""
        path = self.directory / NEXT_CA_KEY_FILE
        return Authority.read(self._ca, _secret(path), str(path)) if path.exists() else None

    def _has_what_is_shared(self, holder: Holder) -> bool:
        """Whether a holder has the CAs and fleet keys that stand here."""
        files = {CA_FILE: self._ca}
        if holder.identity.role in BYTES_ROLES:
            files[FLEET_KEY_FILE] = self._fleet_key
        return all((holder.directory / name).read_bytes() == content for name, content in files.items())

    def _holder(self, directory: Path) -> Holder:
        path = directory / CERTIFICATE_FILE
        pem = read_public(path, FILE_BYTES_MAX, what="a certificate", hint=HINT)[0]
        found = certificates.read_certificates(pem, str(path))[0]
        issuers = [ca for ca in self.cas() if ca.subject == found.issuer]
        return Holder(
            certificates.identity_in(found),
            directory,
            certificates.hosts_in(found),
            certificates.expires_unix_s(found),
            certificates.fingerprint(issuers[0]) if issuers else "unknown",
        )


_MADE = "`paramserver credentials init DIR` makes such a directory"


def _secret(path: Path) -> bytes:
    return read_secret(path, FILE_BYTES_MAX, what="a file of credentials", hint=_MADE)[0]


def _new_fleet_key() -> str:
    return secrets.token_hex(FLEET_KEY_BYTES)


def _lines(keys: Sequence[str]) -> bytes:
    return "".join(f"{key}\n" for key in keys).encode()


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _make_directory(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)


def _write(path: Path, content: bytes) -> None:
    """The whole file or what was there before. No one else may read it at any time."""
    fd, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # of the mode 0600
    try:
        with open(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise
