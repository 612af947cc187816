"""Engines that are added while the gateway runs: where they may be, and what of a foreign server's answer is shown."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gateway.core.networks import Networks
from gateway.core.types import EngineName
from gateway.engines.base import EngineFailed
from gateway.engines.kinds import connect
from gateway.fleet.fleet import Fleet
from tests.support.adapters import lent
from tests.support.keys import Client, controlled, operators
from tests.support.scripted_engine import MODEL, ScriptedEngine, until
from tests.support.turns import serving_app
from tests.unit.gateway_api.test_status import gateway

SECRET = "aws-credentials-of-this-host"
SPOKEN_TO: list[str] = []


@contextlib.asynccontextmanager
async def foreign(**how: Any) -> AsyncIterator[str]:
    """A server that is no engine, and has something to hide."""

    async def answer(request: web.Request) -> web.Response:
        SPOKEN_TO.append(request.path)
        return web.Response(text=f"x {SECRET}\n", **how)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with serving_app(app) as url:
        yield url


@pytest.mark.parametrize(
    ("url", "relay"),
    [
        ("http://169.254.169.254", None),
        ("http://[::ffff:169.254.169.254]:80", None),
        ("http://0.0.0.0:8000", None),
        ("http://8.8.8.8", None),
        ("http://127.0.0.1:1", "192.0.2.1:7070"),
    ],
)
async def test_an_address_outside_is_refused_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, relay: str | None
) -> None:
    monkeypatch.setattr(Fleet, "check", lambda *_: pytest.fail("it is asked"))
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (found, http):
        for check in (True, False):
            body = {"name": "e9", "url": url, "check": check, "relay": relay}
            told = await Client(http).expect(403, "", "POST", "/admin/engines", body)
            assert "is in no network for engines (start the gateway with --engine-networks" in told["error"]["message"]
        assert list(found.fleet.handles) == ["e0"]


async def test_a_gateway_for_others_takes_engines_where_it_was_told(tmp_path: Path) -> None:
    """By --engine, by registrations, or by --engine-networks."""
    async with ScriptedEngine("e0") as e0, ScriptedEngine("e1") as e1:
        body = {"name": "e1", "url": e1.url}
        for settings, status in (
            ({"host": "0.0.0.0"}, 403),
            ({"host": "0.0.0.0", "engine_networks": Networks.parse("10.0.0.0/8")}, 403),
            ({"host": "0.0.0.0", "engine_networks": Networks.parse("127.0.0.0/8")}, 201),
        ):
            async with controlled(tmp_path, **settings) as (found, _), operators(found) as client:
                await client.expect(status, "admin", "POST", "/admin/engines", body)
        async with controlled(tmp_path, e0, host="0.0.0.0") as (found, _), operators(found) as client:
            await client.expect(201, "admin", "POST", "/admin/engines", body)  # on a host that --engine names


@pytest.mark.parametrize("how", [{"status": 500}, {"status": 404}, {"status": 200}], ids=str)
async def test_nothing_that_a_foreign_server_answers_is_shown(tmp_path: Path, how: dict[str, Any]) -> None:
    async with ScriptedEngine("e0") as e0, foreign(**how) as url, gateway(tmp_path, e0) as (found, http):
        client = Client(http)
        for kind in ("vllm", "sglang"):
            body = {"name": f"odd-{kind}", "url": url, "kind": kind}
            told = await client.expect(503, "", "POST", "/admin/engines", body)
            assert SECRET not in str(told)
            assert f"GET {url}/" in told["error"]["message"]
            await client.expect(201, "", "POST", "/admin/engines", {**body, "check": False})
            await until(lambda: found.fleet.state.engines[EngineName(body["name"])].last_error, "the look at it")  # noqa: B023
            await client.expect(200, "", "DELETE", f"/admin/engines/{body['name']}")
        for path in ("/status", "/admin/timeline", "/metrics"):
            assert SECRET not in str(await client.send("", "GET", path))


async def test_bytes_of_what_speaks_no_http_are_not_shown(tmp_path: Path) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"SSH-2.0 {SECRET}\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server, ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        told = await Client(http).expect(503, "", "POST", "/admin/engines", {"name": "odd", "url": url})
        assert "it does not speak HTTP as it should" in told["error"]["message"]
        assert SECRET not in str(told)


async def test_what_an_engine_says_that_has_served_is_shown(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (found, http):
        state = found.fleet.state.engines[EngineName("e0")]
        e0.answers["/metrics"] = "the card is broken 1.x"
        found.fleet.suspect(EngineName("e0"))
        await until(lambda: state.last_error, "the look at it")
        assert "1.x" in state.last_error
        status = await Client(http).expect(200, "", "GET", "/status")
        assert "1.x" in status["engines"][0]["last_error"]


async def test_an_engine_sends_the_gateway_nowhere_else() -> None:
    """Within the same server a redirect is followed: vLLM sends from /metrics to /metrics/."""

    async def metrics(request: web.Request) -> web.Response:
        if not request.path.endswith("/"):
            raise web.HTTPTemporaryRedirect("/metrics/")
        return web.Response(text="vllm:num_requests_running 3\n")

    async def elsewhere(_: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": targets[0]})

    targets: list[str] = []
    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/metrics/", metrics)
    for path in ("/weight_info", "/update_weight_version"):
        app.router.add_route("*", path, elsewhere)
    async with foreign() as outside, serving_app(app) as url:
        engine = connect("vllm", url, lent(MODEL))
        try:
            assert (await engine.report()).running == 3
            SPOKEN_TO.clear()
            beyond = f"//{outside.removeprefix('http://')}/"
            for target, why in (
                (outside, "another server"),
                (f"{outside}/x", "another server"),
                (beyond, "another server"),
                ("https://127.0.0.1/", "another server"),
                ("http://[", "what is no address"),
                ("data:text/plain,x", "what is no address"),
                (f"{url}/weight_info", "for ever"),
                ("", "for ever"),
            ):
                targets[:] = [target]
                with pytest.raises(EngineFailed, match=f"it redirects (to )?{why}"):
                    await engine.weight_version()
            assert SPOKEN_TO == []
        finally:
            await engine.close()
