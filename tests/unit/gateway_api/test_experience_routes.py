"""The trainer's door, opened with the SDK's own reader and with plain HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest

from gateway.core.types import Version
from gateway.experience import ExperienceBuffer
from gateway.fleet.fleet import Fleet
from gateway.sessions.trainer import Trainer
from gateway.store import Database
from protos import packed
from protos.errors import InvalidRequest, NotFound
from protos.trajectories import Trajectory
from tests.support.experience import experience_app
from tests.support.turns import serving_app
from tests.unit.gateway_store.disk import until
from trainer_client import AsyncExperienceReader, Evicted, Offer, Packed
from trainer_client.batches import ACCEPTED, batch_of


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
    def __init__(self, buffer: ExperienceBuffer, trainer: Trainer, fleet: Fleet) -> None:
        self.buffer, self.trainer, self.fleet = buffer, trainer, fleet
        self.url = ""


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    async with Database(None) as database, experience_app(database, staleness_max=3) as (app, stores, parts):
        door = Door(stores.buffer, parts.trainer, parts.fleet)
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


async def test_a_function_of_the_trainers_own_picks_of_the_rows_that_wait(door: Door) -> None:
    for name, version in (("a", 1), ("b", 3), ("c", 2)):
        await door.buffer.add(trajectory(name, version))

    def freshest(rows: Sequence[Offer]) -> list[str]:
        return [max(rows, key=lambda row: row.facts.oldest_version).session_id] if rows else []

    async with AsyncExperienceReader(door.url, trainer_version=3) as reader:
        batch = await reader.sample(strategy=freshest, wait_s=0)
        assert [t.session_id for t in batch.trajectories] == ["b"]
        assert [row.session_id for row in await reader.rows()] == ["a", "c"], "what is leased does not wait"
        await reader.ack(batch)
        assert not await reader.sample(strategy=lambda rows: [], wait_s=0)
        with pytest.raises(InvalidRequest, match="one of"):
            await reader.sample(strategy=freshest, trajectories=2)


async def test_rows_come_in_pieces(door: Door) -> None:
    for name in "abc":
        await door.buffer.add(trajectory(name))
    async with aiohttp.ClientSession() as session:
        async with session.get(door.url + "/experience/rows?limit=2") as answer:
            first = await answer.json()
        async with session.get(f"{door.url}/experience/rows?limit=2&after={first['next_after']}") as answer:
            rest = await answer.json()
        async with session.get(door.url + "/experience/rows?limit=x") as answer:
            assert (answer.status, (await answer.json())["error"]["param"]) == (400, "limit")
    assert [row["session_id"] for row in first["rows"] + rest["rows"]] == ["a", "b", "c"]
    assert (rest["next_after"], first["rows"][0]["facts"]["versions"]) == (None, {"1": 1})


async def test_statistics_are_of_what_was_sampled(door: Door) -> None:
    for name, version in (("a", 1), ("b", 2), ("c", 2)):
        await door.buffer.add(trajectory(name, version))
    async with AsyncExperienceReader(door.url, trainer_version=3) as reader:
        await reader.sample(trajectories=2, wait_s=0)
        found = await reader.statistics()
    assert found.staleness.use == {1: 1, 2: 1}
    assert (found.sampled.tokens.count, found.sampled.tokens.mean, found.sampled.reward.max) == (2, 2.0, 1.0)
    assert found.sampled.waited_s.min > 0
    assert (found.buffer["trajectories"], found.buffer["leased"]) == (1, 2)


async def test_tokens_beyond_the_bound_are_masked_one_by_one(door: Door) -> None:
    mixed = msgspec.structs.replace(
        trajectory("mixed"), token_ids=[1, 2, 3], logprobs=[0.0, -1.0, -1.0], loss_mask=[0, 1, 1], versions=[-1, 1, 5]
    )
    await door.buffer.add(mixed)
    await door.buffer.add(trajectory("old", version=1))
    async with AsyncExperienceReader(door.url, trainer_version=6) as reader:
        batch = await reader.sample(strategy="staleness_bounded", staleness_max=2, trajectories=9, wait_s=0)
        assert [head.session_id for head in batch.heads] == ["mixed"]
        assert batch.pack().loss_mask.tolist() == [False, False, True]
        with pytest.raises(InvalidRequest, match="staleness_max"):
            await reader.sample(strategy="staleness_bounded", trajectories=1)
    assert door.buffer.statistics().trajectories == 1, "what is too stale for this reader stays"


async def test_a_peek_takes_no_lease_and_declares_no_batch(door: Door) -> None:
    for name, version in (("a", 1), ("b", 2)):
        await door.buffer.add(trajectory(name, version))
    door.fleet.state.newest = Version(5)
    async with AsyncExperienceReader(door.url, trainer_version=5) as reader:
        seen = await reader.peek(trajectories=9)
        assert [head.session_id for head in seen.heads] == ["b"], "the gateway's bound is 3"
        assert len(await reader.peek(session_ids=["a", "b"], staleness_max=9)) == 2
        with pytest.raises(InvalidRequest, match="has no lease"):
            await reader.ack(seen)
        with pytest.raises(InvalidRequest, match="peek takes no `wait_s`"):
            await reader.peek(trajectories=1, wait_s=1)
        assert (await reader.peek(groups=1, group_size=2)).why.startswith("1 too stale")
        assert door.buffer.statistics().leased == door.buffer.statistics().evicted_stale == 0
        assert door.trainer.status().reader is None
    status, answer = await post(door.url, "/experience/peek", {"groups": 200, "group_size": 2})
    assert (status, answer["error"]["param"]) == (400, "groups")


async def test_a_second_reader_with_a_wrong_version_costs_nobody_else_anything(door: Door) -> None:
    """No relay answers, so nothing can be said against it."""
    for number in range(80):
        await door.buffer.add(trajectory(f"s{number}", version=13))
    wanted: dict[str, Any] = {"trajectories": 8, "wait_s": 0.01}
    async with (
        AsyncExperienceReader(door.url, reader="trainer", trainer_version=13) as trainer,
        AsyncExperienceReader(door.url, reader="second", trainer_version=24) as second,
    ):
        await trainer.give_back(await trainer.sample(**wanted))
        before, admission = door.buffer.statistics(), dataclasses.replace(door.trainer.status(), notes={})
        nothing = await second.sample(**wanted)
        assert not nothing
        assert nothing.why == "80 too stale, the newest is 13 and you say 24"
        told = door.trainer.status()
        assert dataclasses.replace(told, notes={}) == admission
        assert "80 too stale" in told.notes["second"]
        assert "which no relay announced" in told.notes["second"]
        assert (door.buffer.statistics(), door.trainer.version) == (before, 13)
        batch = await trainer.sample(**wanted)
        assert door.trainer.version == 13, "whoever asked last"
        assert [head.session_id for head in batch.heads] == [f"s{number}" for number in range(8)]
        second.trainer_version = 13
        assert len(await second.sample(**wanted)) == 8
    assert "80 too stale" not in door.trainer.status().notes["second"]


async def test_a_trainer_of_a_registry_that_is_refused_is_told(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go on for ever, and no engine would load what it publishes."""
    await door.buffer.add(trajectory("a", version=5))
    door.fleet.state.newest = Version(5)
    why = "the registry was replaced (go on with this one by `paramserver adopt ...`)"
    relays = ["relay:7070", "another:7070"]
    monkeypatch.setattr(door.fleet.relays, "refused", lambda: {"relay:7070": why})
    monkeypatch.setattr(door.fleet.relays, "addresses", lambda: relays)
    sample: dict[str, Any] = {"reader": "r", "trajectories": 1, "wait_s": 0}
    for version in (4, 6):
        status, body = await post(door.url, "/experience/sample", {**sample, "trainer_version": version})
        assert status == 200, "the relay that is believed is away for a moment"
        await post(door.url, "/experience/release", {"lease_id": body["lease_id"]})
    del relays[1]
    for version in (1, 6):
        status, body = await post(door.url, "/experience/sample", {**sample, "trainer_version": version})
        assert (status, body["error"]["code"]) == (409, "version_unknown")
        assert f"version {version} is not known here, where the newest is 5: versions of" in body["error"]["message"]
        assert why in body["error"]["message"]
        assert why in door.trainer.status().notes["r"]
    for version in (0, 5):  # one that has published nothing, and one of the registry that is believed
        status, _ = await post(door.url, "/experience/sample", {**sample, "trainer_version": version})
        assert status == 200


