"""An etcd that does not take everybody: what is refused, in which words, and what goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from paramserver.client import RelayClient
from paramserver.credentials.fleet import Fleet
from paramserver.membership import EtcdRegistry
from paramserver.membership.registry import Absent, Put
from protos.access.etcd import PASSWORD_VARIABLE, EtcdAccess
from protos.errors import InvalidRequest, Unavailable
from tests.support.guarded_etcd import PASSWORD, PREFIX, ROOT_PASSWORD, USER, GuardedEtcd
from tests.support.relays import Relays, until

pytestmark = pytest.mark.slow  # each start of an etcd takes most of a second


async def attempt(guarded: GuardedEtcd, access: EtcdAccess) -> EtcdRegistry:
    return await EtcdRegistry.connect(guarded.endpoint, timeout_s=60.0, access=access)


async def test_a_user_writes_below_the_prefix_and_nowhere_else(guarded: GuardedEtcd, tmp_path: Path) -> None:
    registry = await attempt(guarded, guarded.access(tmp_path))
    try:
        done = await registry.transact([Absent("/laminar/x")], [Put("/laminar/x", b"1")])
        assert done.succeeded
        assert [entry.key for entry in (await registry.list("/laminar/x")).entries] == ["/laminar/x"]
    finally:
        await registry.close()
    root = await attempt(guarded, guarded.access(tmp_path, user="root", password=ROOT_PASSWORD, etcd_prefix=""))
    try:
        assert [entry.key for entry in (await root.list("/")).entries if "laminar/x" in entry.key] == [
            f"{PREFIX}/laminar/x"
        ]
    finally:
        await root.close()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"password": "wrong"}, "authentication failed.*--etcd-user"),
        ({"user": "nobody"}, "authentication failed.*--etcd-user"),
        ({"etcd_user": "", "etcd_password_file": None}, "user name is empty.*--etcd-user"),
        ({"etcd_prefix": "/team-b"}, "permission denied.*grant laminar readwrite on /team-b/laminar/"),
        ({"etcd_prefix": ""}, "permission denied.*grant laminar readwrite on /laminar/"),
    ],
)
async def test_who_is_not_allowed_is_told_what_would_be(
    guarded: GuardedEtcd, tmp_path: Path, changed: dict[str, object], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        await attempt(guarded, guarded.access(tmp_path, **changed))  # type: ignore[arg-type]
    assert PASSWORD not in str(refused.value)


async def test_without_tls_and_with_another_ca_nobody_answers(guarded: GuardedEtcd, tmp_path: Path) -> None:
    Fleet.init(tmp_path / "other", (), 30)
    for ca in (None, tmp_path / "other" / "ca.pem"):
        access = guarded.access(tmp_path, etcd_cacert=ca)
        with pytest.raises(Unavailable, match=r"no etcd answers.*--etcd-cacert"):
            await EtcdRegistry.connect(guarded.endpoint, timeout_s=5.0, access=access)


async def test_a_password_may_be_in_the_environment(
    guarded: GuardedEtcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = guarded.access(tmp_path, etcd_password_file=None)
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    with pytest.raises(InvalidRequest, match=f"no password for --etcd-user {USER}.*{PASSWORD_VARIABLE}"):
        await attempt(guarded, access)
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    await (await attempt(guarded, access)).close()


async def test_a_password_that_others_may_read_is_not_used(guarded: GuardedEtcd, tmp_path: Path) -> None:
    access = guarded.access(tmp_path)
    assert access.etcd_password_file is not None
    access.etcd_password_file.chmod(0o644)
    with pytest.raises(InvalidRequest, match="has the mode 0644"):
        await attempt(guarded, access)


async def test_a_token_that_ended_costs_one_call(guarded: GuardedEtcd, tmp_path: Path) -> None:
    """As when etcd was restarted, which keeps its tokens in memory."""
    registry = await attempt(guarded, guarded.access(tmp_path))
    try:
        registry._client.set_token("ended.0")
        with pytest.raises(Unavailable, match="invalid auth token"):
            await registry.list("/laminar/")
        await registry.list("/laminar/")
    finally:
        await registry.close()


@pytest.mark.parametrize("prefix", ["team", "/", "/a/", "//a", "/a b", "/a/../b\n"])
def test_what_is_no_prefix_is_refused(prefix: str) -> None:
    with pytest.raises(InvalidRequest, match="is no prefix"):
        EtcdAccess(etcd_prefix=prefix)


def test_a_password_without_a_user_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="without --etcd-user"):
        EtcdAccess(etcd_password_file=tmp_path / "password")


async def test_relays_live_in_it(guarded: GuardedEtcd, tmp_path: Path) -> None:
    access = guarded.access(tmp_path)
    options = (
        *("--etcd-cacert", str(access.etcd_cacert)),
        *("--etcd-user", USER, "--etcd-password-file", str(access.etcd_password_file)),
        *("--etcd-prefix", PREFIX),
    )
    found = Relays(guarded.endpoint, tmp_path)
    try:
        one, _ = found.start("a", *options), found.start("b", *options)
        async with RelayClient(one.ready["grpc"]) as client:

            async def both() -> bool:
                return (await client.status()).members == ("a", "b")

            await until(both, "the two see each other")
        assert PASSWORD not in one.log()
    finally:
        found.close()
