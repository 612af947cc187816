"""The SDK's reader against the gateway's own experience routes and buffer on disk."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from gateway.experience.buffer import ExperienceBuffer
from gateway.store.database import Database
from protos.errors import InvalidRequest, NotFound
from tests.support.experience import experience_app
from tests.support.trajectories import make_trajectory
from trainer_client import AsyncExperienceReader

GROUPS = [[make_trajectory(g, i, [1, 2], ([3, 4 + i], [5]), reward=i, version=2) for i in range(2)] for g in "abc"]


Served = tuple[ExperienceBuffer, web.Application]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with (
        Database(tmp_path / "gateway.sqlite") as database,
        experience_app(database) as (app, stores, _),
    ):
        yield stores.buffer, app


@pytest.fixture
def buffer(served: Served) -> ExperienceBuffer:
    return served[0]


@pytest.fixture
async def reader(served: Served) -> AsyncIterator[AsyncExperienceReader]:
    runner = web.AppRunner(served[1])
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with AsyncExperienceReader(f"http://127.0.0.1:{runner.addresses[0][1]}", trainer_version=3) as reader:
        yield reader
    await runner.cleanup()


async def fill(buffer: ExperienceBuffer) -> None:
    for trajectory in (trajectory for group in GROUPS for trajectory in group):
        await buffer.add(trajectory)


async def test_whole_groups_arrive_as_they_were_recorded(
    buffer: ExperienceBuffer, reader: AsyncExperienceReader
) -> None:
    await fill(buffer)
    batch = await reader.sample(groups=2, group_size=2, wait_s=5)
    assert batch.trajectories == (*GROUPS[0], *GROUPS[1])
    assert batch.pack().staleness(reader.trainer_version).tolist() == [1] * 8
    rest = await reader.sample(groups=2, group_size=2, wait_s=0)
    assert rest.trajectories == tuple(GROUPS[2])
    await reader.ack(batch)
    with pytest.raises(NotFound, match=batch.lease_id):
        await reader.ack(batch)
    assert (buffer.statistics().acked, buffer.statistics().leased) == (4, 2)


async def test_a_batch_that_is_left_unacknowledged_comes_again(
    buffer: ExperienceBuffer, reader: AsyncExperienceReader
) -> None:
    await fill(buffer)
    batches = reader.batches(trajectories=6, wait_s=5, lease_s=0.05)
    first = await anext(batches)
    await batches.aclose()  # as a trainer does that fails in its step
    again = await reader.sample(trajectories=6, wait_s=10)
    assert again.trajectories == first.trajectories
    assert again.lease_id != first.lease_id


async def test_too_stale_experience_is_not_handed_out(buffer: ExperienceBuffer, reader: AsyncExperienceReader) -> None:
    await fill(buffer)
    batch = await reader.sample(trajectories=6, wait_s=0, staleness_max=0)
    assert len(batch) == 0
    assert batch.pack().num_tokens == 0


async def test_what_the_gateway_refuses_is_said_in_its_words(reader: AsyncExperienceReader) -> None:
    with pytest.raises(InvalidRequest, match="group_size"):
        await reader.sample(groups=2)