async def test_what_may_be_used_again_is_used_once_by_all_others(door: Door) -> None:
    for name in "ab":
        await door.buffer.add(trajectory(name))
    async with AsyncExperienceReader(door.url) as reader:
        used = []
        for _ in range(4):
            batch = await reader.sample(trajectories=1, wait_s=0, uses_max=2)
            used += [head.session_id for head in batch.heads]
            await reader.ack(batch)
        assert used == ["a", "b", "a", "b"]
        assert not await reader.sample(trajectories=1, wait_s=0, uses_max=2)
    assert door.buffer.statistics().acked == 4


async def test_ranks_share_a_batch_without_overlap_each_a_whole_share(door: Door) -> None:
    for name in "abcde":
        await door.buffer.add(trajectory(name))
    async with (
        AsyncExperienceReader(door.url, rank=0, num_ranks=2) as one,
        AsyncExperienceReader(door.url, rank=1, num_ranks=2) as other,
    ):
        shares = await asyncio.gather(*(rank.sample(trajectories=4, wait_s=30) for rank in (one, other)))
        assert [len(share) for share in shares] == [2, 2]
        assert sorted(head.session_id for share in shares for head in share.heads) == ["a", "b", "c", "d"]
        assert door.trainer.status().batch == 4, "the whole batch bounds admission"
        assert not await one.sample(trajectories=4, wait_s=0), "one is left: no share"
        with pytest.raises(InvalidRequest, match="5 trajectories cannot be shared by 2 ranks"):
            await one.sample(trajectories=5)
    with pytest.raises(InvalidRequest, match="rank 2 of 2"):
        AsyncExperienceReader(door.url, rank=2, num_ranks=2)


