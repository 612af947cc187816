"""The key file of a running gateway: keys that are replaced, files that break, and what its start refuses."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gateway.app import open_keys
from gateway.cli import cli
from gateway.config import GatewayConfig
from gateway.operate import doctor
from protos.access.bearer import API_KEY_VARIABLE
from protos.access.roles import ROLES, parse_keys
from protos.errors import InvalidRequest
from tests.support.keys import Client, controlled, key_file, key_of, lines
from tests.support.relays import until
from tests.support.scripted_engine import ScriptedEngine
from tests.support.words import tokenizer


async def until_answered(client: Client, status: int, who: str) -> None:
    """Until the gateway answers so: it looks at its key file each second."""

    async def answers() -> bool:
        return (await client.send(who, "GET", "/status"))[0] == status

    await until(answers, f"{status} for {who}")


async def failure_of(client: Client) -> str:
    status = await client.expect(200, "reader", "GET", "/status")
    return str(status["access"]["failure"])


async def test_a_key_is_replaced_while_the_gateway_runs(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, controlled(tmp_path, e0) as (_, client):
        path = tmp_path / "api-keys"
        new = "the-next-key-of-the-admin"
        path.write_text(f"{lines()}admin root {new}\n")
        await until_answered(client, 200, new)
        await client.expect(200, "admin", "GET", "/status")  # both are valid now
        path.write_text(f"{lines('reader')}admin root {new}\n")
        await until_answered(client, 401, "admin")
        await client.expect(200, new, "GET", "/status")
        await client.expect(401, "alice", "GET", "/v1/models")


async def test_a_file_that_breaks_leaves_the_keys_and_shows_in_the_status(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedEngine("e0") as e0, controlled(tmp_path, e0) as (found, client):
        path, secret = tmp_path / "api-keys", "a-new-key-that-is-misplaced"
        with caplog.at_level(logging.INFO):
            path.write_text(f"{lines()}{secret} admin root\n")
            failure = await until(lambda: failure_of(client), "what is wrong with the file")
        assert "line 7 begins with no role" in failure
        assert secret not in failure + caplog.text
        assert not [who for who in ("admin", "alice") if key_of(who) in caplog.text]
        await client.expect(200, "admin", "GET", "/status")
        await client.expect(401, secret, "GET", "/status")
        shown = await asyncio.to_thread(
            CliRunner(env={API_KEY_VARIABLE: key_of("reader")}).invoke, cli, ["status", "--url", found.url]
        )
        assert "API keys: 1 admin, 1 trainer, 3 agent, 1 reader" in shown.output
        assert f"the API keys stay as they were: {path}, line 7" in shown.output
        path.write_text(lines())

        async def mended() -> bool:
            return not await failure_of(client)

        await until(mended, "the file that is mended")


# -- files as deployments lay them out


def laid_out_by_kubelet(directory: Path, text: str) -> Path:
    """`keys` of a volume of a secret: a link to a link to files of the mode 0440, which changes all at once."""
    version = directory / f"..{len(list(directory.iterdir()))}"
    version.mkdir()
    (version / "keys").write_text(text)
    (version / "keys").chmod(0o440)
    (directory / "..data_tmp").symlink_to(version.name)
    (directory / "..data_tmp").replace(directory / "..data")
    path = directory / "keys"
    if not path.is_symlink():
        path.symlink_to("..data/keys")
    return path


def of_root_and_the_group(directory: Path, text: str) -> Path:
    """As `deploy/systemd/gateway.env` makes it."""
    path = directory / "keys"
    path.write_text(text)
    path.chmod(0o640)
    return path


@pytest.mark.parametrize("lay_out", [laid_out_by_kubelet, of_root_and_the_group])
async def test_a_deployed_gateway_needs_no_key_for_probes_and_follows_its_file(
    tmp_path: Path, lay_out: Callable[[Path, str], Path]
) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    path = lay_out(volume, lines())
    async with controlled(tmp_path, api_keys=path, host="0.0.0.0") as (_, client):
        for probe, status in (("/healthz", 503), ("/health", 503), ("/openapi.json", 200)):  # without an engine
            await client.expect(status, "", "GET", probe)
        for path_ in ("/status", "/metrics"):
            await client.expect(401, "", "GET", path_)
            await client.expect(200, "reader", "GET", path_)
        lay_out(volume, lines("admin"))
        await until_answered(client, 401, "reader")
        await client.expect(200, "admin", "GET", "/status")


# -- what a start refuses


def config(directory: Path, **options: Any) -> GatewayConfig:
    return GatewayConfig(model="policy", tokenizer=tokenizer(directory / "model"), port=0, **options)


def test_a_gateway_off_loopback_says_which_options_decide_who_may_use_it(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "10.0.0.1", "gateway"):
        with pytest.raises(InvalidRequest, match=rf"gateway serve on {host} would serve .*--api-keys FILE.*--insecure"):
            open_keys(config(tmp_path, host=host))
    assert open_keys(config(tmp_path)) is None


def test_a_gateway_with_keys_or_insecure_serves_off_loopback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = open_keys(config(tmp_path, host="0.0.0.0", api_keys=key_file(tmp_path)))
    assert keys is not None
    assert len(keys) == 6
    assert "--insecure" not in caplog.text
    assert open_keys(config(tmp_path, host="0.0.0.0", insecure=True)) is None
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "--insecure: gateway serve on 0.0.0.0 takes no credentials" in warning.getMessage()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"insecure": True, "api_keys": "api-keys"}, "contradict each other"),
        ({"agents_may_reward": True}, "--agents-may-reward without API keys"),
        ({"api_keys": "absent"}, "cannot read .*absent: No such file"),
        ({"api_keys": "open"}, r"has the mode 0644: others may .*chmod 600"),
        ({"api_keys": "empty"}, r"has no key \(`gateway keys new ROLE NAME` prints a line for it\)"),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    key_file(tmp_path)
    (tmp_path / "open").write_text(lines())
    (tmp_path / "empty").touch(0o600)
    if "api_keys" in options:
        options = {**options, "api_keys": tmp_path / options["api_keys"]}
    with pytest.raises(InvalidRequest, match=why):
        open_keys(config(tmp_path, **options))


async def test_an_insecure_gateway_says_so_in_its_status(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with ScriptedEngine("e0") as e0, controlled(tmp_path, e0, api_keys=None, insecure=True) as (found, client):
        status = await client.expect(200, "", "GET", "/status")
        access = {"keys": None, "insecure": True, "agents_may_reward": False, "failure": "", "admin_listen": ""}
        assert status["access"] == access
        shown = await asyncio.to_thread(CliRunner().invoke, cli, ["status", "--url", found.url])
        assert "INSECURE: no credentials are asked for" in shown.output
    assert "--insecure: gateway serve on 127.0.0.1 takes no credentials" in caplog.text


async def test_the_doctor_looks_at_the_keys(tmp_path: Path) -> None:
    async def found(**options: Any) -> tuple[bool, str]:
        [finding] = [f for f in await doctor.examine(config(tmp_path, **options)) if f.what == "access control"]
        return finding.right, f"{finding.found}; {finding.remedy}"

    assert await found() == (True, "none: only this host reaches it; ")
    right, told = await found(api_keys=key_file(tmp_path))
    assert (right, "admin" in told, key_of("admin") in told) == (True, True, False)
    for options, word in (
        ({"host": "0.0.0.0"}, "it does not start so; give --api-keys FILE"),
        ({"host": "0.0.0.0", "insecure": True}, "whoever reaches 0.0.0.0 may do everything"),
        ({"api_keys": tmp_path / "absent"}, "No such file"),
    ):
        right, told = await found(**options)
        assert (right, word in told) == (False, True), told


def test_where_the_key_file_is_may_stand_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[GatewayConfig] = []

    async def served(config: GatewayConfig, ready_file: Path | None) -> None:
        seen.append(config)

    monkeypatch.setattr("gateway.cli._serve", served)
    line = ["serve", "--model=m", f"--tokenizer={tmp_path}"]
    for environment, flags, path in (
        ({"LAMINAR_API_KEYS": "/etc/keys"}, [], Path("/etc/keys")),
        ({"LAMINAR_API_KEYS": "/etc/keys"}, ["--api-keys=mine"], Path("mine")),
        ({"LAMINAR_API_KEYS": ""}, [], None),
    ):
        assert CliRunner(env=environment).invoke(cli, [*line, *flags]).exit_code == 0
        assert seen[-1].api_keys == path
    flags = ["--engine-networks=10.0.0.0/8,192.168.0.0/16", "--agents-may-reward"]
    assert CliRunner().invoke(cli, [*line, *flags]).exit_code == 0
    assert (str(seen[-1].engine_networks), seen[-1].agents_may_reward) == ("10.0.0.0/8,192.168.0.0/16", True)
    wrong = CliRunner().invoke(cli, [*line, "--engine-networks=engines"])
    assert (wrong.exit_code, "no list of networks" in wrong.output) == (2, True)


# -- gateway keys


def test_a_new_key_is_a_line_of_the_file_and_the_help_says_how() -> None:
    made = CliRunner().invoke(cli, ["keys", "new", "agent", "runner-1"])
    assert made.exit_code == 0
    keys = parse_keys(made.stdout, "f")
    assert (keys.by_role(), len(made.stdout.splitlines())) == ({"agent": 1}, 1)
    assert "add this line to the file of --api-keys" in made.stderr
    for wrong, said in (
        (["boss", "me"], "'boss' is not one of"),
        (["agent", "a/b"], "cannot name the holder of a key"),
    ):
        refused = CliRunner().invoke(cli, ["keys", "new", *wrong])
        assert (refused.exit_code != 0, said in refused.output) == (True, True), refused.output
    for command in (["keys"], ["keys", "new"]):
        shown = CliRunner().invoke(cli, [*command, "--help"])
        assert shown.exit_code == 0
    assert ">> ./api-keys" in shown.output


def test_a_configuration_shows_no_key(tmp_path: Path) -> None:
    made = dataclasses.replace(config(tmp_path), api_keys=key_file(tmp_path))
    assert key_of("admin") not in repr(made)


def keys_command(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, ["keys", *map(str, words)])


def test_a_new_file_has_a_key_of_each_role_for_its_user_alone_and_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "api-keys"
    assert keys_command("init", path).exit_code == 0
    assert path.stat().st_mode & 0o777 == 0o600
    made = path.read_text()
    assert parse_keys(made, "f").by_role() == dict.fromkeys(ROLES, 1)
    again = keys_command("init", path)
    assert (again.exit_code, "exists" in again.output) == (1, True), again.output
    assert path.read_text() == made
    assert list(tmp_path.iterdir()) == [path], "nothing half written stays"
    nowhere = keys_command("init", tmp_path / "none" / "api-keys")
    assert (nowhere.exit_code, "cannot write" in nowhere.output) == (1, True), nowhere.output


def test_after_another_agents_key_was_added_the_first_one_is_still_found(tmp_path: Path) -> None:
    """As docs/security.md shows it."""
    path = tmp_path / "api-keys"
    assert keys_command("init", path).exit_code == 0
    first = keys_command("get", path, "agent").stdout
    with path.open("a") as file:
        file.write(keys_command("new", "agent", "runner-1").stdout)
    assert keys_command("get", path, "agent").stdout == first
    assert keys_command("get", path, "agent", "runner-1").stdout not in ("", first)


def test_a_key_of_the_file_is_printed_alone_and_of_several_the_newest(tmp_path: Path) -> None:
    path = key_file(tmp_path)
    with path.open("a") as file:
        file.write("agent carol key-of-carol-before\nagent carol key-of-carol-after\n")
    assert keys_command("get", path, "admin").stdout == f"{key_of('admin')}\n"
    assert keys_command("get", path, "agent", "carol").stdout == "key-of-carol-after\n"
    for words, said in (
        (["agent"], "keys of several names with the role agent (name one: it has "),
        (["agent", "mallory"], "no key of 'mallory' with the role agent (it has "),
        (["boss"], "'boss' is not one of"),
    ):
        refused = keys_command("get", path, *words)
        assert (refused.exit_code != 0, said in refused.output) == (True, True), refused.output
    path.write_text("admin me key-of-mine-0123456789\n")
    refused = keys_command("get", path, "trainer")
    assert "no key of the role trainer (`gateway keys new trainer NAME >> " in refused.output
    path.chmod(0o644)
    assert "others may read or write the keys in it" in keys_command("get", path, "admin").output
    assert "`gateway keys init " in keys_command("get", tmp_path / "none", "admin").output
