"""What is recorded of a session, as the gateway shows it and as `agents-env inspect` prints it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from click.testing import CliRunner, Result

from agents_env.cli import main
from gateway.api.records import spans_of
from gateway.app import start
from tests.support.scripted_engine import ScriptedEngine, scripted, until
from tests.support.trajectories import make_trajectory
from tests.unit.gateway_api.test_status import config


@dataclass
class Place:
    url: str
    http: aiohttp.ClientSession

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        async with self.http.request(method, path, json=body) as answer:
            return {"status": answer.status, **await answer.json()}

    async def turn(self, session: str, prompt: list[int]) -> list[int]:
        body = {"model": "policy", "prompt": prompt, "max_tokens": 3, "return_token_ids": True}
        answer = await self.call("post", f"/sessions/{session}/v1/completions", body)
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    async with ScriptedEngine("e0") as e0, contextlib.AsyncExitStack() as stack:
        found = await start(config(tmp_path, e0))
        stack.push_async_callback(found.close, drain_timeout_s=0.1)
        http = await stack.enter_async_context(aiohttp.ClientSession(found.url))
        await until(lambda: found.fleet.state.sorted_engines()[0].status == "serving", "a serving engine")
        yield Place(found.url, http)


async def test_a_session_is_shown_while_it_lives_and_until_a_trainer_has_used_it(place: Place) -> None:
    path = "/sessions/s1/trajectories"
    await place.call("post", "/sessions", {"session_id": "s1", "tags": {"task_id": "t"}})
    assert (await place.call("get", path))["trajectories"] == []
    first = await place.turn("s1", [5, 6])
    second = await place.turn("s1", [5, 6, *first, 7])
    assert first == scripted([5, 6], 3)[0]
    live = await place.call("get", f"{path}?tokens=true")
    [recorded] = live["trajectories"]
    ids = [5, 6, *first, 7, *second]
    assert (live["state"], recorded["trajectory"]["token_ids"]) == ("live", ids)
    assert [(s["turn"], s["sampled"], s["start"], s["end"]) for s in recorded["spans"]] == [
        (0, False, 0, 2),
        (0, True, 2, 5),
        (1, False, 5, 6),
        (1, True, 6, 9),
    ]
    assert len(recorded["tokens"]) == 9
    assert "".join(recorded["tokens"]).split() == " ".join(span["text"] for span in recorded["spans"]).split()
    await place.call("post", "/sessions/s1/finish", {"reward": 0.5})
    finished = await place.call("get", path)
    assert (finished["state"], finished["trajectories"][0]["trajectory"]["reward"]) == ("finished", 0.5)
    assert finished["trajectories"][0]["tokens"] == []
    reader = {"reader": "r", "trainer_version": 0, "trajectories": 1}
    lease = await place.call("post", "/experience/sample", reader)
    assert (await place.call("get", path))["status"] == 200  # leased, not used
    await place.call("post", "/experience/ack", {"lease_id": lease["lease_id"]})
    gone = await place.call("get", path)
    assert (gone["status"], gone["error"]["code"]) == (404, "not_found")
    assert "a trainer has used it" in gone["error"]["message"]


async def test_a_session_that_is_not_there_or_was_abandoned_is_named(place: Place) -> None:
    assert (await place.call("get", "/sessions/none/trajectories"))["status"] == 404
    await place.call("post", "/sessions", {"session_id": "s2"})
    await place.call("post", "/sessions/s2/abandon", {})
    assert (await place.call("get", "/sessions/s2/trajectories"))["status"] == 409
    assert (await place.call("get", "/sessions/s2/trajectories?tokens=1"))["status"] == 400


async def test_inspect_prints_turns_and_tokens(place: Place) -> None:
    await place.call("post", "/sessions", {"session_id": "s1", "group_id": "g", "tags": {"task_id": "t"}})
    first = await place.turn("s1", [5, 6])
    await place.call("post", "/sessions/s1/finish", {"reward": 0.5})

    def inspect(*options: str) -> Result:
        return CliRunner().invoke(main, ["inspect", *options, "--gateway", place.url])

    shown = (await asyncio.to_thread(inspect, "s1")).output
    assert "session s1: finished, 1 trajectories" in shown
    assert "trajectory 1 of 1: group g, sample 0, reward 0.5, completed, 1 turns, 5 tokens, 3 trained on" in shown
    assert "tags: task_id=t" in shown
    assert "turn 1, prompt, tokens 0 to 1\n  | " in shown
    assert "turn 1, sampled, tokens 2 to 4: version 0 on e0" in shown
    tokens = (await asyncio.to_thread(inspect, "s1", "--tokens")).output
    rows = [line.split() for line in tokens.splitlines() if line.startswith("  ") and line.split()[0].isdigit()]
    assert [(int(row[0]), int(row[1])) for row in rows] == list(enumerate([5, 6, *first]))
    assert [row[4] for row in rows[2:]] == ["yes"] * 3
    missing = await asyncio.to_thread(inspect, "none")
    assert missing.exit_code == 1


def test_spans_have_every_token_once() -> None:
    trajectory = make_trajectory("g", 0, [1, 2], ([3, 4], [5]), ([6], []))
    spans = list(spans_of(trajectory))
    assert [at for _, _, start, end in spans for at in range(start, end)] == list(range(len(trajectory.token_ids)))
    assert [sampled for _, sampled, _, _ in spans] == [False, True, False, True]
    later = [msgspec.structs.replace(segment, turn=segment.turn + 3) for segment in trajectory.segments]
    assert list(spans_of(msgspec.structs.replace(trajectory, segments=later))) == spans
    assert [turn for turn, _, _, _ in spans] == [0, 0, 1, 1]
