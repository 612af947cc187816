"""Looking at running parts: real HTTP, real files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from deploy.demo.processes import DemoError
from deploy.demo.recording import EngineChange, GatewayStatus, Note, Recording, Segment, Step
from deploy.demo.watchers import TIMELINE_PAGE, GatewayWatcher, TrainerEvents, Watchers
from gateway.core.types import EngineName
from tests.support.scripted_engine import ScriptedEngine
from tests.unit.gateway_api.test_status import gateway as real_gateway


class FakeGateway:
    """A timeline of numbered events, paged as the gateway pages it."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.broken = False
        self.odd: dict[str, Any] = {}

    def add(self, number: int) -> None:
        for _ in range(number):
            seq = len(self.events) + 1
            self.events.append({"seq": seq, "kind": "engine", "t_unix_s": seq, "engine": f"e{seq}", "state": "serving"})

    async def timeline(self, request: web.Request) -> web.Response:
        if self.broken:
            raise web.HTTPServiceUnavailable
        after, limit = int(request.query["after"]), int(request.query["limit"])
        page = self.events[after : after + limit]
        return web.json_response({"next": after + len(page), "events": page})

    async def status(self, request: web.Request) -> web.Response:
        return web.json_response({"newest_version": 4, "mode": "repack", "sessions": {"live": 3}, **self.odd})

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        app = web.Application()
        app.add_routes([web.get("/admin/timeline", self.timeline), web.get("/status", self.status)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not met():  # noqa: ASYNC110 - what it waits for tells nobody
            await asyncio.sleep(0.02)


async def test_every_event_is_read_once_over_pages() -> None:
    gateway, recording = FakeGateway(), Recording()
    gateway.add(2 * TIMELINE_PAGE)
    async with gateway.serve() as url, httpx.AsyncClient() as session:
        watcher = GatewayWatcher(url, recording, session)
        await watcher.look()
        gateway.add(3)
        await watcher.look()
        await watcher.look()
    seen = [event.engine for event in recording.of(EngineChange)]
    assert seen == [f"e{seq}" for seq in range(1, 2 * TIMELINE_PAGE + 4)]
    status = recording.last(GatewayStatus)
    assert status is not None
    assert (status.newest_version, status.sessions.live, status.t > 0) == (4, 3, True)


async def test_a_gateway_that_does_not_answer_is_noted_once_and_asked_again() -> None:
    gateway, recording = FakeGateway(), Recording()
    gateway.broken = True
    gateway.add(1)
    async with gateway.serve() as url, Watchers(recording, "policy") as watchers:
        await watchers.gateway(url)
        await until(lambda: len(recording.of(Note)) == 1)
        await watchers.last_look()
        assert len(recording.of(Note)) == 2  # the second is of the last look
        gateway.broken = False
        await watchers.last_look()
    assert len(recording.of(EngineChange)) == 1
    assert all("does not answer" in note.text or "last look" in note.text for note in recording.of(Note))


async def test_a_gateway_that_answers_what_cannot_be_read_is_one_clear_line() -> None:
    gateway, recording = FakeGateway(), Recording()
    gateway.odd = {"engines": "none"}
    async with gateway.serve() as url, httpx.AsyncClient() as session:
        with pytest.raises(DemoError, match=r"the gateway's /status is not what the demo reads: .*engines"):
            await GatewayWatcher(url, recording, session).look()


async def test_a_real_gateways_status_and_timeline_are_read(tmp_path: Path) -> None:
    recording = Recording()
    async with ScriptedEngine("e0", dtype="float32") as e0, real_gateway(tmp_path, e0) as (found, http):
        await until(lambda: found.fleet.state.engines[EngineName("e0")].dtype == "float32")
        async with http.post("/v1/completions", json={"model": "policy", "prompt": [5], "max_tokens": 2}) as answer:
            assert answer.status == 200
        async with httpx.AsyncClient() as session:
            await GatewayWatcher(found.url, recording, session).look()
    seen = recording.last(GatewayStatus)
    assert seen is not None
    assert (seen.engines[0].name, seen.engines[0].dtype, seen.counter("turns_completed")) == ("e0", "float32", 1)
    assert [(segment.engine, segment.dtype, segment.tokens) for segment in recording.of(Segment)] == [
        ("e0", "float32", 2)
    ]


async def test_a_relay_that_does_not_answer_never_fails_the_run() -> None:
    recording = Recording()
    async with Watchers(recording, "policy") as watchers:
        await watchers.relays({"relay-1": "127.0.0.1:1"})
        await until(lambda: len(recording.of(Note)) > 0)
        assert not any(task.done() for task in watchers.tasks)
    assert all(task.done() for task in watchers.tasks)
    assert recording.of(Note)[0].text.startswith("relay-1 does not answer")


def test_trainer_events_wait_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = TrainerEvents(path)
    assert events.read() == []
    step: dict[str, Any] = {"t": 1.0, "event": "step", "step": 1, "version": 2, "reward_mean": 0.5, "loss": 0.1}
    step |= {"staleness_mean": 0.0, "staleness_max": 0, "tokens": 10, "seconds": 1.0, "wait_s": 0.0}
    text = json.dumps(step) + "\n"
    with path.open("w") as file:
        file.write(text + text[:20])
        file.flush()
        assert len(events.read()) == 1
        assert events.read() == []
        file.write(text[20:])
        file.flush()
        (seen,) = events.read()
    assert isinstance(seen, Step)
    assert seen.version == 2
