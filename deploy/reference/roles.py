"""docs/reference/roles.md: which role may carry out which operation, of a gateway and of a relay."""

from __future__ import annotations

from collections.abc import Collection

import gateway.core.access as of_gateways
import paramserver.core.access as of_relays
from deploy.reference import markdown
from deploy.reference.markdown import table
from protos.access.fleet import FLEET_ROLES
from protos.access.roles import ROLES

INTRO = """
[Security](../security.md) explains the roles. *own*: at a gateway only sessions and groups that a key of the same name
has made; at a relay only the one whose certificate has the caller's name. `GET /openapi.json` has the roles of each
route (`x-laminar-roles`); `paramserver/core/access.py` has the gRPC methods of each operation.
"""


def page() -> str:
    return markdown.page("Roles", INTRO, "## At a gateway", _gateway(), "## At a relay", _relay())


def _gateway() -> str:
    head = ("operation", *ROLES, "session's key", "finish key")
    return table(head, map(_gateway_row, of_gateways.OPERATIONS))


def _gateway_row(operation: of_gateways.Operation) -> list[str]:
    public = operation.public
    keys = ["yes" * (public or may) for may in (operation.session_key, operation.finish_key)]
    may = ROLES if public else operation.roles
    return [f"**{operation.name}**: {operation.what}", *_cells(ROLES, may, operation.own), *keys]


def _relay() -> str:
    rows = [[f"*{one.name}*: {one.what}", *_cells(FLEET_ROLES, one.roles, one.own)] for one in of_relays.OPERATIONS]
    return table(("operation", *FLEET_ROLES), rows)


def _cells(roles: Collection[str], may: Collection[str], own: Collection[str]) -> list[str]:
    return ["yes" if role in may else "own" * (role in own) for role in roles]
