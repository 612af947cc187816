"""Where engines may be that are added while the gateway runs."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from gateway.core.networks import NEAR, EnginePlaces, Networks
from protos.errors import InvalidRequest


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3", "172.31.0.1", "192.168.0.9", "::1", "fd00::1"])
def test_loopback_and_private_addresses_are_near(address: str) -> None:
    assert ip_address(address) in NEAR


@pytest.mark.parametrize(
    "address",
    ["169.254.169.254", "::ffff:169.254.169.254", "fe80::1", "0.0.0.0", "::", "8.8.8.8", "172.32.0.1", "2001:db8::1"],
)
def test_a_clouds_metadata_and_the_internet_are_not(address: str) -> None:
    assert ip_address(address) not in NEAR


def test_an_address_within_another_family_is_what_it_reaches() -> None:
    assert ip_address("::ffff:10.0.0.1") in NEAR


def test_networks_are_a_list() -> None:
    found = Networks.parse("10.0.0.0/8, fd00::/8")
    assert str(found) == "10.0.0.0/8,fd00::/8"
    for wrong in ("", "10.0.0.1/8", "10.0.0.0/8,,", "engines", "10.0.0.0/33", ",".join(["10.0.0.0/8"] * 2000)):
        with pytest.raises(InvalidRequest):
            Networks.parse(wrong)


def places(networks: str | None = None, listens_on: str = "10.0.0.1", insecure: bool = False) -> EnginePlaces:
    chosen = None if networks is None else Networks.parse(networks)
    return EnginePlaces.of({"Engines-0", "10.9.9.9"}, chosen, listens_on=listens_on, insecure=insecure)


def test_hosts_that_were_named_are_allowed_wherever_they_are() -> None:
    for host in ("engines-0", "ENGINES-0", "10.9.9.9"):
        assert places().refusal(host, ["8.8.8.8"]) == ""


def test_off_loopback_with_keys_nothing_else_is() -> None:
    assert "is in no network for engines" in places().refusal("engines-1", ["10.0.0.2"])
    assert "has no address" in places().refusal("engines-1", [])


@pytest.mark.parametrize(("listens_on", "insecure"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_on_loopback_and_for_everybody_near_networks_are(listens_on: str, insecure: bool) -> None:
    near = places(listens_on=listens_on, insecure=insecure)
    assert near.refusal("engines-1", ["10.0.0.2", "fd00::2%eth0"]) == ""
    assert near.refusal("engines-1", []) == "", "it cannot be reached, which whoever connects says"
    assert "169.254.169.254" in near.refusal("metadata", ["169.254.169.254"])
    assert near.refusal("both", ["10.0.0.2", "8.8.8.8"]), "which one is taken later is not known"


def test_networks_that_were_chosen_are_the_only_ones() -> None:
    chosen = places("10.0.0.0/24", listens_on="127.0.0.1")
    assert chosen.refusal("engines-1", ["10.0.0.2"]) == ""
    assert chosen.refusal("engines-1", ["127.0.0.1"])
    assert chosen.refusal("engines-1", []), "a name without an address may have any later"
