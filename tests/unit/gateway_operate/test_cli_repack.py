"""`gateway repack`: what it asks, what it tells."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from click.testing import CliRunner

from gateway.cli import cli
from gateway.operate.repack_view import describe, request_plans
from protos.errors import InvalidRequest, Unavailable
from tests.support.turns import serving_app

PLAN: dict[str, Any] = {
    "version": 3,
    "freed": [{"engine": "e1"}],
    "moves": [{}, {}],
    "price_s": 0.5,
    "gain_s": 20.0,
    "reasons": ["e1 goes to e0: 2 turns, 500 tokens to prefill again", "e2 stays: its intake is open"],
}


@pytest.mark.parametrize(("dry_run", "method"), [(True, "GET"), (False, "POST")])
async def test_a_dry_run_only_looks(dry_run: bool, method: str) -> None:
    asked: list[str] = []

    async def plans(request: web.Request) -> web.Response:
        asked.append(request.method)
        return web.json_response({"plans": [PLAN]})

    app = web.Application()
    app.router.add_route("*", "/admin/repack", plans)
    async with serving_app(app) as url:
        assert await request_plans(f"{url}/", dry_run=dry_run) == {"plans": [PLAN]}
    assert asked == [method]


async def test_who_does_not_answer_is_named() -> None:
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        await request_plans("http://127.0.0.1:1", dry_run=True)
    app = web.Application()
    async with serving_app(app) as url:
        with pytest.raises(Unavailable, match=f"what answers at {url} is no gateway: 404"):
            await request_plans(url, dry_run=True)


@pytest.mark.parametrize("url", ["", "127.0.0.1:8080", "ftp://h", "http://"])
async def test_what_is_no_url_is_told_the_form(url: str) -> None:
    with pytest.raises(
        InvalidRequest, match=r"is no gateway's address \(such as http://127\.0\.0\.1:8080, or unix:PATH"
    ):
        await request_plans(url, dry_run=True)


def test_people_read_what_and_why() -> None:
    lines = describe({"plans": [PLAN]}, dry_run=True)
    assert lines[0] == "version 3: would free e1 by 2 moves, for 0.50 s of prefill against 20.00 s"
    assert [line.strip() for line in lines[1:]] == PLAN["reasons"]
    still = describe({"plans": [{**PLAN, "freed": [], "moves": []}]}, dry_run=False)
    assert still[0] == "version 3: frees no engine"
    assert "nothing to pack" in describe({"plans": []}, dry_run=True)[0]


def test_the_command_fails_when_no_gateway_answers() -> None:
    result = CliRunner().invoke(cli, ["repack", "--dry-run", "--url", "http://127.0.0.1:1"])
    assert result.exit_code == 1
    assert "no gateway answers at http://127.0.0.1:1" in result.output
