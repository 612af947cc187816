"""Requests whose prompts are made in a thread: what happens meanwhile on the event loop changes nothing under them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from gateway.api.calls import history
from gateway.api.calls.history import Prompt
from gateway.api.openai.parser import LONG_BODY_BYTES
from gateway.ports import SessionView
from tests.support.scripted_engine import MODEL, ScriptedEngine
from tests.unit.gateway_api.test_status import gateway, get
from tests.unit.gateway_sessions.test_rewards import post, turn

LONG = {"model": MODEL, "prompt": [500] * (LONG_BODY_BYTES // 4), "max_tokens": 2, "return_token_ids": True}
HANG_S = 60.0


@pytest.mark.parametrize("session", [None, "s"], ids=["unnamed", "session"])
async def test_a_key_that_comes_twice_at_once_is_one_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, session: str | None
) -> None:
    both, make = threading.Barrier(2), history.completion_prompt

    def making(*args: Any, **how: Any) -> Prompt:
        both.wait(HANG_S)
        return make(*args, **how)

    monkeypatch.setattr(history, "completion_prompt", making)
    body = LONG if session is None else {**LONG, "session_id": session}
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):

        async def ask() -> tuple[str, str | None]:
            async with http.post("/v1/completions", json=body, headers={"Idempotency-Key": "k"}) as answer:
                return (await answer.json())["id"], answer.headers.get("X-Laminar-Joined")

        answers = await asyncio.gather(ask(), ask())
        assert len({turn_id for turn_id, _ in answers}) == 1
        assert sorted(joined or "" for _, joined in answers) == ["", "true"]
        assert len(e0.requests) == 1
        assert (await get(http, "/status"))["sessions"]["live"] == (0 if session is None else 1)


async def test_a_turn_that_ends_while_another_prompt_is_made_disturbs_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    making, ended = threading.Event(), threading.Event()
    make, seen = history.completion_prompt, list[int]()

    def slowly(codec: Any, view: SessionView, prompt: Any, **how: Any) -> Prompt:
        if len(prompt) == len(LONG["prompt"]):  # type: ignore[arg-type]
            turns = iter(view.tree.turns.values())
            next(turns)
            making.set()
            assert ended.wait(HANG_S)
            seen.append(1 + len(list(turns)))
        return make(codec, view, prompt, **how)

    monkeypatch.setattr(history, "completion_prompt", slowly)
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):
        await turn(http, "s", [5])
        asked = asyncio.create_task(post(http, "/s/s/v1/completions", LONG))
        assert await asyncio.to_thread(making.wait, HANG_S)
        await turn(http, "s", [6])
        ended.set()
        assert len((await asked)["choices"][0]["token_ids"]) == 2
        assert seen == [1]
        assert (await get(http, "/sessions/s"))["turns"] == 3