async def test_the_share_of_a_rank_that_died_comes_back_to_the_rank_that_took_its_place(door: Door) -> None:
    for name in "abcd":
        await door.buffer.add(trajectory(name))
    async with AsyncExperienceReader(door.url, rank=1, num_ranks=2) as died:
        lost = await died.sample(trajectories=4, wait_s=0)
    async with (
        AsyncExperienceReader(door.url, rank=0, num_ranks=2) as one,
        AsyncExperienceReader(door.url, rank=1, num_ranks=2) as other,
    ):
        share = await one.sample(trajectories=4, wait_s=0)
        assert not await other.sample(trajectories=4, wait_s=0)
        assert await other.resume() == 2
        assert (await other.sample(trajectories=4, wait_s=0)).heads == lost.heads
        await one.ack(share)
        with pytest.raises(InvalidRequest, match=r"rank 0 of 2.*rows\(\)"):
            await one.sample(strategy=lambda _: [], wait_s=30)
        with pytest.raises(NotFound):
            await one.ack(lost)  # as a rank that was taken for dead, and goes on


async def test_a_function_of_the_trainers_own_evicts(door: Door) -> None:
    for name, version in ("a", 1), ("b", 2), ("c", 2):
        await door.buffer.add(trajectory(name, version))
    async with AsyncExperienceReader(door.url) as reader:
        held = await reader.sample(trajectories=1, wait_s=0)
        await reader.give_back(held)

        def of_old_versions(rows: Sequence[Offer]) -> list[str]:
            return [row.session_id for row in rows if row.facts.oldest_version < 2]

        assert await reader.evict(of_old_versions) == Evicted(1, 0, 0)
        assert await reader.evict(of_old_versions) == Evicted()
        assert await reader.evict(lambda _: ["a", "b", "b"]) == Evicted(1, 0, 1)
        assert [row.session_id for row in await reader.rows()] == ["c"]
        assert (await reader.statistics()).buffer["evicted_by_readers"] == 2


async def test_a_reader_that_leaves_in_the_middle_of_its_batch_has_no_lease(door: Door) -> None:
    logprobs = np.random.default_rng(0).standard_normal(1 << 20).tolist()  # 8 MB: more than sockets hold
    long = msgspec.structs.replace(
        trajectory("a"), token_ids=[1] * len(logprobs), logprobs=logprobs, loss_mask=[1], versions=[1]
    )
    await door.buffer.add(long)
    body = json.dumps({"reader": "t", "trainer_version": 1, "trajectories": 1}).encode()
    head = f"POST /experience/sample HTTP/1.1\r\nHost: x\r\nAccept: {ACCEPTED}\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(*door.url.removeprefix("http://").split(":"))
    writer.write(head.encode() + body)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    assert door.buffer.statistics().leased == 1
    writer.transport.abort()
    await until(lambda: door.buffer.statistics().leased == 0, "its lease given back")
    assert door.buffer.statistics().trajectories == 1


async def test_packed_rows_and_msgpack_are_the_same_batch(door: Door) -> None:
    await door.buffer.add(trajectory("a"), msgspec.structs.replace(trajectory("a", 2), leaf=1))
    body = {"reader": "r", "trainer_version": 2, "trajectories": 1, "lease_s": 0.001}
    found = []
    for accept in (ACCEPTED, "application/msgpack"):
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                door.url + "/experience/sample", json={**body, "wait_s": 30}, headers={"Accept": accept}
            ) as answer,
        ):
            assert answer.content_type == accept.partition(",")[0]
            found.append(batch_of(await answer.read()))
    one, other = found
    assert one.trajectories == other.trajectories == tuple(packed.unpack(packed.pack(one.trajectories)))
    for field in dataclasses.fields(Packed):
        assert np.array_equal(getattr(one.pack(), field.name), getattr(other.pack(), field.name)), field.name


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
