"""The SDK's reader against the gateway's own experience routes and buffer on disk."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from gateway.core.types import Version
from gateway.experience.buffer import ExperienceBuffer
from gateway.fleet.fleet import Fleet
from gateway.store.database import Database
from protos.errors import Conflict, InvalidRequest, NotFound
from tests.support.experience import experience_app
from tests.support.pages import blocks
from tests.support.trajectories import make_trajectory
from trainer_client import AsyncExperienceReader, Batch, ExperienceReader

GROUPS = [[make_trajectory(g, i, [1, 2], ([3, 4 + i], [5]), reward=i, version=2) for i in range(2)] for g in "abc"]


Served = tuple[ExperienceBuffer, web.Application, Fleet]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with (
        Database(tmp_path / "gateway.sqlite") as database,
        experience_app(database) as (app, stores, parts),
    ):
        yield stores.buffer, app, parts.fleet


@pytest.fixture
def buffer(served: Served) -> ExperienceBuffer:
    return served[0]


@pytest.fixture
async def url(served: Served) -> AsyncIterator[str]:
    runner = web.AppRunner(served[1])
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.fixture
async def reader(url: str) -> AsyncIterator[AsyncExperienceReader]:
    async with AsyncExperienceReader(url, trainer_version=3) as reader:
        yield reader


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


async def test_an_old_runs_experience_is_told_of_once(
    buffer: ExperienceBuffer, served: Served, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    await fill(buffer)
    served[2].state.newest = Version(3)
    async with AsyncExperienceReader(url, reader="resumed", trainer_version=3) as resumed:
        assert len(await resumed.sample(trajectories=1)) == 1
    async with AsyncExperienceReader(url, reader="loaded") as loaded:
        loaded.load_state_dict(resumed.state_dict() | {"reader": "loaded"})
        assert len(await loaded.sample(trajectories=1)) == 1
    assert "old run" not in caplog.text
    async with AsyncExperienceReader(url, reader="new") as new:
        assert [len(await new.sample(trajectories=1)) for _ in range(2)] == [1, 1]
    told = [record.message for record in caplog.records if "this run begins from its own weights" in record.message]
    assert len(told) == 1
    assert "there are versions to 3 of run unknown" in told[0]
    assert "the old run's experience is trained on as well" in told[0]
    assert told[0].endswith("pass on_old_run= ('continue', 'refuse', 'discard') to Publisher and ExperienceReader")


async def test_an_old_runs_experience_is_refused_or_left_out(
    buffer: ExperienceBuffer, served: Served, url: str
) -> None:
    await fill(buffer)
    served[2].state.newest = Version(2)
    async with AsyncExperienceReader(url, reader="a", on_old_run="refuse") as reader:
        for _ in range(2):
            with pytest.raises(Conflict, match=r"versions to 2 .*docs/experience.md has how to start over"):
                await reader.sample(trajectories=1)
    async with AsyncExperienceReader(url, reader="b", on_old_run="discard") as reader:
        with pytest.raises(InvalidRequest, match="publish this run's first weights"):
            await reader.sample(trajectories=1)
        assert buffer.statistics().leased == 0
        served[2].state.newest = Version(3)
        reader.trainer_version = 3
        assert not await reader.sample(trajectories=1, wait_s=0)
        assert buffer.statistics().trajectories == 0, "all of it is of the old run"
        await buffer.add(make_trajectory("late", 0, [1], ([2], []), version=2))
        await buffer.add(make_trajectory("own", 0, [1], ([2], []), version=3))
        batch = await reader.sample(trajectories=2, wait_s=0)
        assert [trajectory.session_id for trajectory in batch.trajectories] == ["own-0"]
        assert not await reader.sample(trajectories=1, wait_s=0)
        assert buffer.statistics().trajectories == 0, "what finished since is evicted where nothing else is there"
    with pytest.raises(InvalidRequest, match=r"on_old_run='stop'.*continue, refuse, discard"):
        AsyncExperienceReader(url, on_old_run="stop")  # type: ignore[arg-type]


@pytest.mark.slow
async def test_a_dataset_goes_on_from_a_checkpoint(buffer: ExperienceBuffer, url: str) -> None:
    from trainer_client.torch_dataset import ExperienceDataset  # a second of torch

    await fill(buffer)

    def train() -> tuple[list[int], list[int]]:
        died = iter(ExperienceDataset(url, trajectories=2, prefetch=0))  # an iterator that is never closed
        next(died)
        first = ExperienceDataset(url, trajectories=2, prefetch=0)
        items = iter(first)
        seen = [next(items).group_index.numel()]
        state = first.state_dict()
        again = ExperienceDataset(url, trajectories=9, prefetch=0, wait_s=0)
        again.load_state_dict(state)
        resumed = iter(again)
        left = [next(resumed).group_index.numel()]
        assert len(state["used"]) == 1
        del died
        return seen, left

    assert await asyncio.to_thread(train) == ([2], [4])
    assert buffer.statistics().acked == 2, "the batch that the state names"


class Stopped(Exception):
    """The training loops of the docs have no end."""


async def test_the_programs_of_the_docs(buffer: ExperienceBuffer, url: str) -> None:
    """docs/experience.md, with smaller groups, and more tokens that are too many."""
    for group in range(20):
        for index in range(2):
            await buffer.add(make_trajectory(f"g{group}", index, [1, 2], ([3], []), version=2))
    loop, late, evict, log = (
        block.replace("groups=8, group_size=8", "groups=1, group_size=2").replace("32_768", "2")
        for block in blocks("docs/experience.md", "python")
    )
    saved: list[dict[str, Any]] = []

    def run(program: str, steps: int) -> None:
        left = iter(range(steps))

        def train(_: Batch) -> None:
            if next(left, None) is None:
                raise Stopped

        with ExperienceReader(url) as reader:
            if saved:
                reader.resume(saved[-1]["reader"])
            model = SimpleNamespace(state_dict=dict)
            exec(
                program,
                {"reader": reader, "model": model, "train": train, "save": saved.append, "itertools": itertools},
            )

    with pytest.raises(Stopped):
        await asyncio.to_thread(run, loop, 1)
    assert (len(saved), buffer.statistics().acked) == (1, 2)
    with pytest.raises(Stopped):
        await asyncio.to_thread(run, late, 10)
    assert (len(saved[-1]["reader"]["used"]), buffer.statistics().acked) == (10, 22)
    await asyncio.to_thread(run, evict, 0)
    assert (buffer.statistics().evicted_by_readers, buffer.statistics().trajectories) == (18, 0)

    written: dict[str, float] = {}
    await buffer.add(make_trajectory("last", 0, [1], ([3], []), reward=0.5, version=2))

    def logs() -> dict[str, float]:
        with ExperienceReader(url, trainer_version=3) as reader:
            writer = SimpleNamespace(add_scalar=lambda name, value, step: written.update({name: value}))
            shown: list[dict[str, float]] = []
            wandb = SimpleNamespace(log=lambda scalars, step: shown.append(scalars))
            left: dict[str, Any] = {"reader": reader, "writer": writer, "wandb": wandb}
            exec(log, left)
            left["log"](1, reader.sample(trajectories=1))
        return shown[0]

    assert await asyncio.to_thread(logs) == written
    assert written["reward"] == 0.5
    assert written["laminar/staleness/use/mean"] > 0
    assert written["laminar/sampled/reward/max"] == 0.5
    assert all(type(value) is float for value in written.values())
