"""The listener of those who operate a gateway: what it answers, what the port of all refuses, and who may connect."""

from __future__ import annotations

import asyncio
import dataclasses
import grp
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from gateway.api.routes import ROUTES
from gateway.app import start
from gateway.cli import cli
from gateway.core.access import LOOK, OPERATE, STATUS
from gateway.operate.admin_place import AdminPlace, admin_place
from protos.errors import InvalidRequest, LaminarError
from tests.support.keys import controlled, key_file, operators
from tests.support.scripted_engine import ScriptedEngine
from tests.support.skips import needs
from tests.unit.gateway_api.test_status import config, gateway

FOREIGN_UID = 65_534
CHANGES = (("POST", "/admin/engines"), ("DELETE", "/admin/engines/e0"), ("POST", "/admin/repack"))
root_only = pytest.mark.skipif(os.geteuid() != 0, reason=needs("another user's process can be started", "root"))


async def refused_on_the_port_of_all(client: Any, who: str, where: str) -> None:
    for method, path in CHANGES:
        told = await client.expect(403, who, method, path, {"name": "x", "url": "http://127.0.0.1:1"})
        assert f"{method} {path} is not answered on this port" in told["error"]["message"]
        assert where in told["error"]["message"]


async def test_with_keys_the_fleet_changes_by_the_admin_listener_alone(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, controlled(tmp_path, e0) as (found, client), operators(found) as admin:
        assert found.admin_url.startswith("http://127.0.0.1:")
        assert found.admin_url != found.url
        await refused_on_the_port_of_all(client, "admin", found.admin_url)
        assert list(found.fleet.handles) == ["e0"]
        for who, status in (("", 401), ("alice", 403), ("trainer", 403), ("reader", 403), ("admin", 200)):
            told = await admin.expect(status, who, "DELETE", "/admin/engines/e0")
            assert found.admin_url not in str(told)
        assert list(found.fleet.handles) == []


async def test_who_may_not_operate_is_not_told_where(tmp_path: Path) -> None:
    async with controlled(tmp_path) as (found, client):
        for who, status in (("", 401), ("alice", 403), ("trainer", 403)):
            told = await client.expect(status, who, "POST", "/admin/repack")
            assert found.admin_url not in str(told)


async def test_the_admin_listener_has_what_an_operator_looks_at_and_nothing_of_a_clients(tmp_path: Path) -> None:
    async with controlled(tmp_path) as (found, _), operators(found) as admin:
        for route in ROUTES:
            path = route.path.replace("{name}", "none")
            if "{" in path or route.operation is OPERATE:
                continue
            status, _ = await admin.send("admin", route.method, path)
            for_browsers = path == "/openapi.json" or path.startswith("/ui")  # on the port of clients
            operators_own = route.operation in (LOOK, STATUS) and not for_browsers
            assert (status != 404) == operators_own, (route.method, path, status)


async def test_without_keys_one_port_answers_everything_unless_it_is_asked_for(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (found, http):
        assert (found.admin, found.admin_url) == (None, found.url)
        async with http.delete("/admin/engines/e0") as answer:
            assert answer.status == 200
    async with gateway(tmp_path, admin_listen="127.0.0.1:0") as (found, http), operators(found) as admin:
        async with http.post("/admin/repack") as answer:
            assert answer.status == 403
        await admin.expect(200, "", "POST", "/admin/repack")


async def test_a_unix_socket_is_its_owners_and_takes_no_keys(tmp_path: Path, open_directory: Path) -> None:
    path = open_directory / "admin.sock"
    async with ScriptedEngine("e0") as e0, controlled(tmp_path, e0, admin_listen=f"unix:{path}") as (found, client):
        assert found.admin_url == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        await refused_on_the_port_of_all(client, "admin", f"unix:{path}")
        async with operators(found) as admin:
            await admin.expect(200, "", "DELETE", "/admin/engines/e0")
            told = await admin.expect(200, "", "GET", "/status")
            assert told["access"]["admin_listen"] == f"unix:{path}"
        for arguments in (["repack", "--dry-run"], ["repack"], ["status"]):
            done = await asyncio.to_thread(CliRunner().invoke, cli, [*arguments, "--url", f"unix:{path}"])
            assert done.exit_code == 0, done.output
        assert f"admin listener: unix:{path}" in done.output
    assert not path.exists(), "it is gone with its gateway"
    done = await asyncio.to_thread(CliRunner().invoke, cli, ["status", "--url", f"unix:{path}"])
    assert (done.exit_code, f"no gateway answers at unix:{path}" in done.output) == (1, True), done.output


ASK = """
import os, socket, sys
os.setgroups([int(g) for g in sys.argv[3:]])
os.setgid(65534)
os.setuid(int(sys.argv[2]))
sock = socket.socket(socket.AF_UNIX)
try:
    sock.connect(sys.argv[1])
except PermissionError:
    sys.exit("the kernel refuses")
sock.sendall(b"POST /admin/repack HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n")
answer = b""
while more := sock.recv(65536):
    answer += more
print(answer.decode())
"""


async def asked_by(path: Path, uid: int, *groups: int) -> str:
    """What a process of that user, in those groups, gets of the socket."""
    command = [sys.executable, "-c", ASK, str(path), str(uid), *map(str, groups)]
    ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=False)
    return (ran.stdout.partition("\r\n")[0] or ran.stderr).strip()


@root_only
async def test_other_users_are_refused_even_where_the_file_lets_them_in(tmp_path: Path, open_directory: Path) -> None:
    path = open_directory / "admin.sock"
    async with controlled(tmp_path, admin_listen=str(path)):
        assert await asked_by(path, FOREIGN_UID) == "the kernel refuses"
        path.chmod(0o666)
        assert "403" in await asked_by(path, FOREIGN_UID)
        assert "200" in await asked_by(path, 0)


@root_only
async def test_a_group_may_be_let_in(tmp_path: Path, open_directory: Path) -> None:
    path = open_directory / "admin.sock"
    named = next(entry for entry in grp.getgrall() if entry.gr_gid not in (0, 65_534))
    async with controlled(tmp_path, admin_listen=str(path), admin_group=named.gr_name):
        found = path.stat()
        assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, named.gr_gid)
        assert await asked_by(path, FOREIGN_UID) == "the kernel refuses"
        assert "200" in await asked_by(path, FOREIGN_UID, named.gr_gid)
        path.chmod(0o666)
        assert "403" in await asked_by(path, FOREIGN_UID)


