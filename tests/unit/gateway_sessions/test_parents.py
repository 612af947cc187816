"""Sessions of sub-agents over HTTP: a child has a live parent, ends with it, and may keep it from being idle."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.app import Gateway
from gateway.core.endings import Ended
from gateway.core.types import SessionId
from tests.support.gateway_shell import shell
from tests.support.scripted_engine import MODEL, ScriptedEngine, until
from tests.unit.gateway_api.test_status import gateway, get
from tests.unit.gateway_sessions.test_rewards import post, turn


async def made(http: aiohttp.ClientSession, name: str, parent: str | None = None, **fields: Any) -> None:
    await post(http, "/sessions", {"session_id": name, "parent_session_id": parent, **fields})


def live(found: Gateway) -> set[str]:
    return {state.session_id for state in found.sessions.live}


def set_idle(found: Gateway, seconds: float) -> None:
    object.__setattr__(found.sessions.config, "session_idle_s", seconds)


async def test_a_child_names_a_session_that_lives(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (found, http):
        for name in ("gone", "unrewarded", "given-up"):
            await turn(http, name, [5])
        await post(http, "/sessions/gone/finish", {"reward": 1.0})
        await post(http, "/sessions/unrewarded/finish", {})
        await post(http, "/sessions/given-up/abandon")
        for parent in ("gone", "unrewarded", "given-up"):
            told = await post(http, "/sessions", {"session_id": "c", "parent_session_id": parent}, 409)
            assert f"'{parent}' has ended, and can be no parent of c" in told["error"]["message"]
        for parent in ("nobody", "c"):
            told = await post(http, "/sessions", {"session_id": "c", "parent_session_id": parent}, 404)
            assert f"no session '{parent}' to be the parent of c" in told["error"]["message"]
        told = await post(http, "/sessions", {"blocks_parent": True}, 400)
        assert told["error"]["param"] == "blocks_parent"
        assert live(found) == {"unrewarded"}, "what is refused leaves nothing behind"
        await made(http, "p")
        await made(http, "c", "p")
        assert (await get(http, "/sessions/c"))["parent_session_id"] == "p"
        assert (await get(http, "/sessions/p"))["children"] == ["c"]


@pytest.mark.parametrize("end", ["finish", "finish without a reward", "abandon"])
async def test_children_end_with_their_parent_before_its_end_is_told(tmp_path: Path, end: str) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (found, http):
        await made(http, "p")
        for name, parent in (("busy", "p"), ("calm", "p"), ("told", "p"), ("grandchild", "calm"), ("other", None)):
            await made(http, name, parent)
        for name in ("p", "told"):
            await turn(http, name, [5])
        await post(http, "/sessions/told/finish", {})
        assert (await get(http, "/sessions/p"))["children"] == ["busy", "calm"]
        e0.hold_at = 2
        asked = {"model": MODEL, "prompt": [5], "max_tokens": 9}
        running = asyncio.create_task(post(http, "/s/busy/v1/completions", asked, 409))
        await until(lambda: found.sessions.running, "a running turn")
        path, body = ("abandon", {}) if end == "abandon" else ("finish", {"reward": 1.0} if end == "finish" else {})
        await post(http, f"/sessions/p/{path}", body)
        assert live(found) - {"p"} == {"told", "other"}, "what has ended by itself waits for its reward as ever"
        assert "its session was abandoned (its parent p has ended)" in (await running)["error"]["message"]
        again = await post(http, "/s/grandchild/v1/completions", asked, 409)
        assert "already abandoned" in again["error"]["message"]
        assert (await post(http, "/sessions/told/reward", {"reward": 0.5}))["state"] == "finished"


async def test_a_parent_is_not_idle_while_a_child_that_blocks_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.sessions.endings.EXPIRY_INTERVAL_S", 0.02)
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (found, http):
        for name in ("waits", "left", "alone"):
            await made(http, name)
        await made(http, "tool", "waits", blocks_parent=True)
        await made(http, "aside", "left")
        await turn(http, "tool", [5])
        e0.hold_at = 2
        asked = {"model": MODEL, "prompt": [5], "max_tokens": 9}
        running = [
            asyncio.create_task(post(http, f"/s/{name}/v1/completions", asked, status))
            for name, status in (("tool", 200), ("aside", 409))
        ]
        await until(lambda: len(found.sessions.running) == 2, "their running turns")
        set_idle(found, 0.0)
        await until(lambda: live(found) == {"waits", "tool"}, "the end of those that nobody waits for")
        await made(http, "later")
        await until(lambda: live(found) == {"waits", "tool"}, "another round, that spares them again")
        set_idle(found, 600.0)
        e0.go.set()
        await asyncio.gather(*running)
        before = time.time()
        await post(http, "/sessions/tool/finish", {"reward": 1.0})
        assert found.sessions.live.get(SessionId("waits")).touched_unix_s >= before, "idle from now on"
        set_idle(found, 0.0)
        await until(lambda: live(found) == set(), "its end, with nobody to wait for")


async def test_families_outlive_the_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.sessions.endings.EXPIRY_INTERVAL_S", 0.02)
    async with ScriptedEngine("e0") as e0:
        async with gateway(tmp_path, e0) as (_, http):
            for name in ("p", "q"):
                await made(http, name)
                await made(http, f"child-of-{name}", name, blocks_parent=True)
        async with shell(tmp_path, e0) as found:  # a death between an end and those that follow from it
            await found.endings._store.end(SessionId("q"), Ended("abandoned"))
        async with gateway(tmp_path, e0) as (again, http):
            await until(lambda: live(again) == {"p", "child-of-p"}, "the end of the one left behind")
            assert again.sessions.live.blocked(SessionId("p"))
            await post(http, "/sessions/p/abandon")
            assert live(again) == set()


@pytest.mark.parametrize(("finished", "state"), [(0, "abandoned"), (1, "closed")])
async def test_a_group_of_children_is_not_sampled_again_without_their_parent(
    tmp_path: Path, finished: int, state: str
) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (found, http):
        await made(http, "p")
        asked = {"size": 3, "group_min": 1, "resample_max": 9, "session": {"parent_session_id": "p"}}
        group = await post(http, "/groups", asked)
        first, second, _ = (member["session_id"] for member in group["sessions"])
        assert "replacement" in await post(http, f"/sessions/{first}/abandon")
        if finished:
            await turn(http, second, [5])
            await post(http, f"/sessions/{second}/finish", {"reward": 1.0})
        await post(http, "/sessions/p/abandon")
        assert live(found) == set()
        told = await get(http, f"/groups/{group['group_id']}")
        assert (told["state"], len(told["finished"])) == (state, finished)
        await post(http, "/groups", asked, 409)
