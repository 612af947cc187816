"""A holder's directory of credentials: what is read, refused, and followed while it changes."""

from __future__ import annotations

import datetime
import logging
import os
import shutil
from pathlib import Path

import pytest

from paramserver.credentials.authority import Authority
from paramserver.credentials.fleet import Fleet
from protos.access import certificates
from protos.access.credentials import (
    CREDENTIALS_VARIABLE,
    FILES,
    Credentials,
    credentials_in,
    from_environment,
    parse_fleet_keys,
)
from protos.access.fleet import FLEET_PURPOSE, FLEET_ROLES, Identity, identity_for, identity_of
from protos.errors import InvalidRequest
from tests.support.fleet_credentials import authority_of, write_holder

TRAINER = Identity("trainer", "t")


# -- identities


@pytest.mark.parametrize("role", FLEET_ROLES)
def test_an_identity_is_one_uri_and_back(role: str) -> None:
    identity = identity_for(role, "host-0.rack_1")
    assert identity_of(["https://elsewhere/admin", identity.uri]) == identity
    assert role in FLEET_PURPOSE


@pytest.mark.parametrize(
    "uris",
    [
        [],
        ["https://relay/x"],
        ["laminar://relay/a", "laminar://admin/a"],
        ["laminar://relay/a", "laminar://relay/a"],
        ["laminar://superuser/a"],
        ["laminar://relay"],
        ["laminar://relay/"],
        ["laminar://relay/a/b"],
        ["laminar://relay/../admin"],
        ["laminar://relay/a\n"],
        [f"laminar://relay/{'n' * 65}"],
        ["LAMINAR://relay/a"],
        ["laminar:///a"],
    ],
)
def test_what_names_no_role_or_several_is_nobodys(uris: list[str]) -> None:
    with pytest.raises(InvalidRequest):
        identity_of(uris)


# -- reading


@pytest.mark.parametrize("role", FLEET_ROLES)
def test_a_holder_has_what_its_role_needs(fleet: Path, role: str) -> None:
    found = Credentials(fleet / role).material
    assert found.identity == Identity(role, role)  # type: ignore[arg-type]
    assert len(found.fleet_keys) == (role not in ("gateway", "reader"))
    assert ("127.0.0.1" in found.hosts) == (role == "relay")
    assert found.expires_unix_s > 0


def test_no_key_is_shown(fleet: Path) -> None:
    credentials = Credentials(fleet / "trainer")
    shown = f"{credentials!r} {credentials.material!r} {credentials.material}"
    assert credentials.material.fleet_keys[0].hex() not in shown
    assert "PRIVATE" not in shown
    assert "CERTIFICATE" not in shown


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_not_there_is_named(own_fleet: Path, name: str) -> None:
    (own_fleet / "trainer" / name).unlink()
    with pytest.raises(InvalidRequest, match=rf"{name}.*paramserver credentials init"):
        Credentials(own_fleet / "trainer")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", [b"", b"\xff\x00" * 100, b"-----BEGIN CERTIFICATE-----\nMIIB\n", b"#" * (65 << 10)])
def test_a_file_of_something_else_is_named(own_fleet: Path, name: str, content: bytes) -> None:
    (own_fleet / "trainer" / name).write_bytes(content)
    with pytest.raises(InvalidRequest, match=name):
        Credentials(own_fleet / "trainer")


@pytest.mark.parametrize("name", ["key.pem", "fleet.key"])
@pytest.mark.parametrize("mode", [0o604, 0o606, 0o620, 0o644, 0o666])
def test_keys_that_others_may_read_are_refused(own_fleet: Path, name: str, mode: int) -> None:
    (own_fleet / "trainer" / name).chmod(mode)
    with pytest.raises(InvalidRequest, match=rf"{name} has the mode {mode:04o}.*chmod 600"):
        Credentials(own_fleet / "trainer")


@pytest.mark.parametrize("name", ["key.pem", "fleet.key", "cert.pem", "ca.pem"])
def test_the_group_may_read_and_certificates_are_for_everybody(own_fleet: Path, name: str) -> None:
    (own_fleet / "trainer" / name).chmod(0o640 if "key" in name else 0o644)
    assert Credentials(own_fleet / "trainer").identity.role == "trainer"


def test_certificates_that_others_may_write_are_refused(own_fleet: Path) -> None:
    (own_fleet / "trainer" / "ca.pem").chmod(0o666)
    with pytest.raises(InvalidRequest, match="others may write it"):
        Credentials(own_fleet / "trainer")


def test_an_expired_certificate_and_one_of_tomorrow_are_refused(fleet: Path, tmp_path: Path) -> None:
    issuer = authority_of(fleet)
    old = write_holder(tmp_path / "old", issuer, TRAINER, trusts=fleet, days_ago=31)
    with pytest.raises(InvalidRequest, match=r"cert.pem expired on 20.*credentials renew"):
        Credentials(old)
    early = write_holder(tmp_path / "early", issuer, TRAINER, trusts=fleet, days_ago=-2)
    with pytest.raises(InvalidRequest, match=r"is valid from 20.*clock"):
        Credentials(early)


