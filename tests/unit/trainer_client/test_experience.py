"""Reading experience from a real HTTP server that answers as the gateway does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp import web

from protos.errors import InvalidRequest, LaminarError, NotFound, OutOfCapacity, Unavailable
from tests.support.experience_server import ExperienceServer, error_response
from tests.support.trajectories import make_trajectory
from trainer_client import AsyncExperienceReader, ExperienceReader

TRAJECTORIES = [make_trajectory(f"g{i // 2}", i % 2, [1, 2], ([3, 4 + i], []), reward=i % 2) for i in range(6)]


@pytest.fixture
async def gateway() -> AsyncIterator[ExperienceServer]:
    async with ExperienceServer(TRAJECTORIES).running() as server:
        yield server


@pytest.fixture
async def reader(gateway: ExperienceServer) -> AsyncIterator[AsyncExperienceReader]:
    async with AsyncExperienceReader(gateway.url, reader="me", trainer_version=7) as reader:
        yield reader


async def test_a_sample_is_what_was_asked_for(gateway: ExperienceServer, reader: AsyncExperienceReader) -> None:
    batch = await reader.sample(groups=1, group_size=2, wait_s=0.5, staleness_max=3, lease_s=60)
    assert batch.trajectories == tuple(TRAJECTORIES[:2])
    assert len(batch) == 2
    assert batch.pack().rewards.tolist() == [0.0, 1.0]
    reader.trainer_version = 8
    await reader.sample(trajectories=1)
    assert gateway.requests == [
        {
            "reader": "me",
            "trainer_version": 7,
            "groups": 1,
            "group_size": 2,
            "wait_s": 0.5,
            "staleness_max": 3,
            "lease_s": 60,
        },
        {"reader": "me", "trainer_version": 8, "trajectories": 1, "wait_s": 30.0, "lease_s": 600.0},
    ]


async def test_a_batch_is_acknowledged_once(gateway: ExperienceServer, reader: AsyncExperienceReader) -> None:
    batch = await reader.sample(trajectories=2)
    await reader.ack(batch)
    assert gateway.acknowledged == [batch.lease_id]
    with pytest.raises(NotFound, match="no lease lease-1"):
        await reader.ack(batch)


async def test_batches_are_acknowledged_when_the_loop_comes_back(
    gateway: ExperienceServer, reader: AsyncExperienceReader
) -> None:
    seen = []
    async for batch in reader.batches(trajectories=4, wait_s=0.1):
        assert batch.lease_id not in gateway.acknowledged
        seen.append(len(batch))
        if len(seen) == 2:
            break
    assert seen == [4, 2]
    assert gateway.acknowledged == ["lease-1"], "the loop was left during the second batch: it returns to the buffer"


async def test_empty_answers_are_asked_again_and_never_yielded(
    gateway: ExperienceServer, reader: AsyncExperienceReader
) -> None:
    gateway.stock = []
    batches = reader.batches(trajectories=1, wait_s=0.01)
    pending = asyncio.ensure_future(anext(batches))
    async with asyncio.timeout(10):
        for _ in range(3):
            await gateway.asked.acquire()
        assert not pending.done()
        gateway.stock = TRAJECTORIES[:1]
        assert (await pending).trajectories == (TRAJECTORIES[0],)


async def test_the_synchronous_face_does_the_same(gateway: ExperienceServer) -> None:
    def work() -> list[int]:
        with ExperienceReader(gateway.url) as reader:
            reader.trainer_version = 2
            sizes = [len(batch) for _, batch in zip(range(2), reader.batches(trajectories=4), strict=False)]
            with pytest.raises(InvalidRequest, match="either `trajectories` or `groups`"):
                reader.sample()
            reader.ack(reader.sample(trajectories=1))
            assert reader.trainer_version == 2
        reader.close()  # a second time is harmless
        with pytest.raises(LaminarError, match="closed"):
            reader.sample(trajectories=1)
        return sizes

    threads = threading.active_count()
    assert await asyncio.to_thread(work) == [4, 2]
    assert threading.active_count() <= threads + 1, "only asyncio's own worker thread stays"
    assert [request["trainer_version"] for request in gateway.requests] == [2] * len(gateway.requests)


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (lambda: error_response(400, "group_size is missing", "invalid_request"), InvalidRequest, "group_size"),
        (lambda: error_response(503, "no store", "unavailable"), Unavailable, "no store"),
        (lambda: error_response(500, "bug", None), LaminarError, "bug"),
        (lambda: error_response(418, "odd", "teapot"), LaminarError, "odd"),
        (lambda: web.Response(status=404, text="<html>"), Unavailable, "answered 404.*another server"),
        (lambda: web.Response(text="hello"), Unavailable, "something else than a batch.*another server"),
        (lambda: web.Response(body=msgspec.msgpack.encode({"lease_id": 1})), Unavailable, "something else"),
    ],
)
async def test_errors_speak_with_the_gateways_words(
    gateway: ExperienceServer, reader: AsyncExperienceReader, answer: Any, kind: type[LaminarError], message: str
) -> None:
    gateway.answer = answer()
    with pytest.raises(kind, match=message) as caught:
        await reader.sample(trajectories=1)
    assert type(caught.value) is kind


async def test_a_full_gateway_says_when_to_come_again(gateway: ExperienceServer, reader: AsyncExperienceReader) -> None:
    gateway.answer = error_response(429, "full", "out_of_capacity", **{"Retry-After": "7"})
    with pytest.raises(OutOfCapacity) as caught:
        await reader.sample(trajectories=1)
    assert caught.value.retry_after_s == 7.0


@pytest.mark.parametrize("wanted", [{}, {"trajectories": 1, "groups": 1}])
async def test_what_to_sample_must_be_said_once(reader: AsyncExperienceReader, wanted: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest, match="`trajectories` or `groups`"):
        await reader.sample(**wanted)  # type: ignore[misc]


async def test_a_wrong_port_is_named(unused_tcp_port: int) -> None:
    async with AsyncExperienceReader(f"http://127.0.0.1:{unused_tcp_port}") as reader:
        with pytest.raises(Unavailable, match=rf"127.0.0.1:{unused_tcp_port}.*gateway serve"):
            await reader.sample(trajectories=1)


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "ftp://host", "http://host:port"])
async def test_an_address_that_is_no_url_is_refused(url: str) -> None:
    async with AsyncExperienceReader(url) as reader:
        with pytest.raises(InvalidRequest, match=r"gateway address.*http://127.0.0.1:8080"):
            await reader.sample(trajectories=1)


async def test_a_gateway_that_hangs_is_given_up_at_the_deadline(gateway: ExperienceServer) -> None:
    released = asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        await released.wait()
        return web.Response()

    app = web.Application()
    app.router.add_post("/experience/sample", hang)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with AsyncExperienceReader(url, timeout_s=0.05) as reader:
        with pytest.raises(Unavailable, match="ReadTimeout"):
            await reader.sample(trajectories=1, wait_s=0.05)
    released.set()
    await runner.cleanup()
