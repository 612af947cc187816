"""A fleet's credentials for tests, as a pytest plugin: made once, and those that a relay has to refuse."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from paramserver.credentials.authority import LOOPBACK, Authority
from paramserver.credentials.fleet import Fleet
from protos.access.fleet import Identity

DAYS = 30


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a fleet's credentials, with a holder for each role, named after it. Not to be changed."""
    directory = tmp_path_factory.mktemp("fleet") / "fleet"
    Fleet.init(directory, ["trainer-0", "*.relays.local"], DAYS)
    return directory


@pytest.fixture
def own_fleet(fleet: Path, tmp_path: Path) -> Path:
    """A copy of it, for a test that changes it."""
    return Path(shutil.copytree(fleet, tmp_path / "fleet"))


def authority_of(fleet: Path) -> Authority:
    found = Authority.read((fleet / "ca.pem").read_bytes(), (fleet / "ca.key").read_bytes(), str(fleet))
    assert found is not None
    return found


def write_holder(
    directory: Path,
    issuer: Authority,
    identity: Identity,
    *,
    trusts: Path,
    days_ago: int = 0,
    days: int = DAYS,
    hosts: Sequence[str] = LOOPBACK,
) -> Path:
    """A holder's directory with a certificate that `issuer` made `days_ago`, and the rest from the fleet `trusts`."""
    issued = issuer.issue(identity, hosts, days, datetime.datetime.now(datetime.UTC) - datetime.timedelta(days_ago))
    directory.mkdir(parents=True)
    for name, content in (
        ("ca.pem", (trusts / "ca.pem").read_bytes()),
        ("cert.pem", issued.certificate),
        ("key.pem", issued.key),
        ("fleet.key", (trusts / "fleet.key").read_bytes()),
    ):
        (directory / name).write_bytes(content)
        (directory / name).chmod(0o600)
    return directory
