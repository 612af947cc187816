"""Where the admin listener of a configuration is to be: for whoever makes it, and for `gateway doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gateway.config import GatewayConfig
from protos.access.listening import check_listening
from protos.access.unix_socket import group_id, socket_path
from protos.errors import InvalidRequest

LOOPBACK_ANY = "127.0.0.1:0"
"""Where the admin listener is by default: on a free port, which nobody else has."""


@dataclass(frozen=True, slots=True)
class AdminPlace:
    """Where the admin listener is to be. `path`: of a unix socket; without one, `host` and `port`."""

    host: str = ""
    port: int = 0
    path: Path | None = None
    group: int | None = None


def admin_place(config: GatewayConfig) -> AdminPlace | None:
    """None: one port answers all routes. Raises InvalidRequest for options that contradict each other."""
    address = config.admin_listen
    if address is None:
        if config.admin_group is not None:
            raise InvalidRequest("--admin-group without a unix socket", hint="add --admin-listen unix:PATH")
        if config.api_keys is None:
            return None
        address = LOOPBACK_ANY
    if (path := socket_path(address)) is not None:
        return AdminPlace(path=path, group=None if config.admin_group is None else group_id(config.admin_group))
    if config.admin_group is not None:
        raise InvalidRequest("--admin-group is for a unix socket", hint="add --admin-listen unix:PATH")
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    check_listening(
        "--admin-listen",
        host,
        insecure=config.insecure,
        has_keys=config.api_keys is not None,
        mend="give --api-keys FILE, a unix socket, or a port of 127.0.0.1",
    )
    return AdminPlace(host, int(port))
