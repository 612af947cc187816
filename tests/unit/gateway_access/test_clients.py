"""Clients of a gateway with access control: the SDK, the command line, and runners with the programs they roll out."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from agents_env.failures import RunFailed
from agents_env.programs import Programs, read_tasks
from agents_env.runner import Plan, Record, Runner
from agents_env.server import GATEWAY_KEY, SERVER_KEY, Sampling, Server, api_key
from agents_env.session_view import start as inspect
from gateway.app import Gateway
from gateway.cli import cli
from gateway.core.tasks import NewTask
from protos.access.bearer import API_KEY_VARIABLE
from protos.errors import Conflict, Forbidden, Unauthenticated, Unavailable
from tests.support.keys import CALL, Client, controlled, key_of
from tests.support.scripted_engine import MODEL, ScriptedEngine
from trainer_client import AsyncExperienceReader, AsyncPromptPool, ExperienceReader, PromptPool
from trainer_client.sessions import Pause, Post, Sessions

SAMPLING = {"max_tokens": 2}


@pytest.fixture(autouse=True)
def _no_key_of_this_machines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (API_KEY_VARIABLE, SERVER_KEY):
        monkeypatch.delenv(name, raising=False)


async def finished(client: Client, name: str) -> None:
    await client.expect(200, "trainer", "POST", f"/sessions/{name}/v1/completions", CALL)
    await client.expect(200, "trainer", "POST", f"/sessions/{name}/finish", {"reward": 1.0})


# -- the SDK


async def test_a_reader_sends_its_key_with_every_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine("e0") as e0, controlled(tmp_path, e0) as (found, client):
        for name in ("a", "b", "c"):
            await finished(client, name)
        async with AsyncExperienceReader(found.url, api_key=key_of("trainer")) as reader:
            batch = await reader.sample(trajectories=1)
            assert len(await reader.rows()) == 2
            await reader.ack(batch)
            assert (await reader.statistics()).buffer["trajectories"] == 2
            assert await reader.resume(reader.state_dict()) == 0
        for key, error in ((None, Unauthenticated), ("x" * 20, Unauthenticated), (key_of("alice"), Forbidden)):
            async with AsyncExperienceReader(found.url, api_key=key) as reader:
                with pytest.raises(error):
                    await reader.sample(trajectories=1)
                with pytest.raises(error):
                    await reader.rows()
        monkeypatch.setenv(API_KEY_VARIABLE, key_of("trainer"))

        def read() -> int:
            with ExperienceReader(found.url) as reader:
                batch = reader.sample(trajectories=1)
                reader.ack(batch)
            return len(batch)

        assert await asyncio.to_thread(read) == 1


@pytest.mark.slow
async def test_a_dataset_of_torch_sends_its_key_with_every_request(tmp_path: Path) -> None:
    from trainer_client.torch_dataset import ExperienceDataset  # a second of torch

    async with ScriptedEngine("e0") as e0, controlled(tmp_path, e0) as (found, client):
        await finished(client, "a")

        def iterate() -> int:
            dataset = ExperienceDataset(found.url, api_key=key_of("trainer"), trajectories=1, prefetch=0)
            for batch in dataset:
                return len(batch.rewards)
            return 0

        assert await asyncio.to_thread(iterate) == 1


async def test_a_prompt_pool_sends_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with controlled(tmp_path) as (found, _):
        async with AsyncPromptPool(found.url, api_key=key_of("trainer")) as pool:
            assert (await pool.add([{"q": 1}])).added == 1
        async with AsyncPromptPool(found.url, api_key=key_of("alice")) as pool:
            assert (await pool.status()).tasks == 1
            with pytest.raises(Forbidden, match="needs a key with the role admin or trainer"):
                await pool.add([{"q": 2}])
        monkeypatch.setenv(API_KEY_VARIABLE, key_of("trainer"))

        def drained() -> int:
            with PromptPool(found.url) as pool:
                return pool.status().tasks

        assert await asyncio.to_thread(drained) == 1


class Loses(Sessions):
    """Loses its next answer if it `loses`."""

    loses = False
    lost: Any = None

    def _done(self, step: Post | Pause) -> Any:
        answer = super()._done(step)
        if self.loses and isinstance(step, Post):
            self.loses, self.lost = False, answer
            raise Unavailable("the answer was lost")
        return answer


async def test_a_trainers_own_sessions_have_keys_for_their_agents(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, controlled(tmp_path, e0) as (found, client):

        def play() -> tuple[str, str]:
            trainer = Loses(found.url, MODEL, api_key=key_of("alice"))
            try:
                session = trainer.open(sampling=SAMPLING, session_id="mine")
                session.complete([5])
                session.finish(1.0)
                with pytest.raises(Conflict, match="mine"):
                    trainer.open(session_id="mine")
                trainer.loses = True
                again = trainer.open(sampling=SAMPLING)
                return trainer.lost["session_id"], again.api_key
            finally:
                trainer.close()

        lost, key = await asyncio.to_thread(play)
        await client.expect(200, key, "POST", "/v1/completions", CALL)
        assert (await client.expect(200, "alice", "GET", f"/sessions/{lost}"))["state"] == "abandoned"


# -- the command line


async def command(found: Gateway, who: str, *arguments: str) -> Result:
    environment = {API_KEY_VARIABLE: key_of(who) if who else ""}
    return await asyncio.to_thread(CliRunner(env=environment).invoke, cli, [*arguments])


@pytest.mark.parametrize(
    ("arguments", "who", "refused"),
    [
        (["status", "--url"], "reader", "alice"),
        (["repack", "--dry-run", "--url"], "reader", "alice"),
        (["repack", "--url"], "admin", "trainer"),
        (["status", "--wait-s", "60", "--url"], "reader", "alice"),
    ],
)
async def test_commands_take_their_key_from_the_environment(
    tmp_path: Path, arguments: list[str], who: str, refused: str
) -> None:
    async with ScriptedEngine("e0") as e0, controlled(tmp_path, e0) as (found, _):
        url = found.admin_url if arguments == ["repack", "--url"] else found.url
        told = await command(found, who, *arguments, url)
        assert told.exit_code == 0, told.output
        told = await command(found, "", *arguments, url)
        assert (told.exit_code, "the request has no API key" in told.output) == (1, True), told.output
        assert f"set {API_KEY_VARIABLE} to a key of the gateway's key file" in told.output
        told = await command(found, refused, *arguments, url)
        assert (told.exit_code, "needs a key with the role admin" in told.output) == (1, True), told.output


async def test_an_export_reads_with_a_readers_key(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, controlled(tmp_path, e0) as (found, client):
        await finished(client, "a")
        table = str(tmp_path / "table.parquet")
        for who, code, word in (("", 1, "answered 401"), ("alice", 1, "answered 403"), ("reader", 0, "1 session")):
            told = await command(found, who, "export", "--store", found.url, table)
            assert (told.exit_code, word in told.output) == (code, True), told.output


# -- runners


def test_which_key_a_runner_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert api_key() == "none"
    monkeypatch.setenv(SERVER_KEY, "of-openai")
    assert (api_key(), api_key(sessions=False)) == ("of-openai", "of-openai")
    monkeypatch.setenv(GATEWAY_KEY, "of-the-gateway")
    assert (api_key(), api_key(sessions=False)) == ("of-the-gateway", "of-openai"), "another server is not told it"
    assert GATEWAY_KEY == API_KEY_VARIABLE


PROGRAM = """
import json, os, sys, urllib.error, urllib.request

