"""Who may do what at a relay with credentials: the one table of gRPC methods, its other ports, and roles. Pure.

An interceptor enforces it for gRPC (`paramserver.daemon.access`), `paramserver.data.secured` for data connections,
`paramserver.data.engine_ports` for engines, `paramserver.daemon.metrics` for metrics; docs/reference/roles.md shows it.

Invariants:
- a method without an operation is refused to everybody;
- a role that stands in `own` may do it at the relay of its own name alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from protos.access.fleet import BYTES_ROLES, FLEET_ROLES, FleetRole, Identity

_RELAY = "/laminar.v1.Relay/"
_HEALTH = "/grpc.health.v1.Health/"


@dataclass(frozen=True, slots=True)
class Operation:
    """`roles` may do it; those of `own` only to the relay whose certificate has their own name."""

    name: str
    what: str
    roles: frozenset[FleetRole]
    own: frozenset[FleetRole] = frozenset()

    @property
    def needs(self) -> str:
        """The roles that may do it, in words."""
        return " or ".join(role for role in FLEET_ROLES if role in self.roles)


def _operation(name: str, what: str, *roles: FleetRole, own: tuple[FleetRole, ...] = ()) -> Operation:
    return Operation(name, what, frozenset(roles), frozenset(own))


LOOK = _operation("look", "health, status, metrics, versions, stages, and who is master", *FLEET_ROLES)
PIN = _operation("pin", "acquire, renew and release versions", "relay", "trainer", "engine-host", "gateway", "admin")
REPORT = _operation("report", "report that an engine could not load", "trainer", "engine-host", "gateway", "admin")
PUBLISH = _operation("publish", "claim a run; announce, commit and abort versions", "trainer", "admin")
DRAIN = _operation("drain", "take a relay out of the chain", "admin", own=("relay",))
DROP = _operation("drop", "end a model with all its versions; relays pass it on to the master", "admin", "relay")
ADOPT = _operation("adopt", "join a registry that replaced another", "admin")
FETCH = _operation("fetch", "read the bytes of a version at the data port", *BYTES_ROLES)
WRITE = _operation("write", "write a version that was announced, at the data port", "trainer", "admin")
ENGINES = _operation(
    "engines", "call the engines beside a relay, at their ports: turns, loads, metrics", "gateway", "admin"
)
OPERATIONS = (LOOK, PIN, REPORT, PUBLISH, DRAIN, DROP, ADOPT, FETCH, WRITE, ENGINES)

METHODS: Mapping[str, Operation] = {
    **{f"{_RELAY}{name}": LOOK for name in ("Status", "Versions", "Watch", "Locate", "Stage")},
    **{f"{_RELAY}{name}": PIN for name in ("Acquire", "Renew", "Release")},
    f"{_RELAY}ReportLoad": REPORT,
    **{f"{_RELAY}{name}": PUBLISH for name in ("HoldRun", "Announce", "Commit", "Abort")},
    f"{_RELAY}Drain": DRAIN,
    f"{_RELAY}Drop": DROP,
    f"{_RELAY}Adopt": ADOPT,
    **{f"{_HEALTH}{name}": LOOK for name in ("Check", "List", "Watch")},
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": LOOK,
}
"""Every method that a relay serves, by its path in gRPC."""
PURPOSES: Mapping[str, Operation] = {"fetch": FETCH, "write": WRITE}
"""What a data connection may be for, by the purpose in its greeting."""


def refusal(method: str, caller: Identity, relay: str) -> str:
    """Why `caller` may not call `method` at the relay whose certificate has the name `relay`; "" if it may."""
    operation = METHODS.get(method)
    if operation is None:
        return "this method has no operation that a role could be allowed"
    if caller.role in operation.roles:
        return ""
    if caller.role not in operation.own:
        return f"the certificate of {caller} does not allow: {operation.what}"
    return "" if caller.name == relay else f"{caller} may do this at its own relay alone, not at {relay}'s"


def may_publish(caller: Identity) -> bool:
    return caller.role in PUBLISH.roles


def data_refusal(purpose: str, caller: Identity) -> str:
    """Why `caller` may open no data connection for this; "" if it may. Over TLS: else whoever proves to know the fleet
    key, which these roles alone have, may do both."""
    operation = PURPOSES.get(purpose)
    if operation is None:
        return f"a data connection is not for {purpose!r}"
    return _unless_allowed(operation, caller)


def engine_refusal(caller: Identity) -> str:
    """Why `caller` may not connect to an engine; "" if it may."""
    return _unless_allowed(ENGINES, caller)


def metrics_refusal(caller: Identity) -> str:
    """Why `caller` may not read the metrics; "" if it may."""
    return _unless_allowed(LOOK, caller)


def _unless_allowed(operation: Operation, caller: Identity) -> str:
    return "" if caller.role in operation.roles else f"the certificate of {caller} does not allow: {operation.what}"


def hint(method: str) -> str:
    operation = METHODS.get(method)
    return f"this needs a certificate with the role {operation.needs}" if operation is not None else ""
