"""An HTTP server that hands out given trajectories as the gateway's experience routes do, and remembers who asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
from aiohttp import web

from trainer_client import Trajectory


def _set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass
class ExperienceServer:
    """Hands out `stock` in order under leases, as the gateway's experience buffer does."""

    stock: list[Trajectory]
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    asked: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))  # one release a request
    returned: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))  # one release a lease given back
    returning: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))  # asked for, not yet answered
    may_release: asyncio.Event = field(default_factory=_set)
    acknowledged: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    lent: dict[str, list[Trajectory]] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)  # leases by the names that samples gave them
    answers_lost: int = 0  # of the next acknowledgements, which are carried out
    samples_lost: int = 0  # answers of the next samples, which are carried out
    releases_refused: int = 0  # of the next
    may_answer: asyncio.Event = field(default_factory=_set)  # samples that were carried out
    groups_max: int = 1000  # in one answer, however many are asked for
    redirects: bool = False  # acknowledgements
    answer: Callable[[], web.Response] | None = None  # makes what is answered to samples instead

    @contextlib.asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[Self]:
        """Serves on a free port, or on `port`; `url` says where."""
        app = web.Application()
        app.router.add_get("/experience/statistics", statistics)
        app.router.add_post("/experience/sample", self.sample)
        app.router.add_post("/experience/ack", self.ack)
        app.router.add_post("/experience/release", self.release)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        yield self
        await runner.cleanup()

    async def sample(self, request: web.Request) -> web.Response:
        assert "application/msgpack" in request.headers["Accept"]
        body = await request.json()
        self.requests.append(body)
        self.asked.release()
        if self.answer is not None:
            return self.answer()
        count = body.get("trajectories") or min(body["groups"], self.groups_max) * body["group_size"]
        taken, self.stock = self.stock[:count], self.stock[count:]
        sampled = {"lease_id": f"lease-{len(self.requests)}", "trajectories": taken, "added_later": 1}
        self.lent[f"lease-{len(self.requests)}"] = taken
        self.named[request.query["lease_id"]] = f"lease-{len(self.requests)}"
        if self.samples_lost:
            self.samples_lost -= 1
            assert request.transport is not None
            request.transport.abort()
        await self.may_answer.wait()
        return web.Response(body=msgspec.msgpack.encode(sampled), content_type="application/msgpack")

    async def ack(self, request: web.Request) -> web.Response:
        if self.redirects:
            return web.Response(status=308, headers={"Location": "https://elsewhere/"})
        lease_id = (await request.json())["lease_id"]
        if lease_id in self.acknowledged:
            return error_response(404, f"no lease {lease_id}", "not_found")
        self.acknowledged.append(lease_id)
        if self.answers_lost:
            self.answers_lost -= 1
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({})

    async def release(self, request: web.Request) -> web.Response:
        lease_id = (await request.json())["lease_id"]
        lease_id = self.named.get(lease_id, lease_id)
        if self.releases_refused:
            self.releases_refused -= 1
            return error_response(503, "the gateway is shutting down", "unavailable")
        self.released.append(lease_id)
        self.returning.release()
        await self.may_release.wait()
        if lease_id in self.acknowledged or lease_id not in self.lent:
            return error_response(404, f"no lease {lease_id}", "not_found")
        self.stock = [*self.lent.pop(lease_id), *self.stock]
        self.returned.release()
        return web.json_response({})


async def statistics(_: web.Request) -> web.Response:
    """A gateway's without any experience."""
    spread = dict.fromkeys(("count", "mean", "min", "p50", "p90", "p99", "max"), 0)
    sampled = dict.fromkeys(("tokens", "sampled_tokens", "reward", "waited_s"), spread)
    staleness: dict[str, dict[int, int]] = {"generation": {}, "finish": {}, "use": {}}
    return web.json_response({"buffer": {}, "staleness": staleness, "sampled": sampled})


def error_response(status: int, message: str, code: str | None, **headers: str) -> web.Response:
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return web.json_response(body, status=status, headers=headers)