def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    try:
        return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).status
    except urllib.error.HTTPError as error:
        return error.code

base = os.environ["OPENAI_BASE_URL"]
assert "LAMINAR_API_KEY" not in os.environ, "the runner's own key"
assert post(base + "/completions", {"model": "policy", "prompt": [5], "max_tokens": 2}) == 200
assert post(base.removesuffix("/v1") + "/finish", {"reward": 9.0}) == 403
assert post(base.removesuffix("/v1") + "/abandon", {}) == 403
"""


async def test_a_program_that_is_rolled_out_acts_and_cannot_reward_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(GATEWAY_KEY, key_of("alice"))
    (tmp_path / "program.py").write_text(PROGRAM)
    async with ScriptedEngine("e0") as e0, controlled(tmp_path, e0) as (found, client):
        programs = Programs([sys.executable, str(tmp_path / "program.py")], read_tasks(None))
        records: list[Record] = []
        async with Server(found.url, Sampling(MODEL), api_key=api_key()) as server:
            await server.check()
            plan = Plan("r", groups=1, group_size=1, attempts=1)
            await Runner(programs, server, plan, on_record=records.append).run(asyncio.Event())
        [record] = records
        assert (record.error, record.reward) == (None, 1.0)
        ended = await client.expect(200, "trainer", "GET", f"/sessions/{record.session_id}")
        assert ended["result"]["reward"] == 1.0
        await asyncio.to_thread(inspect, record.session_id, found.url, tokens=False, as_json=False)
        assert f"session {record.session_id}: finished" in capsys.readouterr().out
        monkeypatch.delenv(GATEWAY_KEY)
        with pytest.raises(SystemExit):
            await asyncio.to_thread(inspect, record.session_id, found.url, tokens=False, as_json=False)


async def test_a_runner_without_a_key_is_told_so_at_its_start(tmp_path: Path) -> None:
    async with controlled(tmp_path) as (found, _), Server(found.url, Sampling(MODEL), api_key=api_key()) as server:
        with pytest.raises(
            RunFailed, match=r"asks for an API key: the API key is not known here .*is read from LAMINAR_API_KEY"
        ):
            await server.check()


async def test_leases_of_tasks_are_agents_work(tmp_path: Path) -> None:
    async with controlled(tmp_path) as (found, client):
        await found.stores.tasks.add("default", [NewTask("t", b"{}")])
        leased: Any = await client.expect(200, "alice", "POST", "/tasks/lease", {"runner": "r"})
        body = {"lease_id": leased["leases"][0]["lease_id"], "reward": 1.0}
        await client.expect(403, "reader", "POST", "/tasks/finish", body)
        await client.expect(200, "alice", "POST", "/tasks/finish", body)


def test_no_command_takes_a_key_as_an_option() -> None:
    """It would stand in the list of processes, and in the shell's history."""
    context = click.Context(cli)
    for name in cli.list_commands(context):
        found = cli.get_command(context, name)
        assert found is not None
        options = {option for parameter in found.params for option in parameter.opts}
        bounds = {"--sessions-per-key", "--turns-per-key"}
        assert not {option for option in options if "key" in option} - {"--api-keys"} - bounds, name
