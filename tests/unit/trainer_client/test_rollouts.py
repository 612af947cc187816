"""Sessions that a trainer drives itself, through a real gateway: finished, played again, given up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from protos.errors import InvalidRequest, Unavailable
from tests.support.ports import KeptPorts
from tests.support.scripted_engine import MODEL, ScriptedEngine
from tests.support.trajectories import make_trajectory
from tests.unit.gateway_api.test_status import gateway
from trainer_client import AsyncExperienceReader
from trainer_client.integrations.rollouts import Planned, RolloutFailed, Rollouts, single_turn
from trainer_client.integrations.rows import one_row_each
from trainer_client.rewards import name_of
from trainer_client.sessions import Outcome, Session, Sessions, Stopped

SAMPLING = {"max_tokens": 2, "temperature": 1.0}


@dataclass
class Scene:
    url: str
    client: Sessions

    async def play(self, agent: Any, *planned: Planned, attempts: int = 3) -> list[str]:
        rollouts = Rollouts(self.client, agent, concurrency=2, attempts=attempts)
        try:
            return await asyncio.to_thread(rollouts.play, planned, SAMPLING)
        finally:
            await asyncio.to_thread(rollouts.close)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (found, _):
        client = Sessions(found.url, MODEL)
        yield Scene(found.url, client)
        client.close()


@pytest.fixture
def port() -> Iterator[int]:
    """Nobody listens there."""
    kept = KeptPorts()
    yield kept.of("nobody")
    kept.close()


def one_call(session: Session, task: Mapping[str, Any]) -> float:
    session.complete(task["prompt"])
    return float(task["reward"])


def planned(reward: float, **fields: Any) -> Planned:
    return Planned({"prompt": [5], "reward": reward}, fields)


async def test_each_session_comes_back_by_its_name_in_the_order_of_the_plan(scene: Scene) -> None:
    names = await scene.play(one_call, *(planned(n, group_id="g", sample_index=n, group_size=4) for n in range(4)))
    async with AsyncExperienceReader(scene.url) as reader:
        batch = await reader.sample(session_ids=names, wait_s=30)
    rows = one_row_each(names, batch.trajectories)
    assert [row.reward for row in rows] == [0.0, 1.0, 2.0, 3.0]
    assert {row.group_id for row in rows} == {"g"}
    assert all(sum(row.mask) == 2 and row.token_ids[: row.begin] == [5] for row in rows)


async def test_a_reward_that_the_trainer_computes_is_marked(scene: Scene) -> None:
    names = await scene.play(lambda session, task: Outcome(session.complete([5]) and None), planned(0))
    async with AsyncExperienceReader(scene.url) as reader:
        [found] = (await reader.sample(session_ids=names, wait_s=30)).trajectories
    assert (found.reward, found.metrics) == (0.0, {"rewarded_by_trainer": 1.0})
    assert one_row_each(names, [found])[0].reward is None


async def test_a_session_whose_agent_fails_is_abandoned_and_played_again(scene: Scene) -> None:
    tries: list[str] = []

    def fails_first(session: Session, task: Mapping[str, Any]) -> float:
        tries.append(session.session_id)
        session.complete([5])
        if len(tries) == 1:
            raise ValueError("the tool is away")
        return 1.0

    names = await scene.play(fails_first, planned(1))
    assert names == tries[1:]
    async with AsyncExperienceReader(scene.url) as reader:
        assert [t.session_id for t in (await reader.sample(trajectories=9, wait_s=0)).trajectories] == names


async def test_one_that_fails_every_time_is_named_with_its_cause(scene: Scene) -> None:
    def fails(session: Session, task: Mapping[str, Any]) -> float:
        raise ValueError("the tool is away")

    with pytest.raises(RolloutFailed, match=r"2 times.*the tool is away"):
        await scene.play(fails, planned(1), attempts=2)
    async with AsyncExperienceReader(scene.url) as reader:
        assert len(await reader.sample(trajectories=9, wait_s=0)) == 0


@pytest.mark.parametrize("reward", [True, np.True_, np.float32(1)])
async def test_whatever_stands_for_a_number_is_a_reward(scene: Scene, reward: Any) -> None:
    def scored(session: Session, task: Mapping[str, Any]) -> Outcome:
        session.complete([5])
        return Outcome(reward, {"speed": np.float32(0.5), "right": np.True_})

    names = await scene.play(scored, planned(0), attempts=1)
    async with AsyncExperienceReader(scene.url) as reader:
        [found] = (await reader.sample(session_ids=names, wait_s=30)).trajectories
    assert (found.reward, found.metrics) == (1.0, {"speed": 0.5, "right": 1.0})


def divides_by_nothing(session: Session, task: Mapping[str, Any]) -> float:
    session.complete([5])
    return float("nan")


async def test_an_agent_without_a_finite_reward_is_named_and_its_sessions_are_abandoned(scene: Scene) -> None:
    with pytest.raises(RolloutFailed, match=r"2 times.*agent .*\.divides_by_nothing gave nan as the reward"):
        await scene.play(divides_by_nothing, planned(0), attempts=2)
    assert "divides_by_nothing" in name_of(single_turn(divides_by_nothing))  # type: ignore[arg-type]
    async with httpx.AsyncClient() as http:
        assert (await http.get(f"{scene.url}/status")).json()["sessions"]["live"] == 0


async def test_what_the_gateway_refuses_is_not_sent_again(scene: Scene) -> None:
    tries: list[str] = []

    def refused(session: Session, task: Mapping[str, Any]) -> float:
        tries.append(session.session_id)
        session.complete([5], temperature=-1)
        return 1.0

    with pytest.raises(InvalidRequest, match="temperature"):
        await scene.play(refused, planned(1))
    assert len(tries) == 1


async def test_a_gateway_that_is_away_is_waited_for_and_then_named(port: int) -> None:
    client = Sessions(f"http://127.0.0.1:{port}", MODEL, patience_s=0.3)
    with pytest.raises(Unavailable, match=f"127.0.0.1:{port}.*gateway serve"):
        await asyncio.to_thread(client.open)
    client.close()


async def test_stop_ends_a_wait(port: int) -> None:
    client = Sessions(f"http://127.0.0.1:{port}", MODEL, patience_s=3600.0)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            client.open()
        except Stopped as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    client.stop.set()
    await asyncio.to_thread(waiting.join, 60.0)
    assert len(raised) == 1
    client.close()


def test_a_session_with_branches_or_none_is_refused_by_name() -> None:
    whole = make_trajectory("a", 0, [5], ([6, 7], []))
    with pytest.raises(InvalidRequest, match="a-0 has 2 branches"):
        one_row_each(["a-0"], [msgspec.structs.replace(whole, leaves=2)])
    with pytest.raises(InvalidRequest, match="no sampled token"):
        one_row_each(["a-0"], [msgspec.structs.replace(whole, loss_mask=[0] * len(whole.loss_mask))])
    with pytest.raises(Unavailable, match=r"1 of 2 finished sessions.* b"):
        one_row_each(["a-0", "b"], [whole])
