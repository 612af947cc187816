"""The operator's directory of a fleet: made, issued into, renewed, and rotated step by step, also when interrupted."""

from __future__ import annotations

import datetime
import json
import shutil
import ssl
import stat
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography import x509

import paramserver.cli
from paramserver.credentials import fleet as fleet_module
from paramserver.credentials.authority import Authority
from paramserver.credentials.fleet import Fleet
from protos.access.certificates import expires_unix_s, read_certificates
from protos.access.credentials import Credentials
from protos.access.fleet import BYTES_ROLES, FLEET_ROLES, Identity
from protos.errors import Conflict, InvalidRequest
from tests.support.fleet_credentials import authority_of, write_holder

DAY_S = 86_400


def run(*words: str) -> str:
    ended = CliRunner().invoke(paramserver.cli.cli, ["credentials", *words], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return ended.output


def certificate(path: Path) -> x509.Certificate:
    return read_certificates(path.read_bytes(), str(path))[0]


def state(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


# -- init and issue


def test_only_the_owner_may_read_anything(fleet: Path) -> None:
    for path in (fleet, *fleet.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert {path.name for path in fleet.iterdir() if path.is_dir()} == set(FLEET_ROLES), "no leftovers"


@pytest.mark.parametrize("role", FLEET_ROLES)
def test_only_a_relay_serves_and_nobody_issues(fleet: Path, role: str) -> None:
    found = certificate(fleet / role / "cert.pem")
    usages = found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    serves = x509.oid.ExtendedKeyUsageOID.SERVER_AUTH in usages
    assert serves == (role == "relay")
    assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert (fleet / role / "fleet.key").exists() == (role in BYTES_ROLES)
    assert not (fleet / role / "ca.key").exists()


def test_openssl_accepts_what_is_issued(fleet: Path) -> None:
    context = ssl.create_default_context(cafile=str(fleet / "relay" / "ca.pem"))
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_cert_chain(fleet / "relay" / "cert.pem", fleet / "relay" / "key.pem")
    assert len(context.get_ca_certs()) == 1


def test_nothing_is_overwritten(own_fleet: Path) -> None:
    before = state(own_fleet)
    with pytest.raises(Conflict, match="is not empty"):
        Fleet.init(own_fleet, (), 30)
    for name in ("trainer", "ca.pem", "ca.key", "fleet.key", "ca-next.key"):
        with pytest.raises(Conflict, match=f"{name} exists"):
            Fleet(own_fleet).issue("trainer", name, (), 30)
    assert state(own_fleet) == before


@pytest.mark.parametrize(
    ("role", "name", "hosts", "reason"),
    [
        ("relay", "../x", (), "cannot name the holder"),
        ("relay", ".x", (), "cannot name the holder"),
        ("relay", "a/b", (), "cannot name the holder"),
        ("relay", "", (), "cannot name the holder"),
        ("root", "x", (), "is no role"),
        ("relay", "x", ("no host",), "is no host"),
        ("relay", "x", ("laminar://admin/x",), "is no host"),
        ("relay", "x", ("*",), "is no host"),
        ("relay", "x", ("a..b",), "is no host"),
        ("trainer", "x", ("trainer-0",), "does not serve"),
    ],
)
def test_what_cannot_be_issued_leaves_nothing(
    own_fleet: Path, role: str, name: str, hosts: tuple[str, ...], reason: str
) -> None:
    before = state(own_fleet)
    with pytest.raises(InvalidRequest, match=reason):
        Fleet(own_fleet).issue(role, name, hosts, 30)
    assert state(own_fleet) == before


def test_a_bad_host_begins_no_fleet(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="is no host"):
        Fleet.init(tmp_path / "fleet", ["no host"], 30)
    assert not (tmp_path / "fleet").exists()


def test_no_certificate_outlives_its_ca() -> None:
    now = datetime.datetime.now(datetime.UTC)
    issuer = Authority.new(now, days=10)
    issued = issuer.issue(Identity("reader", "r"), (), 365, now)
    assert expires_unix_s(read_certificates(issued.certificate, "f")[0]) == expires_unix_s(issuer.certificate)
    with pytest.raises(InvalidRequest, match="the CA expired on"):
        issuer.issue(Identity("reader", "r"), (), 365, now + datetime.timedelta(days=11))


# -- commands


def test_the_commands_make_issue_renew_and_show(tmp_path: Path) -> None:
    directory = str(tmp_path / "fleet")
    shown = run("init", directory, "--host", "trainer-0", "--days", "20")
    assert all(role in shown for role in FLEET_ROLES)
    assert "(20 days)" in shown
    assert "trainer-0" in shown
    assert "engines-0" in run("issue", directory, "relay", "engines-0", "--host", "10.0.0.7")
    assert Credentials(tmp_path / "fleet" / "engines-0").material.hosts[-1] == "10.0.0.7"
    assert run("renew", directory, "engines-0", "--days", "90").count("new certificate") == 1
    assert run("renew", directory).count("new certificate") == 7
    told = json.loads(run("show", directory, "--json"))
    assert {holder["identity"]["name"] for holder in told["holders"]} == {*FLEET_ROLES, "engines-0"}
    assert all(holder["expires_unix_s"] > time.time() + 300 * DAY_S for holder in told["holders"])
    assert (len(told["cas"]), told["fleet_keys"]) == (1, 1)
    assert "10.0.0.7" in run("show", directory)


def test_show_says_what_has_expired(own_fleet: Path) -> None:
    write_holder(own_fleet / "old", authority_of(own_fleet), Identity("reader", "old"), trusts=own_fleet, days_ago=40)
    [line] = [line for line in run("show", str(own_fleet)).splitlines() if " old " in line]
    assert "(expired)" in line


def test_a_holder_that_is_not_there_is_not_renewed(own_fleet: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"no holder 'nobody'.*admin"):
        Fleet(own_fleet).renew(["trainer", "nobody"], 30)


# -- rotation


def understand(one: Path, other: Path) -> bool:
    """Whether holders of these directories accept each other's certificate and fleet key."""
    cas = [[ca.subject for ca in read_certificates((path / "ca.pem").read_bytes(), "f")] for path in (one, other)]
    issuers = [certificate(path / "cert.pem").issuer for path in (one, other)]
    keys = [Credentials(path).material.fleet_keys for path in (one, other)]
    proofs = [found[0] for found in keys]
    return issuers[0] in cas[1] and issuers[1] in cas[0] and proofs[0] in keys[1] and proofs[1] in keys[0]


def test_three_steps_replace_ca_and_key_and_neighbours_understand_each_other(own_fleet: Path, tmp_path: Path) -> None:
    def kept(name: str) -> Path:
        return Path(shutil.copytree(own_fleet / "relay", tmp_path / name))

    before = kept("before")
    assert "step 1 of 3" in run("rotate", str(own_fleet))
    assert understand(before, own_fleet / "relay")
    late = Fleet(own_fleet).issue("relay", "late", (), 30)
    assert understand(before, late.directory)
    added = kept("added")
    assert "step 2 of 3" in run("rotate", str(own_fleet))
    assert understand(added, own_fleet / "relay")
    assert not understand(before, own_fleet / "relay")
    assert understand(added, Fleet(own_fleet).issue("relay", "later", (), 30).directory)
    used = kept("used")
    assert "step 3 of 3" in run("rotate", str(own_fleet))
    assert understand(used, own_fleet / "relay")
    assert not understand(added, own_fleet / "relay")
    assert (len(Fleet(own_fleet).cas()), Fleet(own_fleet).num_fleet_keys) == (1, 1)
    assert understand(own_fleet / "relay", Fleet(own_fleet).issue("relay", "last", (), 30).directory)
    assert Credentials(before).material.fleet_keys != Credentials(own_fleet / "relay").material.fleet_keys


@pytest.mark.parametrize(
    "num_done", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 2]
)
def test_a_step_that_is_interrupted_anywhere_is_gone_through_again(
    fleet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_done: int
) -> None:
    """After a crash at each of its writes, the same step brings the fleet to where it had been without the crash."""
    real = fleet_module._write
    at = 0
    while True:
        directory = Path(shutil.copytree(fleet, tmp_path / f"crash-{at}"))
        for _ in range(num_done):
            Fleet(directory).rotate(30)
        left = at

        def write(path: Path, content: bytes) -> None:
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            real(path, content)

        monkeypatch.setattr(fleet_module, "_write", write)
        try:
            Fleet(directory).rotate(30)
            break  # it needs no more writes than this
        except KeyboardInterrupt:
            pass
        finally:
            monkeypatch.setattr(fleet_module, "_write", real)
        expected = ("add", "use", "drop")[num_done]
        assert Fleet(directory).rotate(30) == expected, f"after {at} writes"
        check_step(directory, expected)
        at += 1
    assert at > 5


def check_step(directory: Path, step: str) -> None:
    root = Fleet(directory)
    assert (len(root.cas()), root.num_fleet_keys) == ((1, 1) if step == "drop" else (2, 2))
    issuers = {holder.ca for holder in root.holders()}
    assert len(issuers) == 1
    assert "unknown" not in issuers
    keys = {Credentials(directory / role).material.fleet_keys for role in BYTES_ROLES}
    assert len(keys) == 1
    assert understand(directory / "relay", directory / "trainer")
    remaining = {"add": ["use", "drop"], "use": ["drop"], "drop": []}[step]
    assert [root.rotate(30) if n == 0 else Fleet(directory).rotate(30) for n in range(len(remaining))] == remaining
