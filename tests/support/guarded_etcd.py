"""A real etcd with TLS, users and a role for one prefix, as a pytest plugin, too."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from etcd3aio import Etcd3Client, EtcdError
from etcd3aio.auth import PermissionType

from paramserver.membership.local import find_etcd, free_port
from protos.access.etcd import EtcdAccess
from protos.process import TIED

PREFIX = "/team-a"
USER, PASSWORD = "laminar", "a password of the tests"
ROOT_PASSWORD = "the password of root"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, fleet: Path) -> Iterator[GuardedEtcd]:
    """One that asks for TLS, a user and a password."""
    with guarded_etcd(tmp_path_factory.mktemp("etcd"), fleet) as found, ThreadPoolExecutor(1) as threads:
        threads.submit(lambda: asyncio.run(switch_on(found))).result(120.0)  # an asynchronous fixture may ask for this
        yield found


@dataclass(frozen=True, slots=True)
class GuardedEtcd:
    """`endpoint` is HOST:PORT; `ca` is the CA of its certificate."""

    endpoint: str
    ca: Path

    def access(self, directory: Path, *, user: str = USER, password: str = PASSWORD, **other: Any) -> EtcdAccess:
        """Its user's; the password is in a file in `directory`."""
        file = directory / "password"
        file.write_text(f"{password}\n")
        file.chmod(0o600)
        return EtcdAccess(
            **{"etcd_cacert": self.ca, "etcd_user": user, "etcd_password_file": file, "etcd_prefix": PREFIX, **other}
        )

    def client(self) -> Etcd3Client:
        found = Etcd3Client([self.endpoint], ca_cert=self.ca.read_bytes())
        found._manager.target = f"dns:///{self.endpoint}"
        return found


@contextlib.contextmanager
def guarded_etcd(directory: Path, fleet: Path) -> Iterator[GuardedEtcd]:
    """Serves with a relay's certificate of that fleet. Without users yet: see `switch_on`."""
    port = free_port()
    client, peer = f"https://127.0.0.1:{port}", f"http://127.0.0.1:{free_port(besides=port)}"
    with (directory / "etcd.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", TIED, str(find_etcd())),
                f"--data-dir={directory / 'etcd'}",
                "--name=guarded",
                f"--listen-client-urls={client}",
                f"--advertise-client-urls={client}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=guarded={peer}",
                f"--cert-file={fleet / 'relay' / 'cert.pem'}",
                f"--key-file={fleet / 'relay' / 'key.pem'}",
                "--log-level=error",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield GuardedEtcd(f"127.0.0.1:{port}", fleet / "ca.pem")
    finally:
        process.terminate()
        process.wait(60.0)


async def switch_on(etcd: GuardedEtcd) -> None:
    """Users, and from now on nobody else: `USER` may read and write below `PREFIX`."""
    async with etcd.client() as client:
        auth = client.auth
        assert auth is not None
        deadline = time.monotonic() + 60.0
        while True:
            try:
                await client.ping(timeout=5.0)
                break
            except (EtcdError, TimeoutError):
                assert time.monotonic() < deadline
        await auth.user_add("root", ROOT_PASSWORD)
        await auth.user_grant_role("root", "root")
        await auth.user_add(USER, PASSWORD)
        await auth.role_add("team")
        await auth.role_grant_permission("team", f"{PREFIX}/", f"{PREFIX}0", perm_type=PermissionType.READWRITE)
        await auth.user_grant_role(USER, "team")
        await auth.auth_enable()
