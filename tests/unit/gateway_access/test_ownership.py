"""Whose a session is: who made it ends it, also after its end and after a restart; its own key only acts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sqlite3
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest
from aiohttp import web
from yarl import URL

from gateway.api.access import Access
from gateway.api.errors import answer_errors
from gateway.app import start
from gateway.core.access import STATUS
from gateway.store.database import DATABASE_NAME
from protos.access.key_file import KeyFile
from tests.support.keys import CALL, Client, by, controlled, key_file, key_of
from tests.support.scripted_engine import MODEL, ScriptedEngine, until
from tests.support.turns import serving_app
from tests.unit.gateway_api.test_status import config, gateway

FINISH = {"reward": 1.0}


async def session(client: Client, name: str, who: str = "alice", **fields: Any) -> Any:
    """A session with one turn."""
    made = await client.expect(200, who, "POST", "/sessions", {"session_id": name, **fields})
    await client.expect(200, made["api_key"], "POST", f"/sessions/{name}/v1/completions", CALL)
    return made


@pytest.mark.parametrize("who", ["alice", "alice again", "trainer", "admin"])
async def test_a_session_is_ended_by_whose_name_made_it_by_trainers_and_by_its_finish_key(
    tmp_path: Path, who: str
) -> None:
    async with ScriptedEngine("e0") as e0, controlled(tmp_path, e0) as (_, client):
        made = await session(client, "s1")
        assert len({made["api_key"], made["finish_key"], key_of("alice")}) == 3
        await client.expect(403, "bob", "POST", "/sessions/s1/finish", FINISH)
        await client.expect(403, made["api_key"], "POST", "/sessions/s1/finish", FINISH)
        ended = await client.expect(200, who, "POST", "/sessions/s1/finish", FINISH)
        assert ended["reward"] == 1.0
        made = await session(client, "s2")
        assert (await client.expect(200, made["finish_key"], "POST", "/sessions/s2/finish", FINISH))["stored"]
        made = await session(client, "s3")
        await client.expect(200, made["finish_key"], "POST", "/sessions/s3/abandon")
        made = await session(client, "s4")
        waits = await client.expect(200, made["finish_key"], "POST", "/finish_session?session_id=s4", {})
        assert waits["state"] == "unrewarded"
        await client.expect(403, made["api_key"], "POST", "/sessions/s4/reward", FINISH)
        await client.expect(200, made["finish_key"], "POST", "/sessions/s4/reward", FINISH)


async def test_after_its_end_a_session_is_still_its_owners(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, controlled(tmp_path, e0) as (_, client):
        made = await session(client, "s")
        await client.expect(200, "alice", "POST", "/sessions/s/finish", FINISH)
        for who, status in (("bob", 403), (made["api_key"], 401), ("alice", 200), (made["finish_key"], 200)):
            await client.expect(status, who, "POST", "/sessions/s/reward", {"reward": 0.5})
            await client.expect(status, who, "POST", "/sessions/s/finish", FINISH)
            await client.expect(status, who, "GET", "/sessions/s")
        refused = await client.expect(401, made["api_key"], "POST", "/v1/completions", CALL)
        assert "no live session has this API key" in refused["error"]["message"]
        sampled = await client.expect(
            200, "trainer", "POST", "/experience/sample", {"reader": "r", "trainer_version": 0, "trajectories": 1}
        )
        assert sampled["trajectories"][0]["reward"] == 0.5


async def test_an_agent_may_reward_itself_where_the_gateway_says_so(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, controlled(tmp_path, e0, agents_may_reward=True) as (_, client):
        made, other = await session(client, "s"), await session(client, "other", "bob")
        for path in ("finish", "abandon", "reward"):
            await client.expect(
                403, other["api_key"], "POST", f"/sessions/s/{path}", FINISH if path == "finish" else None
            )
        await client.expect(403, "bob", "POST", "/sessions/s/finish", FINISH)
        await client.expect(200, made["api_key"], "POST", "/sessions/s/finish", FINISH)


@pytest.mark.parametrize("named", [{"session_id": "made"}, {"metadata": {"session_id": "made"}}, {"user": "made"}, {}])
async def test_a_session_that_a_call_makes_belongs_to_the_key_of_the_call(tmp_path: Path, named: Any) -> None:
    async with ScriptedEngine("e0") as e0, controlled(tmp_path, e0) as (_, client):
        path = "/v1/completions" if named else "/sessions/made/v1/completions"
        await client.expect(200, "alice", "POST", path, {**CALL, **named})
        for request in (
            ("POST", "/sessions/made/finish", FINISH),
            ("GET", "/sessions/made"),
            ("POST", path, CALL | named),
        ):
            await client.expect(403, "bob", *request)
        await client.expect(200, "alice again", "POST", "/sessions/made/v1/completions", CALL)
        await client.expect(200, "alice", "POST", "/sessions/made/finish", FINISH)


async def test_a_group_and_its_members_are_whose_name_made_it(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, controlled(tmp_path, e0) as (_, client):
        wanted = {"group_id": "g", "group_size": 2, "resample_max": 1}
        group = await client.expect(200, "alice", "POST", "/groups", wanted)
        first, second = group["sessions"]
        assert len({first["api_key"], first["finish_key"], second["api_key"], second["finish_key"]}) == 4
        await client.expect(200, first["api_key"], "POST", "/v1/completions", CALL)
        await client.expect(403, "bob", "POST", f"/sessions/{first['session_id']}/finish", FINISH)
        await client.expect(401, second["finish_key"], "POST", f"/sessions/{first['session_id']}/finish", FINISH)
        await client.expect(200, first["finish_key"], "POST", f"/sessions/{first['session_id']}/finish", FINISH)
        await client.expect(403, second["api_key"], "POST", f"/sessions/{second['session_id']}/abandon")
        answer = await client.expect(200, "alice", "POST", f"/sessions/{second['session_id']}/abandon")
        again = answer["replacement"]
        await client.expect(200, again["api_key"], "POST", "/v1/completions", CALL)
        await client.expect(403, "bob", "POST", "/groups/g/abandon")
        shown = await client.expect(200, "trainer", "GET", "/groups/g")
        assert shown["sessions"][0]["finish_key"] == again["finish_key"]
        await client.expect(200, again["finish_key"], "POST", f"/sessions/{again['session_id']}/finish", FINISH)


async def test_responses_are_of_their_session(tmp_path: Path) -> None:
    """Ids of responses name turns: they are looked up, continued and counted in whoever's session they are."""
    async with ScriptedEngine("e0") as e0, controlled(tmp_path, e0) as (found, client):
        await client.expect(200, "alice", "POST", "/sessions/s/v1/completions", CALL)
        [state] = found.sessions.live
        [turn] = state.tree.turns.values()
        turn.messages = ({"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello"})
        name = f"resp_{turn.turn_id}"
        key = (await client.expect(200, "alice", "POST", "/sessions", {}))["api_key"]
        for who, status in (("bob", 403), (key, 403), ("alice", 200), ("reader", 200), ("trainer", 200)):
            await client.expect(status, who, "GET", f"/v1/responses/{name}")
            await client.expect(status, who, "GET", f"/sessions/s/v1/responses/{name}")
        body = {"model": MODEL, "input": "hello", "previous_response_id": name, "max_output_tokens": 2}
        refused = await client.expect(403, "bob", "POST", "/v1/responses", body)
        assert "was not made with a key of bob" in refused["error"]["message"]
        count = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
        for path in ("/s/s/v1/messages/count_tokens", "/s/s/v1/messages"):
            told = await client.expect(403, "bob", "POST", path, {**count, "max_tokens": 2})
            assert told["error"]["type"] == "permission_error"


