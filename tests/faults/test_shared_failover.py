"""The primary of a shared store dies, or is left behind, while gateways finish, sample and lease: what was answered is
there, and nothing is there twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gateway.core.tasks import NewTask
from gateway.experience import ExperienceBuffer
from gateway.experience import shared as shared_experience
from gateway.experience.shared import shared_store
from gateway.experience.stores import Undelivered
from gateway.log.replicated import shared
from gateway.store import Database
from gateway.tasks import PromptPool
from protos.errors import Conflict, LaminarError, NotFound, Unavailable
from tests.support.shared_stores import connect_to
from tests.support.standby_pairs import Pair
from tests.unit.gateway_store.disk import until
from tests.unit.gateway_store.test_experience import names, sample, trajectory

pytestmark = pytest.mark.slow

WAIT_S = 120.0


class Scene:
    """Two gateways over one pair."""

    def __init__(self, buffers: list[ExperienceBuffer], pools: list[PromptPool]) -> None:
        self.buffers, self.pools = buffers, pools
        self.added: list[str] = []

    async def add(self, name: str) -> None:
        """Finishes a session, as an agent that asks again until it is told that it landed."""
        buffer = self.buffers[len(self.added) % 2]
        self.added.append(name)
        with contextlib.suppress(Undelivered):
            await buffer.add(trajectory(name))
            return None
        async with asyncio.timeout(WAIT_S):
            while True:
                with contextlib.suppress(Undelivered):
                    return await buffer.delivered(name)

    async def lease(self) -> None:
        """A reader that gets no answer, or does not live to use it."""
        with contextlib.suppress(LaminarError):
            await sample(self.buffers[0], "dies", trajectories=2, trainer_version=1, lease_s=2.0)

    async def used(self) -> Counter[str]:
        """What a reader gets and uses of all that was added, each as often as it does."""
        found: Counter[str] = Counter()
        async with asyncio.timeout(WAIT_S):
            while set(found) < set(self.added):
                with contextlib.suppress(Unavailable):
                    lease, got = await sample(self.buffers[1], "t", trajectories=100, trainer_version=1, wait_s=0.5)
                    if lease:
                        await self._ack(lease)
                        found.update(names((lease, got)))
        lease, got = await sample(self.buffers[1], "t", trajectories=100, trainer_version=1)
        found.update(names((lease, got)))
        return found

    async def _ack(self, lease: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while True:
                with contextlib.suppress(Unavailable):
                    await self.buffers[0].ack(lease)
                    return


@pytest.fixture
async def scene(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    monkeypatch.setattr(shared_experience, "DELIVERY_WAIT_S", 0.5)
    async with AsyncExitStack() as stack:
        buffers, pools = [], []
        for name in "ab":
            database = await stack.enter_async_context(Database(tmp_path / name))
            store = await connect_to(stack, pair.url, "n")
            buffers.append(ExperienceBuffer(database, store=shared_store(database, store)))
            replica = await stack.enter_async_context(Database(None))
            pools.append(PromptPool(replica, order=shared(store, "tasks")))
            for part in (buffers[-1], pools[-1]):
                await part.open()
                stack.push_async_callback(part.close)
        yield Scene(buffers, pools)


async def restart(pair: Pair) -> None:
    pair.kill_primary()
    await pair.restart()


async def fail_over(pair: Pair) -> None:
    pair.kill_primary()
    await pair.promote()


async def fail_over_beside_the_old_one(pair: Pair) -> None:
    await pair.promote()
    await pair.leave_behind()


@pytest.mark.parametrize("event", [restart, fail_over, fail_over_beside_the_old_one])
async def test_what_was_answered_is_there_once_and_what_was_in_flight_too(
    event: object, pair: Pair, scene: Scene
) -> None:
    for number in range(6):
        await scene.add(f"before-{number}")
    await scene.pools[0].add("p", [NewTask(f"t{number}", b"{}") for number in range(4)])
    [held] = (await scene.pools[0].lease("p", "r")).leases
    in_flight = [asyncio.create_task(scene.add(f"during-{number}")) for number in range(6)]
    in_flight.append(asyncio.create_task(scene.lease()))
    await asyncio.sleep(0)
    await event(pair)  # type: ignore[operator]
    await asyncio.wait_for(asyncio.gather(*in_flight), WAIT_S)
    await scene.add("after")
    found = await scene.used()
    assert (sorted(found), set(found.values())) == (sorted(scene.added), {1})
    await finish(scene.pools[1], held.lease_id)
    left = [(await scene.pools[1].lease("p", "r", wait_s=30)).leases[0].task_id for _ in range(3)]
    assert sorted([held.task_id, *left]) == [f"t{number}" for number in range(4)]


async def finish(pool: PromptPool, lease_id: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            with contextlib.suppress(Unavailable):
                await pool.finish(lease_id, 1.0)
                return


@pytest.mark.parametrize("pair", ["redis", "postgresql"], indirect=True)  # a sentinel promotes none that stood still
async def test_what_no_standby_has_is_not_answered_and_is_sent_again_to_the_new_primary(
    pair: Pair, scene: Scene
) -> None:
    """The primary dies between its own write and the replication of it."""
    await scene.add("before")
    [one, other] = scene.buffers
    await sample(one, "none", session_ids=["no"], trainer_version=1)
    pair.stop_standby()
    with pytest.raises(Undelivered):
        await one.add(trajectory("unconfirmed"))
    scene.added.append("unconfirmed")
    assert one.delivery().waiting == 1  # type: ignore[union-attr]
    pair.kill_primary()
    pair.go_standby()
    await pair.promote()
    await until(lambda: not one.delivery().waiting, "it has landed")  # type: ignore[union-attr]
    with pytest.raises((Conflict, NotFound)):
        await one.add(trajectory("unconfirmed"))
    found = await scene.used()
    assert (sorted(found), set(found.values())) == (["before", "unconfirmed"], {1})
    assert len(other._state) == 0
