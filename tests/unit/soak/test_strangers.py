"""Strangers who are refused are counted, and one that is let in fails the run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from protos.access.credentials import CREDENTIALS_VARIABLE, Credentials
from tests.soak.access import Access
from tests.soak.judge import Judge
from tests.soak.strangers import Strangers
from tests.support.secured_relay import secured

pytestmark = pytest.mark.slow

OPEN_TO_ANYBODY, AWAY = web.HTTPOk, web.HTTPServiceUnavailable


@pytest.fixture(scope="module")
def access(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Access]:
    """Made by the commands that a soak runs, once: nothing here changes it."""
    access = Access(tmp_path_factory.mktemp("access"))
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv(CREDENTIALS_VARIABLE, raising=False)
        asyncio.run(access.make({"relay-1": "127.0.1.1"}, ["gateway-1"]))
        yield access


async def tried(access: Access, answer: type[web.HTTPException]) -> Judge:
    """One round at a relay with credentials and at a gateway that answers like that."""

    async def sample(_: web.Request) -> web.Response:
        return web.Response(status=answer.status_code)

    app, judge = web.Application(), Judge(1)
    app.router.add_post("/experience/sample", sample)
    async with TestServer(app) as gateway, secured(Credentials(access.of("relay-1"))) as (_, relay):
        url = str(gateway.make_url("")).rstrip("/")
        await Strangers(access, {"relay-1": relay}, {"gateway-1": url}, judge).once()
    return judge


async def test_who_is_refused_is_counted(access: Access) -> None:
    judge = await tried(access, web.HTTPForbidden)
    assert not judge.failures
    assert judge.counts["strangers refused"] == 3, "nobody's handshake ends without a word"


async def test_a_fault_says_nothing(access: Access) -> None:
    judge = await tried(access, AWAY)
    assert (judge.failures, judge.counts["strangers refused"]) == ({}, 1)


async def test_one_that_is_let_in_fails_the_run(access: Access) -> None:
    judge = await tried(access, OPEN_TO_ANYBODY)
    assert judge.failures == {"stranger let in": 2}
    assert "stranger let in: nobody, at gateway-1" in judge.findings


async def test_credentials_are_for_their_holders_alone(access: Access) -> None:
    held = {name: Credentials(access.of(name)).material.identity for name in ("relay-1", "gateway-1", "engine-host")}
    assert {name: str(identity) for name, identity in held.items()} == {
        "relay-1": "relay relay-1",
        "gateway-1": "gateway gateway-1",
        "engine-host": "engine-host engine-host",
    }
    assert access.key_file.stat().st_mode & 0o777 == 0o600
    assert await asyncio.to_thread(access.key_file.read_text) == (
        f"agent runner {access.keys['runner']}\ntrainer trainer {access.keys['trainer']}\n"
    )