async def test_the_base_url_and_key_of_a_session_are_all_that_an_agent_needs(tmp_path: Path) -> None:
    """Also where its client sends a session header of its own, as coding agents do."""
    async with ScriptedEngine("e0") as e0, controlled(tmp_path, e0) as (found, client):
        made = await client.expect(200, "alice", "POST", "/sessions", {"session_id": "s"})
        for base_url in (made["base_url"], f"{found.url}/v1"):
            async with openai.AsyncOpenAI(base_url=base_url, api_key=made["api_key"], max_retries=0) as agent:
                assert [model.id async for model in await agent.models.list()] == [MODEL]
                own = {"X-Claude-Code-Session-Id": "its-own"}
                await agent.completions.create(model=MODEL, prompt=[5], max_tokens=2, extra_headers=own)
        assert (await client.expect(200, made["api_key"], "GET", "/sessions/s"))["turns"] == 2


# -- lives of a gateway


async def test_owners_and_finish_keys_survive_a_restart(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0:
        async with controlled(tmp_path, e0) as (_, client):
            made, ended = await session(client, "live"), await session(client, "ended")
            await client.expect(200, "alice", "POST", "/sessions/ended/finish", FINISH)
            group = await client.expect(200, "alice", "POST", "/groups", {"group_id": "g", "group_size": 1})
        async with controlled(tmp_path, e0) as (_, client):
            await client.expect(403, "bob", "POST", "/sessions/live/finish", FINISH)
            await client.expect(403, "bob", "POST", "/sessions/ended/reward", FINISH)
            await client.expect(403, "bob", "GET", "/groups/g")
            await client.expect(200, made["api_key"], "POST", "/v1/completions", CALL)
            await client.expect(200, made["finish_key"], "POST", "/sessions/live/finish", FINISH)
            await client.expect(200, ended["finish_key"], "POST", "/sessions/ended/reward", {"reward": 0.0})
            again = await client.expect(200, "alice again", "GET", "/groups/g")
            for key in ("api_key", "finish_key"):
                assert [member[key] for member in again["sessions"]] == [member[key] for member in group["sessions"]]


async def test_a_database_from_before_owners_opens_and_its_sessions_are_trainers_alone(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0:
        async with gateway(tmp_path, e0) as (_, http):  # without access control: nobody's
            client = Client(http)
            made = await session(client, "old", "")
            await client.expect(200, "", "POST", "/groups", {"group_id": "g", "group_size": 1})
            await session(client, "ended", "")
            await client.expect(200, "", "POST", "/sessions/ended/finish", FINISH)
        as_before(tmp_path / DATABASE_NAME)
        async with controlled(tmp_path, e0) as (_, client):
            for who, status in (("alice", 403), (made["finish_key"], 401), ("trainer", 200)):
                await client.expect(status, who, "GET", "/sessions/old")
                await client.expect(status, who, "POST", "/sessions/ended/reward", {"reward": 0.5})
            await client.expect(403, "alice", "GET", "/groups/g")
            await client.expect(200, made["api_key"], "POST", "/v1/completions", CALL)
            await client.expect(403, "alice", "POST", "/sessions", {"group_id": "g"})
            await client.expect(200, "trainer", "POST", "/sessions/old/finish", FINISH)


def as_before(path: Path) -> None:
    """Takes away what this layout's rows have, and an earlier gateway's have not."""
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("DROP TABLE secrets")
        for table, column in (("sessions", "spec"), ("ended", "body")):
            for name, blob in database.execute(f"SELECT session_id, {column} FROM {table}").fetchall():
                row = msgspec.msgpack.decode(blob)
                del row["owner"]
                database.execute(
                    f"UPDATE {table} SET {column}=? WHERE session_id=?", (msgspec.msgpack.encode(row), name)
                )
        for name, blob in database.execute("SELECT group_id, body FROM groups").fetchall():
            row = msgspec.msgpack.decode(blob)
            del row["spec"]["owner"]
            database.execute("UPDATE groups SET body=? WHERE group_id=?", (msgspec.msgpack.encode(row), name))


# -- requests that come in slowly


async def test_a_name_that_is_taken_while_a_request_comes_in_is_not_the_requests(tmp_path: Path) -> None:
    """Names of sessions are guessed easily: their check holds for the session that the request reaches in the end."""
    async with ScriptedEngine("e0") as e0, controlled(tmp_path, e0) as (found, client):
        body = b'{"model": "policy", "prompt": [5, 6], "max_tokens": 2}'
        call = await Slow.begin(found.url, "POST /sessions/raced/v1/completions", "bob", len(body))
        finish = await Slow.begin(found.url, "POST /sessions/raced/finish", "bob", len(b'{"reward": 9}'))
        assert (await finish.status()) == 404, "before its body came"
        await session(client, "raced")
        assert await call.end(body) == 403
        shown = await client.expect(200, "alice", "GET", "/sessions/raced")
        assert (shown["turns"], shown["state"]) == (1, "live")


class Slow:
    """A request whose body comes later."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def begin(cls, url: str, line: str, who: str, size: int) -> Slow:
        address = URL(url)
        found = cls(*await asyncio.open_connection(address.host, address.port))
        head = (
            f"{line} HTTP/1.1\r\nHost: x\r\nAuthorization: {by(who)['Authorization']}\r\nContent-Length: {size}\r\n\r\n"
        )
        found._writer.write(head.encode())
        await found._writer.drain()
        async with aiohttp.ClientSession(url) as http, http.get("/healthz"):
            pass  # the head was read before this one
        return found

    async def status(self) -> int:
        line = await self._reader.readline()
        self._writer.close()
        return int(line.split()[1])

    async def end(self, body: bytes) -> int:
        self._writer.write(body)
        return await self.status()


# -- the middleware by itself


async def test_a_route_without_a_row_is_refused_whatever_the_key(tmp_path: Path) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(text="in")

    async with controlled(tmp_path) as (found, _):
        access = Access(KeyFile(key_file(tmp_path)), found.parts.live, found.parts.groups)
        app = web.Application(middlewares=[answer_errors, access.control({("GET", "/known"): STATUS})])
        app.router.add_get("/known", handler)
        app.router.add_get("/forgotten", handler)
        app.router.add_post("/known", handler)
        async with serving_app(app) as url, aiohttp.ClientSession(url) as http:
            client = Client(http)
            assert await client.expect(200, "admin", "GET", "/known") == "in"
            for method, path in (("GET", "/forgotten"), ("POST", "/known")):
                refused = await client.expect(403, "admin", method, path)
                assert f"no rule allows {method} {path}" in refused["error"]["message"]
                await client.expect(401, "", method, path)


async def test_without_keys_nothing_is_asked_for(tmp_path: Path) -> None:
    """And no middleware stands in a request's way."""
    async with ScriptedEngine("e0") as e0:
        found = await start(dataclasses.replace(config(tmp_path, e0), insecure=False))
        try:
            assert len(found.listener.runner.app.middlewares) == 2
            async with aiohttp.ClientSession(found.url) as http:
                await until(lambda: found.fleet.state.sorted_engines()[0].status == "serving", "a serving engine")
                client = Client(http)
                made = await session(client, "s", "")
                for key in ("", "anything", made["api_key"]):
                    await client.expect(200, key, "GET", "/status")
                await client.expect(200, made["api_key"], "POST", "/sessions/s/finish", FINISH)
        finally:
            await found.close(drain_timeout_s=1.0)