def test_a_certificate_of_another_ca_and_another_key_are_refused(fleet: Path, tmp_path: Path) -> None:
    foreign = Authority.new(datetime.datetime.now(datetime.UTC))
    theirs = write_holder(tmp_path / "theirs", foreign, TRAINER, trusts=fleet)
    with pytest.raises(InvalidRequest, match="was issued by no CA"):
        Credentials(theirs)
    mixed = Path(shutil.copytree(fleet / "trainer", tmp_path / "mixed"))
    shutil.copy(fleet / "reader" / "key.pem", mixed / "key.pem")
    with pytest.raises(InvalidRequest, match="is not the key of the certificate"):
        Credentials(mixed)


def test_a_third_ca_and_a_third_fleet_key_are_refused(own_fleet: Path) -> None:
    ca = own_fleet / "trainer" / "ca.pem"
    ca.write_bytes(ca.read_bytes() * 3)
    with pytest.raises(InvalidRequest, match="has 3 certificates"):
        Credentials(own_fleet / "trainer")
    key = "ab" * 32 + "\n"
    assert parse_fleet_keys(f"{key}\n  {key}".encode(), "f") == (bytes.fromhex("ab" * 32),) * 2
    for text, reason in ((key * 3, "has 3 keys"), ("ab" * 31, "line 1"), (key + "zz" * 32, "line 2"), ("é", "line 1")):
        with pytest.raises(InvalidRequest, match=reason) as refused:
            parse_fleet_keys(text.encode(), "f")
        assert "ab" * 8 not in str(refused.value)


def test_a_relay_is_reached_by_the_names_in_its_certificate(fleet: Path) -> None:
    certificate = certificates.read_certificates((fleet / "relay" / "cert.pem").read_bytes(), "f")[0]
    for host in ("127.0.0.1", "localhost", "::1", "[::1]", "trainer-0", "TRAINER-0", "a.relays.local"):
        assert certificates.covers(certificate, host), host
    for host in ("127.0.0.2", "trainer-1", "relays.local", "a.b.relays.local", "", "0.0.0.0", "*.relays.local.evil"):
        assert not certificates.covers(certificate, host), host


def test_the_environment_names_a_directory(fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CREDENTIALS_VARIABLE, raising=False)
    assert from_environment() is None
    assert credentials_in(None) is None
    monkeypatch.setenv(CREDENTIALS_VARIABLE, str(fleet / "reader"))
    found, given = from_environment(), credentials_in(str(fleet / "admin"))
    assert found is not None
    assert given is not None
    assert (found.identity.role, given.identity.role) == ("reader", "admin")


# -- following


def test_new_certificates_are_taken_over(own_fleet: Path) -> None:
    credentials = Credentials(own_fleet / "trainer")
    before = credentials.material
    credentials.refresh()
    assert credentials.material is before, "nothing has changed"
    Fleet(own_fleet).renew(["trainer"], 60)
    credentials.refresh()
    assert credentials.material.expires_unix_s > before.expires_unix_s
    assert credentials.material is not before
    assert credentials.failure == ""


def test_half_of_a_copy_leaves_what_was_there(own_fleet: Path, caplog: pytest.LogCaptureFixture) -> None:
    credentials = Credentials(own_fleet / "trainer")
    before = credentials.material
    kept = (own_fleet / "trainer" / "key.pem").read_bytes()
    Fleet(own_fleet).renew(["trainer"], 60)
    whole = (own_fleet / "trainer" / "key.pem").read_bytes()
    (own_fleet / "trainer" / "key.pem").write_bytes(kept)
    with caplog.at_level(logging.INFO):
        credentials.refresh()
        credentials.refresh()
        assert credentials.material is before
        assert "is not the key of the certificate" in credentials.failure
        (own_fleet / "trainer" / "key.pem").write_bytes(whole)
        credentials.refresh()
    assert credentials.material is not before
    assert credentials.failure == ""
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"], "each is said once"


def test_a_directory_that_is_gone_leaves_what_was_there(own_fleet: Path) -> None:
    credentials = Credentials(own_fleet / "trainer")
    before = credentials.material
    shutil.rmtree(own_fleet / "trainer")
    credentials.refresh()
    assert (credentials.material is before, "cannot read" in credentials.failure) == (True, True)


def test_a_role_does_not_change_with_a_file(own_fleet: Path) -> None:
    credentials = Credentials(own_fleet / "reader")
    for name in FILES:
        shutil.copy(own_fleet / "admin" / name, own_fleet / "reader" / name)
    credentials.refresh()
    assert credentials.identity.role == "reader"
    assert "admin admin in place of reader reader's" in credentials.failure


def test_files_that_settled_are_not_read_again(own_fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FILES:
        os.utime(own_fleet / "trainer" / name, (1.0, 1.0))
    monkeypatch.setattr("protos.access.secret_file.SETTLED_S", -1.0)
    credentials = Credentials(own_fleet / "trainer")

    def read(_: Path) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr("protos.access.credentials.read", read)
    credentials.refresh()
    (own_fleet / "trainer" / "cert.pem").chmod(0o640)
    with pytest.raises(AssertionError, match="read again"):
        credentials.refresh()
