"""The dashboard's page and feed, over a whole gateway, and the feed over a source that the test changes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from gateway.api.ui.feed import Event, Feed
from gateway.api.ui.routes import PAGE, page_files
from gateway.app import start
from gateway.core.feed import BYTES_MAX, Frame, Tables
from gateway.core.types import EngineName, SessionId
from gateway.operate.feed_reader import Seen, frames
from protos.errors import OutOfCapacity, Unavailable
from tests.support.scripted_engine import ScriptedEngine, until
from tests.ui.synthetic import STATUS
from tests.unit.gateway_api.test_status import complete, config, gateway, get

MAKES_MARKUP = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", " style=")


class Made:
    """A source that the test changes. Each `read` waits for `go`, and is counted."""

    def __init__(self) -> None:
        self.rows: dict[str, Any] = {"a": 1}
        self.log: list[dict[str, Any]] = []
        self.reads = 0
        self.follows = 0
        self.go = asyncio.Semaphore(0)
        self.fails: Exception | None = None

    async def read(self) -> Tables:
        await self.go.acquire()
        self.reads += 1
        if self.fails is not None:
            raise self.fails
        return {"t": dict(self.rows)}

    def events(self, after: int) -> tuple[int, Sequence[Event]]:
        found = [event for event in self.log if event["seq"] > after]
        return (found[-1]["seq"] if found else after), found

    async def follow(self) -> None:
        self.follows += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.follows -= 1


async def take(messages: AsyncIterator[bytes]) -> tuple[str, Frame]:
    message = await anext(messages)
    head, data, *rest = message.split(b"\n")
    assert rest == [b"", b""]
    return head.removeprefix(b"event: ").decode(), msgspec.json.decode(data.removeprefix(b"data: "), type=Frame)


async def test_a_snapshot_then_what_changed_read_once_for_all_who_watch() -> None:
    source = Made()
    feed = Feed(source, tick_s=0.0)
    async with aclosing(feed.watch()) as one, aclosing(feed.watch()) as two:
        first, second = asyncio.create_task(take(one)), asyncio.create_task(take(two))
        await until(lambda: feed.num_clients == 2, "two clients")
        source.log.append({"seq": 1})
        source.go.release()
        for kind, frame in (await first, await second):
            assert (kind, frame.tables["t"].set, frame.events) == ("snapshot", {"a": 1}, [{"seq": 1}])
        source.rows = {"b": 2}
        source.log.append({"seq": 2})
        source.go.release()
        for kind, frame in (await take(one), await take(two)):
            assert (kind, frame.tables["t"].set, frame.tables["t"].gone) == ("delta", {"b": 2}, ["a"])
            assert frame.events == [{"seq": 2}]
        assert source.reads == 2
    assert (feed.num_clients, source.follows) == (0, 0)


async def test_nothing_is_read_while_nobody_watches_and_who_comes_later_begins_anew() -> None:
    source = Made()
    feed = Feed(source, tick_s=0.0)
    for expected in ({"a": 1}, {"a": 2}):
        source.rows = dict(expected)
        source.go.release()
        async with aclosing(feed.watch()) as messages:
            kind, frame = await take(messages)
            assert (kind, frame.tables["t"].set) == ("snapshot", expected)
            assert source.follows == 1
        assert source.follows == 0
        assert [task for task in asyncio.all_tasks() if task.get_name().startswith("ui-feed")] == []
    assert source.reads == 2


async def test_a_client_that_is_slow_gets_a_snapshot_in_place_of_what_it_missed() -> None:
    source = Made()
    feed = Feed(source, tick_s=0.0)
    async with aclosing(feed.watch()) as slow, aclosing(feed.watch()) as quick:
        source.go.release()
        first, beside = await asyncio.gather(take(slow), take(quick))
        assert first[0] == beside[0] == "snapshot"
        for number in range(4):
            source.rows = {"large": f"{number}" * (BYTES_MAX // 3)}
            source.go.release()
            assert (await take(quick))[0] == "delta"
        kind, frame = await take(slow)
        assert kind == "snapshot"
        assert frame.tables["t"].set == source.rows
        source.rows = {"small": 1}
        source.go.release()
        for messages in (slow, quick):
            kind, frame = await take(messages)
            assert (kind, frame.tables["t"].gone) == ("delta", ["large"])


async def test_so_many_clients_and_no_more() -> None:
    source = Made()
    feed = Feed(source, tick_s=0.0, clients_max=1)
    async with aclosing(feed.watch()) as one:
        source.go.release()
        await take(one)
        with pytest.raises(OutOfCapacity, match="1 clients watch already"):
            await anext(feed.watch())
    source.go.release()
    async with aclosing(feed.watch()) as again:
        assert (await take(again))[0] == "snapshot"


async def test_a_failing_source_ends_the_streams_and_the_next_client_begins_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = Made()
    source.fails = RuntimeError("no more")
    feed = Feed(source, tick_s=0.0)
    source.go.release()
    async with aclosing(feed.watch()) as messages:
        assert await anext(messages, None) is None
    assert "no more" in caplog.text
    source.fails = None
    source.go.release()
    async with aclosing(feed.watch()) as messages:
        assert (await take(messages))[0] == "snapshot"


async def test_a_closed_feed_ends_its_streams_and_takes_no_client() -> None:
    source = Made()
    feed = Feed(source, tick_s=0.0)
    async with aclosing(feed.watch()) as messages:
        source.go.release()
        await take(messages)
        await feed.close()
        assert await anext(messages, None) is None
    with pytest.raises(Unavailable):
        await anext(feed.watch())


async def test_the_feed_shows_what_status_says_and_the_sessions(tmp_path: Path) -> None:
    e0 = ScriptedEngine("e0", hold_at=2, version="3")
    async with e0, gateway(tmp_path, e0) as (found, http):
        async with http.post("/sessions", json={"session_id": "s"}) as made:
            assert made.status == 200
        turn = asyncio.create_task(complete(http, "/sessions/s/v1/completions"))
        await until(lambda: e0.said_tokens == 2, "a turn in its middle")
        seen = Seen()
        async with aclosing(frames(found.url)) as messages:
            while seen.tables.get("sessions", {}).get("s", ("",))[0] != "decode":
                seen.take(*await anext(messages))
        assert seen.tables["sessions"]["s"][1] == "e0"
        status = await get(http, "/status")
        assert seen.status.keys() == status.keys() | {"sampled"}
        for name in ("model", "mode", "newest_version", "buffer", "admission", "sessions", "staleness"):
            assert seen.status[name] == status[name]
        assert [engine["name"] for engine in seen.status["engines"]] == ["e0"]
        assert {event["kind"] for event in seen.events} == {"engine"}
        e0.go.set()
        assert (await turn)[0] == 200
        async with http.post("/sessions/s/finish", json={"reward": 1.0}) as ended:
            assert ended.status == 200
        async for kind, frame in frames(found.url, limit=1):
            seen.take(kind, frame)
        assert seen.tables["sessions"] == {}
        assert seen.status["buffer"]["trajectories"] == 1
        assert found.fleet.state.engines[EngineName("e0")].version == 3
        assert found.parts.live.find(SessionId("s")) is None


async def table_in_the_feed(url: str, name: str) -> Any:
    async with aclosing(frames(url, limit=1)) as messages:
        _, frame = await anext(messages)
        return frame.tables[name].set


async def test_a_session_that_nobody_uses_is_idle_in_the_feed(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0, idle_after_s=0.0) as (found, http):
        async with http.post("/sessions", json={"session_id": "s"}) as made:
            assert made.status == 200
        assert (await complete(http, "/sessions/s/v1/completions"))[0] == 200
        assert (await table_in_the_feed(found.url, "sessions"))["s"][0] == "idle"
        async with http.post("/sessions/s/finish", json={}) as ended:
            assert ended.status == 200
        assert (await table_in_the_feed(found.url, "sessions"))["s"][0] == "reward"


async def test_the_feed_has_the_mean_reward_of_finished_training_sessions(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (found, http):
        for name, split, reward in (("a", "train", 1.0), ("b", "train", 0.5), ("c", "eval", -9.0)):
            async with http.post("/sessions", json={"session_id": name, "split": split}) as made:
                assert made.status == 200
            assert (await complete(http, f"/sessions/{name}/v1/completions"))[0] == 200
            async with http.post(f"/sessions/{name}/finish", json={"reward": reward}) as ended:
                assert ended.status == 200
        points = (await table_in_the_feed(found.url, "rewards")).values()
        assert sum(sessions for _, sessions, _ in points) == 2
        assert sum(sessions * mean for _, sessions, mean in points) == 1.5


async def test_the_page_reads_what_the_gateway_and_the_made_up_fleet_report(tmp_path: Path) -> None:
    read = {
        name
        for file in page_files().values()
        for name in re.findall(r'\b(?:field|status)\("(\w+)"\)', file.body.decode())
    }
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):
        reported = (await get(http, "/status")).keys() | {"sampled"}
    assert read - reported == set()
    assert read - STATUS.keys() == set(), "tests.ui.synthetic"


async def test_the_page_is_served_with_its_policy_and_again_only_when_it_changed(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):
        async with http.get("/ui") as page:
            assert page.content_type == "text/html"
            policy = page.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "require-trusted-types-for 'script'" in policy
            assert "unsafe" not in policy
            text, etag = await page.text(), page.headers["ETag"]
        for name in re.findall(r'(?:href|src)="ui/([^"]+)"', text):
            async with http.get(f"/ui/{name}") as file:
                assert file.status == 200, name
                assert file.headers["X-Content-Type-Options"] == "nosniff"
        async with http.get("/ui", headers={"If-None-Match": etag}) as again:
            assert (again.status, await again.read()) == (304, b"")
        async with http.get("/ui/feed?frames=x") as wrong:
            assert wrong.status == 400


def test_the_page_loads_nothing_from_elsewhere_and_makes_no_markup_of_text() -> None:
    files = page_files()
    assert set(files) == {path.name for path in PAGE.iterdir()}
    for name, file in files.items():
        text = file.body.decode()
        links = [found for found in re.findall(r"https?://[^\s\"']+", text) if found != "http://www.w3.org/2000/svg"]
        assert links == [], name
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            " style=",
        ):
            assert word not in text, name
        for imported in re.findall(r'from "\./([^"]+)"', text):
            assert imported in files, f"{name} imports {imported}"


async def test_a_gateway_that_closes_ends_the_stream(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0:
        found = await start(config(tmp_path, e0))
        async with aiohttp.ClientSession(found.url) as http, http.get("/ui/feed") as response:
            assert response.content_type == "text/event-stream"
            assert await response.content.readuntil(b"\n") == b"event: snapshot\n"
            closing = asyncio.create_task(found.close(drain_timeout_s=0.0))
            while await response.content.readany():
                pass
            await closing