async def test_a_socket_is_not_taken_from_whoever_listens(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, open_directory: Path
) -> None:
    path = open_directory / "admin.sock"
    async with gateway(tmp_path, admin_listen=str(path)) as (found, _):
        with pytest.raises(LaminarError, match="another process listens on"):
            await start(dataclasses.replace(config(tmp_path_factory.mktemp("other")), admin_listen=str(path)))
        async with operators(found) as admin:
            await admin.expect(200, "", "GET", "/status")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"admin_listen": "0.0.0.0:0"}, "--admin-listen on 0.0.0.0 would serve whoever reaches it"),
        ({"admin_group": "root"}, "--admin-group without a unix socket"),
        ({"admin_listen": "127.0.0.1:0", "admin_group": "root"}, "--admin-group is for a unix socket"),
        ({"admin_listen": "unix:/x", "admin_group": "no-such-group"}, "this host has no group 'no-such-group'"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, settings: dict[str, str], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        admin_place(dataclasses.replace(config(tmp_path), **settings))


def test_with_keys_another_host_may_operate_where_its_operator_says_so(tmp_path: Path) -> None:
    settings = dataclasses.replace(config(tmp_path), api_keys=key_file(tmp_path), admin_listen="[::]:8081")
    assert admin_place(settings) == AdminPlace("::", 8081)


@pytest.mark.parametrize("address", ["", "unix:", "here", "127.0.0.1", "127.0.0.1:70000", "http://127.0.0.1:80"])
def test_what_is_no_address_is_refused_by_the_command_line(tmp_path: Path, address: str) -> None:
    done = CliRunner().invoke(cli, ["serve", "--model=m", f"--tokenizer={tmp_path}", f"--admin-listen={address}"])
    assert (done.exit_code, "is neither HOST:PORT" in " ".join(done.output.split())) == (2, True), done.output


async def test_a_session_is_where_the_proxy_is(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever a client, or a proxy that passes it on, says of where it came in."""
    forged = {"X-Forwarded-Proto": "https", "X-Forwarded-Host": "evil.example", "Forwarded": "host=evil.example"}
    made = {"session_id": "s"}
    async with gateway(tmp_path) as (found, http), http.post("/sessions", json=made, headers=forged) as answer:
        assert (await answer.json())["base_url"] == f"{found.url}/sessions/s/v1"
    behind = tmp_path_factory.mktemp("behind")
    async with gateway(behind, public_url="https://rollouts.example.org/rl") as (found, http):
        root = "https://rollouts.example.org/rl/sessions"
        async with http.post("/sessions", json={"session_id": "a%b"}, headers=forged) as answer:
            assert (await answer.json())["base_url"] == f"{root}/a%25b/v1"
        async with http.post("/groups", json={"group_id": "g", "group_size": 2}) as answer:
            members = (await answer.json())["sessions"]
            assert {m["base_url"] for m in members} == {f"{root}/{m['session_id']}/v1" for m in members}


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("rollouts.example.org", "is no address"),
        ("ftp://rollouts.example.org", "is no address"),
        ("https://me:secret@rollouts.example.org", "is no address"),
        ("https://rollouts.example.org/?x=1", "is no address"),
        ("https://rollouts.example.org/v1", "without the /v1"),
    ],
)
def test_a_public_url_is_an_address(tmp_path: Path, url: str, why: str) -> None:
    done = CliRunner().invoke(cli, ["serve", "--model=m", f"--tokenizer={tmp_path}", f"--public-url={url}"])
    assert (done.exit_code, why in " ".join(done.output.split())) == (2, True), done.output


async def test_connections_of_the_admin_listener_end_with_the_gateway(tmp_path: Path) -> None:
    async with controlled(tmp_path) as (found, _), operators(found) as admin:
        await admin.expect(503, "", "GET", "/healthz")  # it has no engine
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get(f"{found.admin_url}/healthz")
