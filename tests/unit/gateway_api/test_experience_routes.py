"""The trainer's door, opened with the SDK's own reader and with plain HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from gateway.experience import ExperienceBuffer
from gateway.sessions.trainer import Trainer
from gateway.store import Database
from protos.errors import NotFound
from protos.trajectories import Trajectory
from tests.support.experience import experience_app
from tests.support.turns import serving_app
from trainer_client import AsyncExperienceReader


def trajectory(name: str, version: int = 1) -> Trajectory:
    return Trajectory(
        session_id=name,
        group_id="g",
        sample_index=0,
        reward=1.0,
        status="completed",
        mixed=False,
        split="train",
        token_ids=[1, 2],
        logprobs=[0.0, -0.5],
        loss_mask=[0, 1],
        versions=[-1, version],
        turns=1,
        segments=[],
        started_unix_s=0.0,
        finished_unix_s=1.0,
    )


class Door:
    def __init__(self, buffer: ExperienceBuffer, trainer: Trainer) -> None:
        self.buffer, self.trainer = buffer, trainer
        self.url = ""


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    async with Database(None) as database, experience_app(database, staleness_max=3) as (app, stores, parts):
        door = Door(stores.buffer, parts.trainer)
        async with serving_app(app) as door.url:
            yield door


async def test_the_sdks_reader_samples_and_acknowledges(door: Door) -> None:
    for name in "abc":
        await door.buffer.add(trajectory(name))
    async with AsyncExperienceReader(door.url, trainer_version=2) as reader:
        batch = await reader.sample(trajectories=2, wait_s=0)
        assert [t.session_id for t in batch.trajectories] == ["a", "b"]
        assert batch.trajectories[0].logprobs == [0.0, -0.5]
        await reader.ack(batch)
        with pytest.raises(NotFound):
            await reader.ack(batch)
        assert len(await reader.sample(trajectories=9, wait_s=0)) == 1
        assert len(await reader.sample(trajectories=9, wait_s=0)) == 0
    assert (door.trainer.version, door.trainer.staleness.use) == (2, {1: 3})


async def test_who_asks_for_sessions_by_name_gets_them_and_declares_no_batch(door: Door) -> None:
    for name in "abc":
        await door.buffer.add(trajectory(name))
    async with AsyncExperienceReader(door.url, trainer_version=2) as reader:
        batch = await reader.sample(session_ids=["c", "b"], wait_s=30)
    assert [t.session_id for t in batch.trajectories] == ["b", "c"]
    assert (door.trainer.version, door.trainer.status().reader) == (2, None)


async def test_a_loop_that_is_left_gives_its_batch_back_for_the_next_reader(door: Door) -> None:
    for name in "abc":
        await door.buffer.add(trajectory(name))
    async with AsyncExperienceReader(door.url, reader="first") as first:
        batch = await anext(batches := first.batches(trajectories=2))
        await batches.aclose()
        with pytest.raises(NotFound, match="given back before"):
            await first.give_back(batch)
        with pytest.raises(NotFound):
            await first.ack(batch)
    async with AsyncExperienceReader(door.url, reader="second") as second:
        again = await second.sample(trajectories=3, wait_s=0)
        assert [t.session_id for t in again.trajectories] == ["a", "b", "c"], "in its old place"
        await second.ack(again)
    assert (door.buffer.statistics().acked, door.buffer.statistics().leased) == (3, 0)


async def test_the_strategy_decides_the_order(door: Door) -> None:
    for name in "abc":
        await door.buffer.add(trajectory(name))
    async with AsyncExperienceReader(door.url) as reader:
        newest = await reader.sample(trajectories=2, wait_s=0, strategy="newest")
        assert [t.session_id for t in newest.trajectories] == ["c", "b"]
        await reader.give_back(newest)
        [group] = (await reader.sample(groups=1, group_size=3, wait_s=0, strategy="complete_groups"),)
        assert [t.session_id for t in group.trajectories] == ["a", "b", "c"]


async def post(url: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body) as answer:
        return answer.status, json.loads(await answer.read())


async def test_json_for_who_does_not_ask_for_msgpack(door: Door) -> None:
    await door.buffer.add(trajectory("a"))
    status, body = await post(door.url, "/experience/sample", {"reader": "r", "trainer_version": 1, "trajectories": 1})
    assert status == 200
    assert body["trajectories"][0]["session_id"] == "a"
    assert (await post(door.url, "/experience/ack", {"lease_id": body["lease_id"]})) == (200, {"acknowledged": 1})


async def test_the_gateways_staleness_bound_holds_unless_the_reader_names_one(door: Door) -> None:
    await door.buffer.add(trajectory("old", version=1))
    await door.buffer.add(trajectory("new", version=9))
    sample = {"reader": "r", "trainer_version": 9, "trajectories": 2}
    _, body = await post(door.url, "/experience/sample", {**sample, "staleness_max": 8, "lease_s": 0.001})
    assert len(body["trajectories"]) == 2
    _, body = await post(door.url, "/experience/sample", {**sample, "trajectories": 1, "wait_s": 10})
    assert [t["session_id"] for t in body["trajectories"]] == ["new"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"trainer_version": 1, "trajectories": 1}, "reader"),
        ({"reader": "", "trainer_version": 1, "trajectories": 1}, "reader"),
        ({"reader": "r", "trajectories": 1}, "trainer_version"),
        ({"reader": "r", "trainer_version": 1, "trajectories": 0}, "trajectories"),
        ({"reader": "r", "trainer_version": 1, "groups": 1000, "group_size": 1000}, "groups"),
        ({"reader": "r", "trainer_version": 1, "trajectories": 1, "wait_s": 1e9}, "wait_s"),
        ({"reader": "r", "trainer_version": 1, "trajectories": 1, "drop_equal_rewards": True}, "drop_equal_rewards"),
        ({"reader": "r", "trainer_version": -1, "trajectories": 1}, "trainer_version"),
        ({"reader": "r", "trainer_version": 1, "trajectories": 1, "count": 3}, "count"),
        ({"reader": "r", "trainer_version": 1, "trajectories": 1, "strategy": "lifo"}, "strategy"),
        ({"reader": "r", "trainer_version": 1, "trajectories": 1, "strategy": "complete_groups"}, None),
        ({"reader": "r", "trainer_version": 1}, None),
    ],
)
async def test_bad_requests_are_named(door: Door, body: dict[str, Any], param: str | None) -> None:
    status, answer = await post(door.url, "/experience/sample", body)
    assert (status, answer["error"]["param"]) == (400, param)
