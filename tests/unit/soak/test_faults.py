"""A fault is undone after its time, and one part has one fault at a time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.soak.chaos import Fault
from tests.soak.faults import Faults
from tests.soak.fleet import Fleet, Options
from tests.soak.links import Link


@pytest.fixture
def link() -> Link:
    return Link("a", ("127.0.0.1", 0), ("127.0.0.1", 1))


@pytest.fixture
def fleet(tmp_path: Path, link: Link) -> Fleet:
    """It is not started: links and clocks are all that these faults touch."""
    return Fleet(
        tmp_path, Options(1), can_mount=False, links={"a": link}, clocks={"relay-1": tmp_path / "relay-1.clock"}
    )


async def test_a_link_is_broken_and_heals(fleet: Fleet, link: Link) -> None:
    faults = Faults(fleet)
    breaking = asyncio.create_task(faults.carry_out(Fault(0.0, "slow link", "a", 600.0, 1000.0)))
    await asyncio.sleep(0)
    assert link.bytes_s == 1000.0
    await faults.carry_out(Fault(0.0, "cut link", "a", 600.0))
    assert (faults.left_out, link.cut) == (1, False), "it has a fault already"
    breaking.cancel()
    await asyncio.gather(breaking, return_exceptions=True)
    assert link.bytes_s is None, "also when the run ends in the middle of it"
    await faults.carry_out(Fault(0.0, "cut link", "a", 0.0))
    assert not link.cut
    assert faults.done == {"slow link": 1, "cut link": 1}


async def test_a_clock_is_set_by_its_file(fleet: Fleet) -> None:
    await Faults(fleet).carry_out(Fault(0.0, "clock step", "relay-1", 0.0, -30.0))
    assert fleet.clocks["relay-1"].read_text() == "-30"


def test_what_cannot_be_mounted_is_no_target(fleet: Fleet, tmp_path: Path) -> None:
    fleet.disks["gateway-1"] = tmp_path
    assert "disk" not in fleet.parts
    fleet.can_mount = True
    assert fleet.parts["disk"] == ["gateway-1"]
