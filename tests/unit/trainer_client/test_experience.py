"""Reading experience from a real HTTP server that answers as the gateway does."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web

from protos.errors import (
    Conflict,
    InvalidRequest,
    LaminarError,
    NotFound,
    OutOfCapacity,
    Unavailable,
    VersionUnknown,
    WrongServer,
)
from tests.support.experience_server import ExperienceServer, error_response, statistics
from tests.support.trajectories import make_trajectory
from tests.unit.gateway_store.disk import until
from trainer_client import AsyncExperienceReader, Batch, ExperienceReader, Facts, Offer, unanswered

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


async def test_an_empty_batch_has_nothing_to_end(gateway: ExperienceServer, reader: AsyncExperienceReader) -> None:
    """`sample` gives one when its time is over; a trainer need not look before it acknowledges."""
    await reader.ack(Batch("", ()))
    await reader.give_back(Batch("", ()))
    assert gateway.acknowledged == []


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
    assert gateway.acknowledged == ["lease-1"]
    async with asyncio.timeout(60):  # the generator that was left is closed by the event loop, a moment later
        await gateway.returned.acquire()
    assert gateway.released == ["lease-2"]
    assert gateway.stock == TRAJECTORIES[4:], "the loop was left during the second batch: it is back at once"


async def test_what_the_loop_acknowledges_or_gives_back_itself_is_ended_once(
    gateway: ExperienceServer, reader: AsyncExperienceReader
) -> None:
    seen = 0
    async for batch in reader.batches(trajectories=1, wait_s=0.1):
        seen += 1
        if seen == 1:
            await reader.ack(batch)
        elif seen == 2:
            await reader.give_back(batch)
        else:
            await reader.ack(batch)
            break
    assert gateway.acknowledged == ["lease-1", "lease-3"]
    assert gateway.released == ["lease-2"]


async def test_a_batch_is_sampled_ahead_and_given_back_when_the_loop_is_left(
    gateway: ExperienceServer, reader: AsyncExperienceReader
) -> None:
    batches = reader.batches(prefetch=1, trajectories=2)
    async with asyncio.timeout(60):
        first = await anext(batches)
        for _ in range(2):
            await gateway.asked.acquire()  # the second while the first is in use
        assert (first.lease_id, gateway.acknowledged) == ("lease-1", [])
        second = await anext(batches)
        await gateway.asked.acquire()
        assert (second.lease_id, gateway.acknowledged) == ("lease-2", ["lease-1"])
        await until(lambda: "lease-3" in reader._leased, "a batch that was sampled ahead")
        await batches.aclose()
    assert sorted(gateway.released) == ["lease-2", "lease-3"]
    assert gateway.acknowledged == ["lease-1"]


async def test_a_readers_state_goes_on_in_another_of_its_name(gateway: ExperienceServer) -> None:
    async with (
        AsyncExperienceReader(gateway.url, trainer_version=7) as reader,
        AsyncExperienceReader(gateway.url, trainer_version=3) as resumed,
        AsyncExperienceReader(gateway.url, reader="critic") as other,
    ):
        resumed.load_state_dict(reader.state_dict())
        assert resumed.trainer_version == 7
        with pytest.raises(InvalidRequest, match="of reader 'trainer', and this one is 'critic'"):
            other.load_state_dict(reader.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
async def test_a_torch_dataset_gives_tensors_and_acknowledges_what_was_used(
    gateway: ExperienceServer, padded: bool
) -> None:
    from torch.utils.data import DataLoader

    from trainer_client.torch_dataset import ExperienceDataset

    dataset = ExperienceDataset(gateway.url, trajectories=2, padded=padded, pad_id=9, length=6 if padded else None)

    def train() -> list[Any]:
        loader = DataLoader(dataset, batch_size=None)
        return [batch.input_ids for _, batch in zip(range(2), loader, strict=False)]

    seen = await asyncio.to_thread(train)
    assert [tuple(ids.shape) for ids in seen] == [(2, 6) if padded else (8,)] * 2
    assert gateway.acknowledged[:1] == ["lease-1"]
    async with asyncio.timeout(60):
        while "lease-2" not in gateway.released:  # the loop did not come back from it
            await gateway.returned.acquire()
    # What was ahead is given back, too, if its response had come: else it returns when its lease ends.


async def test_a_closed_reader_gives_back_what_its_loop_still_has(gateway: ExperienceServer) -> None:
    async with AsyncExperienceReader(gateway.url) as reader:
        batches = reader.batches(trajectories=4)
        await anext(batches)
        by_hand = await reader.sample(trajectories=1)
    assert gateway.released == ["lease-1"], f"{by_hand.lease_id} is its caller's to end"
    await batches.aclose()
    assert gateway.released == ["lease-1"]


async def test_closing_waits_for_a_batch_on_its_way_back(
    gateway: ExperienceServer, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.may_release.clear()
    reader = AsyncExperienceReader(gateway.url)
    async for _ in reader.batches(trajectories=4):
        break
    async with asyncio.timeout(60):
        await gateway.returning.acquire()
        closing = asyncio.create_task(reader.close())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not closing.done()
        gateway.may_release.set()
        await closing
    assert gateway.stock == TRAJECTORIES
    with pytest.raises(Conflict, match="this reader is closed"):
        await reader.sample(trajectories=1)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


async def test_an_acknowledgement_whose_answer_was_lost_is_asked_for_again(
    gateway: ExperienceServer, reader: AsyncExperienceReader
) -> None:
    gateway.answers_lost = 1
    batches = reader.batches(trajectories=4)
    assert len(await anext(batches)) == 4
    assert len(await anext(batches)) == 2, "it was used: no error, and not sampled again"
    assert gateway.acknowledged == ["lease-1"]
    await batches.aclose()


async def test_a_batch_whose_answer_was_lost_is_given_back_and_sampled_again(
    gateway: ExperienceServer, reader: AsyncExperienceReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_client.gateway_http.PATIENCE_S", 0.0)
    gateway.samples_lost = 1
    with pytest.raises(Unavailable, match="no answer from the gateway"):
        await reader.sample(trajectories=4)
    assert gateway.stock == TRAJECTORIES[4:]
    async with asyncio.timeout(60):
        await gateway.returned.acquire()
    assert (await reader.sample(trajectories=4)).trajectories == tuple(TRAJECTORIES[:4])
    assert gateway.released == ["lease-1"]


async def test_a_batch_whose_answer_was_lost_is_given_back_once_the_gateway_answers(
    gateway: ExperienceServer, reader: AsyncExperienceReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_client.gateway_http.PATIENCE_S", 0.0)
    monkeypatch.setattr("trainer_client.unanswered.RETRY_S", 0.01)
    gateway.samples_lost, gateway.releases_refused = 1, 3
    with pytest.raises(Unavailable):
        await reader.sample(trajectories=4)
    async with asyncio.timeout(60):
        await gateway.returned.acquire()
    assert gateway.stock == TRAJECTORIES


async def test_a_reader_that_closes_gives_back_what_it_got_no_answer_of(
    gateway: ExperienceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_client.gateway_http.PATIENCE_S", 0.0)
    gateway.samples_lost = 1
    async with AsyncExperienceReader(gateway.url) as reader:
        with pytest.raises(Unavailable):
            await reader.sample(trajectories=4)
    assert gateway.stock == TRAJECTORIES


async def test_a_sample_that_nobody_waits_for_any_more_is_given_back(
    gateway: ExperienceServer, reader: AsyncExperienceReader
) -> None:
    gateway.may_answer.clear()
    pending = asyncio.ensure_future(reader.sample(trajectories=4))
    async with asyncio.timeout(60):
        await gateway.asked.acquire()
        pending.cancel()
        await gateway.returned.acquire()
    assert gateway.stock == TRAJECTORIES


async def test_a_reader_whose_gateway_stays_away_closes_all_the_same(
    gateway: ExperienceServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trainer_client.gateway_http.PATIENCE_S", 0.0)
    monkeypatch.setattr("trainer_client.unanswered.CLOSE_S", 0.01)
    gateway.samples_lost, gateway.releases_refused = 1, 1000
    async with AsyncExperienceReader(gateway.url) as reader:
        with pytest.raises(Unavailable):
            await reader.sample(trajectories=4)
    assert "1 batches whose answers were lost come back when their leases end" in caplog.text


async def test_a_lease_shorter_than_a_training_step_is_named(
    gateway: ExperienceServer, reader: AsyncExperienceReader
) -> None:
    batches = reader.batches(trajectories=4, lease_s=0.01)
    batch = await anext(batches)
    gateway.acknowledged.append(batch.lease_id)  # unknown from now on, as one that lapsed
    with pytest.raises(NotFound, match=r"lease of 0\.01 s .*sampled again.*lease_s"):
        await anext(batches)


async def test_a_loop_that_waits_long_says_what_for(
    gateway: ExperienceServer,
    reader: AsyncExperienceReader,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer_client.experience.SILENT_S", 0.0)
    gateway.stock = []
    pending = asyncio.ensure_future(anext(reader.batches(groups=3, group_size=2, wait_s=0.01)))
    async with asyncio.timeout(60):
        for _ in range(2):  # it asks again after it said so
            await gateway.asked.acquire()
    pending.cancel()
    said = [record.getMessage() for record in caplog.records if record.name == "trainer_client.experience"]
    assert re.search(r"no batch of groups=3, group_size=2.* for \d+ s.*status", said[0])


async def test_empty_answers_are_asked_again_and_never_yielded(
    gateway: ExperienceServer, reader: AsyncExperienceReader
) -> None:
    gateway.stock = []
    batches = reader.batches(trajectories=1, wait_s=0.01)
    pending = asyncio.ensure_future(anext(batches))
    async with asyncio.timeout(60):
        for _ in range(3):
            await gateway.asked.acquire()
        assert not pending.done()
        gateway.stock = TRAJECTORIES[:1]
        assert (await pending).trajectories == (TRAJECTORIES[0],)


async def test_a_loop_waits_for_a_gateway_that_is_started_again(
    gateway: ExperienceServer, reader: AsyncExperienceReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_client.gateway_http.RETRY_MAX_S", 0.01)
    batches = reader.batches(trajectories=1, wait_s=0.01)
    await anext(batches)
    gateway.answer = partial(error_response, 503, "the gateway is shutting down", "unavailable")
    pending = asyncio.ensure_future(anext(batches))
    async with asyncio.timeout(60):
        for _ in range(3):
            await gateway.asked.acquire()
        assert not pending.done()
        gateway.answer = None
        assert (await pending).trajectories == (TRAJECTORIES[1],)
        monkeypatch.setattr("trainer_client.gateway_http.PATIENCE_S", 0.0)
        gateway.answer = partial(error_response, 503, "the gateway is shutting down", "unavailable")
        with pytest.raises(Unavailable, match="shutting down"):
            await anext(batches)


async def test_a_sample_and_its_acknowledgement_survive_what_a_loop_survives_and_say_so_once(
    gateway: ExperienceServer,
    reader: AsyncExperienceReader,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("trainer_client.gateway_http.RETRY_FIRST_S", 0.001)
    monkeypatch.setattr("trainer_client.gateway_http.RETRY_MAX_S", 0.01)
    await reader.ack(await reader.sample(trajectories=1))
    gateway.answer = partial(error_response, 503, "the gateway is shutting down", "unavailable")
    pending = asyncio.ensure_future(reader.sample(trajectories=1))
    async with asyncio.timeout(60):
        for _ in range(5):
            await gateway.asked.acquire()
        gateway.answer = None
        batch = await pending
    gateway.answers_lost = 3
    await reader.ack(batch)
    assert gateway.acknowledged == ["lease-1", batch.lease_id]
    away = [record.message for record in caplog.records if "trying again for 60 s" in record.message]
    back = [record.message for record in caplog.records if "answers again, after" in record.message]
    assert (len(away), len(back)) == (2, 2), "one of the sample and one of the acknowledgement, however many tries"
    assert "the gateway is shutting down" in away[0]


async def test_a_gateway_that_starts_after_the_trainer_is_waited_for(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trainer_client.gateway_http.RETRY_MAX_S", 0.01)
    async with AsyncExperienceReader(f"http://127.0.0.1:{port}") as reader, asyncio.timeout(60):
        pending = asyncio.ensure_future(anext(reader.batches(trajectories=1)))
        await until(lambda: bool(caplog.records), "a warning")
        async with ExperienceServer(TRAJECTORIES).running(port):
            assert (await pending).trajectories == (TRAJECTORIES[0],)
            await reader.close()
    away, back = [record.message for record in caplog.records]
    assert f"no answer from the gateway at http://127.0.0.1:{port}" in away
    assert "trying again for 60 s" in away
    assert f"the gateway at http://127.0.0.1:{port} answers now" in back


async def test_a_gateway_that_never_starts_is_named_once_and_at_the_end(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trainer_client.gateway_http.PATIENCE_S", 1.0)
    caplog.set_level("DEBUG", "trainer_client.unanswered")
    async with AsyncExperienceReader(f"http://127.0.0.1:{port}") as reader:
        with pytest.raises(Unavailable, match=rf"127.0.0.1:{port}.*gateway serve"):
            await reader.sample(trajectories=1)
    assert [record.levelname for record in caplog.records] == ["WARNING"], "nothing was leased, so nothing goes back"


async def test_the_synchronous_face_does_the_same(gateway: ExperienceServer) -> None:
    def work() -> list[int]:
        with ExperienceReader(gateway.url) as reader:
            reader.trainer_version = 2
            sizes = [len(batch) for _, batch in zip(range(2), reader.batches(trajectories=4), strict=False)]
            with pytest.raises(InvalidRequest, match="one of `trajectories`, `groups`"):
                reader.sample()
            reader.ack(reader.sample(trajectories=1))
            assert reader.trainer_version == 2
        reader.close()  # a second time is harmless
        with pytest.raises(LaminarError, match="closed"):
            reader.sample(trajectories=1)
        with pytest.raises(LaminarError, match="closed"):
            next(reader.batches(trajectories=1))
        return sizes

    threads = threading.active_count()
    assert await asyncio.to_thread(work) == [4, 2]
    assert threading.active_count() <= threads + 1, "only asyncio's own worker thread stays"
    assert [request["trainer_version"] for request in gateway.requests] == [2] * len(gateway.requests)


async def test_break_gives_the_last_batch_back_at_once(gateway: ExperienceServer) -> None:
    def work() -> None:
        with ExperienceReader(gateway.url) as reader:
            for _ in reader.batches(trajectories=4):
                break
            assert gateway.released == ["lease-1"]
            assert len(reader.sample(trajectories=9)) == 6
            with pytest.raises(RuntimeError, match="diverged"):
                train(reader)

    def train(reader: ExperienceReader) -> None:
        gateway.stock = TRAJECTORIES[:]
        for _ in reader.batches(trajectories=2):
            raise RuntimeError("diverged")

    await asyncio.to_thread(work)
    assert gateway.released == ["lease-1", "lease-3"]
    assert gateway.acknowledged == []


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (lambda: error_response(400, "group_size is missing", "invalid_request"), InvalidRequest, "group_size"),
        (lambda: error_response(503, "no store", "unavailable"), Unavailable, "no store"),
        (lambda: error_response(500, "bug", None), LaminarError, "bug"),
        (lambda: error_response(418, "odd", "teapot"), LaminarError, "odd"),
        (lambda: web.Response(status=503, text="<html>"), Unavailable, "answered 503"),
        (lambda: web.Response(status=404, text="<html>"), WrongServer, "answered 404.*another server"),
        (lambda: web.Response(text="hello"), WrongServer, "something else than a batch.*another server"),
        (lambda: web.Response(body=msgspec.msgpack.encode({"lease_id": 1})), WrongServer, "something else"),
    ],
)
async def test_errors_speak_with_the_gateways_words(
    gateway: ExperienceServer,
    reader: AsyncExperienceReader,
    monkeypatch: pytest.MonkeyPatch,
    answer: Any,
    kind: type[LaminarError],
    message: str,
) -> None:
    monkeypatch.setattr("trainer_client.gateway_http.PATIENCE_S", 0.0)
    gateway.answer = answer
    with pytest.raises(kind, match=message) as caught:
        await reader.sample(trajectories=1)
    assert type(caught.value) is kind


async def test_a_redirect_is_an_error_of_every_request(
    gateway: ExperienceServer, reader: AsyncExperienceReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = await reader.sample(trajectories=1)
    monkeypatch.setattr("trainer_client.gateway_http.PATIENCE_S", 0.0)
    gateway.redirects, gateway.answer = True, lambda: web.Response(status=308)
    for request in (reader.ack(batch), reader.sample(trajectories=1)):
        with pytest.raises(WrongServer, match="answered 308 without a gateway's error body"):
            await request


async def test_a_full_gateway_says_when_to_come_again(gateway: ExperienceServer, reader: AsyncExperienceReader) -> None:
    gateway.answer = partial(error_response, 429, "full", "out_of_capacity", **{"Retry-After": "7"})
    with pytest.raises(OutOfCapacity) as caught:
        await reader.sample(trajectories=1)
    assert caught.value.retry_after_s == 7.0
    gateway.answer = partial(
        error_response, 429, "full", "out_of_capacity", **{"Retry-After": "Sun, 06 Nov 1994 08:49:37 GMT"}
    )
    with pytest.raises(OutOfCapacity, match="full") as caught:
        await reader.sample(trajectories=1)
    assert caught.value.retry_after_s == 1.0, "a proxy may say it so"


@pytest.mark.parametrize("wanted", [{}, {"trajectories": 1, "groups": 1}, {"trajectories": 1, "session_ids": ["a"]}])
async def test_what_to_sample_must_be_said_once(reader: AsyncExperienceReader, wanted: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest, match="one of `trajectories`, `groups`"):
        await reader.sample(**wanted)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda reader: reader.sample(trajectory=1), r"takes no `trajectory`.*`trajectories`"),
        (lambda reader: reader.sample(trajectories=1, strategy=lambda rows: []), "instead of `trajectories`"),
        (lambda reader: reader.evict(lambda rows: rows), "list of Offer, not a list of session ids"),
        (lambda reader: reader.evict(lambda rows: None), "returned None, not a list"),
        (lambda reader: reader.evict(lambda rows: "s1"), "returned 's1', not a list"),
        (lambda reader: reader.resume({}), "no state of a reader: .*reader.*pass what `state_dict` returned"),
        (lambda reader: reader.resume({"reader": "me"}), "no state of a reader: .*trainer_version"),
        (lambda reader: anext(reader.batches(prefetch=-1, trajectories=1)), "prefetch=-1"),
    ],
)
async def test_wrong_calls_say_what_would_be_right(
    reader: AsyncExperienceReader, call: Callable[[AsyncExperienceReader], Awaitable[object]], message: str
) -> None:
    async def rows() -> list[Offer]:
        return [Offer(seq=1, session_id="s1", group_id="g", facts=Facts())]

    reader.rows = rows  # type: ignore[method-assign]
    with pytest.raises(InvalidRequest, match=message):
        await call(reader)


async def test_a_state_names_batches_one_by_one(reader: AsyncExperienceReader) -> None:
    batch = await reader.sample(trajectories=1)
    assert reader.state_dict(batch, Batch("")) == {"reader": "me", "trainer_version": 7, "used": ["lease-1"]}
    with pytest.raises(InvalidRequest, match=r"list is no batch.*state_dict\(\*batches\)"):
        reader.state_dict([batch])  # type: ignore[arg-type]


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "ftp://host", "http://host:port"])
async def test_an_address_that_is_no_url_is_refused(url: str) -> None:
    async with AsyncExperienceReader(url) as reader:
        with pytest.raises(InvalidRequest, match=r"gateway address.*http://127.0.0.1:8080"):
            await reader.sample(trajectories=1)


@pytest.mark.parametrize("version", ["3", 3.0, -1, None])
def test_a_trainers_version_that_is_none_is_refused_where_it_is_set(version: Any) -> None:
    with ExperienceReader("http://127.0.0.1:1") as reader:
        with pytest.raises(InvalidRequest, match=rf"trainer_version={version!r}.*ticket\.version"):
            reader.trainer_version = version
        reader.trainer_version = np.int64(3)
        assert (reader.trainer_version, type(reader.trainer_version)) == (3, int)
    with pytest.raises(InvalidRequest, match="trainer_version"):
        AsyncExperienceReader("http://127.0.0.1:1", trainer_version=version)


async def test_a_gateway_that_hangs_is_given_up_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_client.gateway_http.PATIENCE_S", 0.0)
    monkeypatch.setattr(unanswered, "CLOSE_S", 0.1)  # in which it asks whether it got a lease after all
    released = asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        await released.wait()
        return web.Response()

    app = web.Application()
    app.router.add_get("/experience/statistics", statistics)
    app.router.add_post("/experience/sample", hang)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with AsyncExperienceReader(url, timeout_s=1.0) as reader:  # also to connect, on a busy machine
        with pytest.raises(Unavailable, match=r"silent for 1.1 s"):
            await reader.sample(trajectories=1, wait_s=0.1)
    released.set()
    await runner.cleanup()


async def test_a_version_that_is_not_known_yet_is_said_again_until_it_is_or_the_patience_ends(
    gateway: ExperienceServer, reader: AsyncExperienceReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VersionUnknown, "retry_after_s", 0.01)
    gateway.answer = unknown = partial(error_response, 409, "no relay has announced version 7", "version_unknown")
    sampling = asyncio.create_task(reader.sample(trajectories=2))
    for _ in range(2):
        await asyncio.wait_for(gateway.asked.acquire(), 60)
    gateway.answer = None
    assert len(await sampling) == 2
    monkeypatch.setattr("trainer_client.experience.ANNOUNCED_PATIENCE_S", 0.0)
    gateway.answer = unknown
    with pytest.raises(VersionUnknown, match="no relay has announced version 7"):
        await reader.sample(trajectories=2)
