"""The roles of a fleet's certificates, and the identity that a certificate carries. Pure.

Invariants:
- a certificate names one role and one name, in one URI among its subject's alternative names:
  `laminar://ROLE/NAME`. One without it, or with two, is nobody's;
- the role says what its holder may do (`paramserver.core.access`), the name who it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from protos.errors import InvalidRequest

FleetRole = Literal["relay", "trainer", "engine-host", "gateway", "admin", "reader"]
FLEET_ROLES: tuple[FleetRole, ...] = get_args(FleetRole)
FLEET_PURPOSE: Mapping[FleetRole, str] = {
    "relay": "`paramserver serve`: the only role whose certificates serve, and that passes weights on",
    "trainer": "`Publisher`: publishes versions, and reads them",
    "engine-host": "what runs beside an engine: pins versions, reads them, and reports loads",
    "gateway": "`gateway serve`: watches versions, pins them for engines, reports loads, and calls engines",
    "admin": "the operator: drains, adopts and drops, and whatever the others may",
    "reader": "looks: status, versions and metrics, and no weights",
}
BYTES_ROLES: frozenset[FleetRole] = frozenset({"relay", "trainer", "engine-host", "admin"})
"""Roles whose holders have the fleet key, and so may use the data ports."""

SCHEME = "laminar://"
NAME_HINT = "1 to 64 letters, digits, '.', '_' and '-'"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Identity:
    """Whom a certificate was issued to."""

    role: FleetRole
    name: str

    @property
    def uri(self) -> str:
        return f"{SCHEME}{self.role}/{self.name}"

    def __str__(self) -> str:
        return f"{self.role} {self.name}"


def identity_for(role: str, name: str) -> Identity:
    """InvalidRequest for what is no role, or cannot be a name."""
    known = next((one for one in FLEET_ROLES if one == role), None)
    if known is None:
        raise InvalidRequest(f"{role[:80]!r} is no role of a fleet", hint=f"roles are {', '.join(FLEET_ROLES)}")
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"{name[:80]!r} cannot name the holder of a certificate", hint=NAME_HINT)
    return Identity(known, name)


def identity_of(uris: Iterable[str]) -> Identity:
    """The identity among a certificate's URIs. InvalidRequest where there is none, or more than one."""
    ours = [uri for uri in uris if uri.startswith(SCHEME)]
    if len(ours) != 1:
        raise InvalidRequest(
            f"the certificate names {len(ours)} roles of a fleet, not one",
            hint="`paramserver credentials issue` makes certificates",
        )
    role, _, name = ours[0].removeprefix(SCHEME).partition("/")
    return identity_for(role, name)
