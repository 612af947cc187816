"""A request that an engine refuses is its client's to hear of, at once and by its status, through every door."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.app import start
from gateway.config import EngineSpec
from gateway.core.types import EngineName
from tests.support.scripted_engine import MODEL, Cut, ScriptedEngine, until
from tests.support.sglang import server
from tests.support.sglang.engine import Engine
from tests.support.sglang.server import Server
from tests.support.sglang.wire import Refused
from tests.support.turns import serving_app
from tests.unit.gateway_fleet.test_mixed_fleet import with_tokenizer

SAID = "that cannot be compiled"
MESSAGES = [{"role": "user", "content": "one"}]
DOORS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "one"},
    "/v1/responses": {"input": "one"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/inference/v1/generate": {"token_ids": [5, 6]},
}


def refuses(*_: Any) -> Any:
    raise Refused(SAID)


@contextlib.asynccontextmanager
async def sglang(*, early: bool, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[str, str, Callable[[], int]]]:
    """Kind, URL and the number of requests. `early`: refused before it is queued, else where grammars are compiled."""
    engine, num = Engine("w0", "0", MODEL, encode=lambda _: []), 0
    if early:
        monkeypatch.setattr(server, "check", refuses)
    else:
        engine.encode = refuses

    async def counted(request: Any, handler: Any) -> Any:
        nonlocal num
        num += request.path == "/generate"
        return await handler(request)

    app = Server(engine).app()
    app.middlewares.append(server.web.middleware(counted))
    async with serving_app(app) as url:
        yield "sglang", url, lambda: num


@contextlib.asynccontextmanager
async def vllm(*, event: bool, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[str, str, Callable[[], int]]]:
    """`event`: the status is 200 before it looks at the prompt."""
    async with ScriptedEngine("e", always=None if event else Cut("400")) as engine:
        if event:
            error = {"error": {"message": SAID, "type": "BadRequestError", "code": 400}}
            monkeypatch.setattr(engine, "_event", lambda *_: b"data: " + json.dumps(error).encode() + b"\n\n")
        yield "vllm", engine.url, lambda: len(engine.requests)


WAYS = {
    "SGLang's check": (sglang, {"early": True}, SAID),
    "SGLang's grammar": (sglang, {"early": False}, SAID),
    "vLLM's status": (vllm, {"event": False}, "scripted to answer 400"),
    "vLLM's event": (vllm, {"event": True}, SAID),
}


@pytest.mark.parametrize("how", WAYS)
async def test_an_engines_refusal_is_the_clients_through_every_door(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    way, flags, said = WAYS[how]
    async with (
        way(**flags, monkeypatch=monkeypatch) as (kind, url, num_asked),
        way(**flags, monkeypatch=monkeypatch) as (_, other, num_other),
    ):
        specs = (EngineSpec("e0", kind, url, None), EngineSpec("e1", kind, other, None))
        found = await start(with_tokenizer(tmp_path, *specs))
        states = found.fleet.state.engines
        await until(lambda: {e.status for e in states.values()} == {"serving"}, "both engines")
        calls = [(path, {**body, "stream": stream}) for path, body in DOORS.items() for stream in (False, True)]
        async with aiohttp.ClientSession(found.url) as http:
            for number, (path, body) in enumerate(calls):
                async with http.post(path, json={"model": MODEL, **body}) as answer:
                    assert answer.status == 400, (path, await answer.text())
                    told = await answer.json()
                assert said in told["error"]["message"], path
                assert path != "/v1/messages" or told["type"] == "error"
                assert num_asked() + num_other() == number + 1, "nobody else was asked"
        assert found.sessions.counters.turns_cut == 0
        assert [states[EngineName(name)].suspicion for name in ("e0", "e1")] == ["", ""]
        await found.close(1.0)
