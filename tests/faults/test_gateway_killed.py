"""kill -9 of the gateway with 200 turns in flight: who asks again gets the answer, with the tokens of before."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from tests.support import processes
from tests.support.processes import Daemon
from tests.support.scripted_engine import ScriptedEngine, scripted, until
from tests.support.words import tokenizer

pytestmark = pytest.mark.slow

TURNS, BUDGET = 200, 400
HELD_AT = BUDGET * 6 // 10
KEPT_SHARE_MIN = 0.95
PAUSE_S, PAUSE_BEFORE_KILL_S = 0.1, 1.0
"""Of an engine before each event of four tokens; slow at last: what a loaded machine has not read yet is no loss."""


def serve(directory: Path, engines: Sequence[ScriptedEngine], port: int) -> Daemon:
    flags = [f"--engine={e.name}=vllm={e.url}" for e in engines]
    command = ["gateway", "serve", "--model=policy", f"--tokenizer={tokenizer(directory / 'model')}"]
    where = [f"--data={directory / 'data'}", f"--port={port}", "--max-running=200", "--intake-batch=1000"]
    return processes.start("gateway", [*command, *where, *flags], directory)


def prompt_of(number: int) -> list[int]:
    return [1 + number // 500, 1 + number % 500, 7]


async def ask_until_answered(http: aiohttp.ClientSession, number: int) -> tuple[list[int], list[float]]:
    """A client with its own retries: half of them stream, half name a session, the others send an idempotency key."""
    body: dict[str, Any] = {"model": "policy", "prompt": prompt_of(number), "max_tokens": BUDGET}
    body |= {"logprobs": 0, "return_token_ids": True, "stream": number % 2 == 0}
    headers = {"Idempotency-Key": f"key-{number}"}
    if number % 4 < 2:
        body["session_id"], headers = f"s{number}", {}
    while True:
        try:
            async with http.post("/v1/completions", json=body, headers=headers) as answer:
                if answer.status == 503:  # engines were not looked at yet
                    raise EOFError
                assert answer.status == 200, await answer.text()
                return tokens_of(await answer.text(), body["stream"])
        except (aiohttp.ClientError, ConnectionError, EOFError):
            await asyncio.sleep(0.2)


def tokens_of(text: str, stream: bool) -> tuple[list[int], list[float]]:
    events = [text]
    if stream:
        events = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
        if events[-1:] != ["[DONE]"]:
            raise EOFError("the stream broke off")
        del events[-1]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    ids = [i for choice in choices for i in choice.get("token_ids") or ()]
    return ids, [p for choice in choices for p in (choice.get("logprobs") or {}).get("token_logprobs", ())]


async def sdk_asks(client: openai.AsyncOpenAI, number: int) -> list[int]:
    """The official client, which retries by itself: no session, no key."""
    answer = await client.completions.create(
        model="policy", prompt=prompt_of(number), max_tokens=BUDGET, extra_body={"return_token_ids": True}
    )
    ids: list[int] = answer.choices[0].token_ids  # type: ignore[attr-defined]
    return ids


async def keeps_up(http: aiohttp.ClientSession, engines: Sequence[ScriptedEngine]) -> None:
    """Until the gateway has read and written nearly all that engines said, and they still say more."""
    begun = sum(e.said_tokens for e in engines)
    async with asyncio.timeout(180):
        while True:
            said_tokens = sum(e.said_tokens for e in engines)
            async with http.get("/status") as answer:
                pool = (await answer.json())["partial_response_pool"]
            on_disk = pool["appended_tokens"] - pool["buffered_tokens"]
            if on_disk >= 0.98 * said_tokens and said_tokens - begun >= 4 * TURNS:
                return
            await asyncio.sleep(0.1)


async def test_kill_9_with_200_turns_in_flight(tmp_path: Path, request: pytest.FixtureRequest, port: int) -> None:
    async with (
        ScriptedEngine("e0", chunk=4, pause_s=PAUSE_S, hold_at=HELD_AT) as e0,
        ScriptedEngine("e1", chunk=4, pause_s=PAUSE_S, hold_at=HELD_AT) as e1,
        aiohttp.ClientSession(
            f"http://127.0.0.1:{port}", connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(None)
        ) as http,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="unused", max_retries=12) as sdk,
    ):
        engines = (e0, e1)
        gateway = await asyncio.to_thread(serve, tmp_path, engines, port)
        request.addfinalizer(gateway.kill)
        asking = [asyncio.create_task(ask_until_answered(http, n)) for n in range(TURNS * 3 // 4)]
        by_sdk = [asyncio.create_task(sdk_asks(sdk, n)) for n in range(TURNS * 3 // 4, TURNS)]
        # All at one place: where they begin seconds apart, the first would be over before the last is half through.
        await until(lambda: sum(e.said_tokens for e in engines) == TURNS * HELD_AT, "every turn held")
        for engine in engines:
            engine.pause_s = PAUSE_BEFORE_KILL_S
            engine.go.set()
        await keeps_up(http, engines)
        assert sum(len(e.requests) for e in engines) == TURNS
        gateway.kill()
        generated = sum(e.said_tokens for e in engines)
        before = [len(e.requests) for e in engines]
        for engine in engines:
            engine.pause_s = PAUSE_S
        gateway = await asyncio.to_thread(serve, tmp_path, engines, port)
        request.addfinalizer(gateway.kill)
        answers = await asyncio.wait_for(asyncio.gather(*asking), 300)
        sdk_answers = await asyncio.wait_for(asyncio.gather(*by_sdk), 300)
        assert [ids for ids, _ in answers] + list(sdk_answers) == [
            scripted(prompt_of(n), BUDGET)[0] for n in range(TURNS)
        ]
        assert [probs for _, probs in answers] == [scripted(prompt_of(n), BUDGET)[1] for n in range(TURNS * 3 // 4)]
        resumed = [a for e, b in zip(engines, before, strict=True) for a in e.requests[b:]]
        kept = sum(len(a.prompt) - 3 for a in resumed)
        print(f"{generated} tokens before the kill, {kept} kept ({kept / generated:.4f}), {len(resumed)} turns resumed")
        assert len(resumed) == TURNS, "each goes on once"
        assert kept >= KEPT_SHARE_MIN * generated
        assert gateway.stop() == 0, gateway.log()[-3000:]
