"""The table of a relay's methods, operations and roles."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from paramserver.core.access import (
    ENGINES,
    METHODS,
    OPERATIONS,
    PURPOSES,
    data_refusal,
    engine_refusal,
    hint,
    refusal,
)
from protos.access.fleet import BYTES_ROLES, FLEET_ROLES, FleetRole, Identity
from protos.laminar.v1 import relay_pb2

SERVED = [
    f"/{service.full_name}/{method.name}"
    for module in (relay_pb2, health_pb2, reflection_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]

RELAY = "/laminar.v1.Relay/"
MAY: dict[str, set[FleetRole]] = {
    "Status": set(FLEET_ROLES),
    "Watch": set(FLEET_ROLES),
    "Acquire": {"relay", "trainer", "engine-host", "gateway", "admin"},
    "ReportLoad": {"trainer", "engine-host", "gateway", "admin"},
    "Announce": {"trainer", "admin"},
    "Commit": {"trainer", "admin"},
    "Drop": {"relay", "admin"},
    "Adopt": {"admin"},
}
"""Written out a second time: a change of the table is a change of who may do what."""


def test_every_method_that_is_served_has_an_operation() -> None:
    assert sorted(METHODS) == sorted(SERVED)
    assert {*METHODS.values(), *PURPOSES.values(), ENGINES} == {*OPERATIONS}


@pytest.mark.parametrize("name", MAY)
@pytest.mark.parametrize("role", FLEET_ROLES)
def test_roles_may_what_the_table_says(name: str, role: FleetRole) -> None:
    reason = refusal(RELAY + name, Identity(role, "x"), "r0")
    assert (reason == "") == (role in MAY[name])
    assert not reason or f"{role} x" in reason


def test_a_relay_drains_itself_alone() -> None:
    assert refusal(RELAY + "Drain", Identity("relay", "r0"), "r0") == ""
    assert "own relay alone" in refusal(RELAY + "Drain", Identity("relay", "r1"), "r0")
    assert "does not allow" in refusal(RELAY + "Drain", Identity("trainer", "r0"), "r0")
    assert refusal(RELAY + "Drain", Identity("admin", "me"), "r0") == ""


@pytest.mark.parametrize("method", ["", "/", RELAY, RELAY + "Shutdown", RELAY + "status", "/other/Status", "Status"])
@pytest.mark.parametrize("role", FLEET_ROLES)
def test_a_method_without_an_operation_is_refused_to_everybody(method: str, role: FleetRole) -> None:
    assert "no operation" in refusal(method, Identity(role, "r0"), "r0")
    assert hint(method) == ""


@pytest.mark.parametrize("role", FLEET_ROLES)
def test_bytes_are_for_roles_with_the_fleet_key_and_writing_for_publishers(role: FleetRole) -> None:
    caller = Identity(role, "x")
    assert (data_refusal("fetch", caller) == "") == (role in BYTES_ROLES)
    assert (data_refusal("write", caller) == "") == (role in ("trainer", "admin"))
    assert "not for 'map'" in data_refusal("map", caller)


def test_the_page_has_the_table() -> None:
    docs = Path(__file__).parents[3] / "docs"
    text, security = (docs / "reference/roles.md").read_text(), (docs / "security.md").read_text()
    for operation in OPERATIONS:
        cells = ["yes" if role in operation.roles else "own" * (role in operation.own) for role in FLEET_ROLES]
        assert f"| *{operation.name}*: {operation.what} | {' | '.join(cells)} |" in text
    assert text.count("| *") - text.count("| **") == len(OPERATIONS)
    assert all(f"| `{role}` |" in security for role in FLEET_ROLES)


@pytest.mark.parametrize("role", FLEET_ROLES)
def test_gateways_and_operators_alone_call_engines(role: FleetRole) -> None:
    reason = engine_refusal(Identity(role, "x"))
    assert (reason == "") == (role in ("gateway", "admin"))
    assert not reason or f"{role} x does not allow: call the engines" in reason
