"""An engine that says what a test wants, over real HTTP in vLLM's dialect: answers that no tiny model gives reliably.

Runs in a thread with a loop of its own, so that tests may block.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from gateway.tokens import Codec

METRICS = """\
process_start_time_seconds 1.0
vllm:num_requests_running 0
vllm:num_requests_waiting 0
vllm:kv_cache_usage_perc 0.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1
"""


@dataclass
class SayingEngine:
    """`answer`: the prompt's text to what is said; the end-of-sequence token is added. `chunk`: tokens per event."""

    codec: Codec
    answer: Callable[[str], str]
    chunk: int = 3
    eos_id: int = 2

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Serves on a free port; yields the URL."""
        address: Future[str] = Future()
        ended = asyncio.Event()
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=lambda: loop.run_until_complete(self._serve(address, ended)))
        thread.start()
        try:
            yield address.result(60.0)
        finally:
            loop.call_soon_threadsafe(ended.set)
            thread.join(60.0)
            loop.close()

    async def _serve(self, address: Future[str], ended: asyncio.Event) -> None:
        app = web.Application(client_max_size=1 << 24)
        models = {"data": [{"id": "policy", "max_model_len": 4096}]}
        app.router.add_get("/metrics", _always(METRICS))
        app.router.add_get("/health", _always(""))
        app.router.add_get("/weight_info", _always(json.dumps({"weight_version": "0"})))
        app.router.add_get("/is_paused", _always(json.dumps({"is_paused": False})))
        app.router.add_get("/v1/models", _always(json.dumps(models)))
        app.router.add_post("/v1/completions", self._completions)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address.set_result(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await ended.wait()
        await runner.cleanup()

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        said = [*self.codec.encode(self.answer(self.codec.decode(body["prompt"]))), self.eos_id][: body["max_tokens"]]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        events = b"".join(_event(said, start, self.chunk) for start in range(0, len(said), self.chunk))
        await response.write(events + b"data: [DONE]\n\n")  # all at once: faster than any reader
        return response


def _always(text: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text=text)

    return handler


def _event(said: list[int], start: int, chunk: int) -> bytes:
    ids = said[start : start + chunk]
    last = start + chunk >= len(said)
    choice: dict[str, Any] = {
        "index": 0,
        "text": "",
        "token_ids": ids,
        "logprobs": {"token_logprobs": [-0.25] * len(ids), "tokens": [""] * len(ids), "top_logprobs": None},
        "finish_reason": ("stop" if said[-1] == 2 else "length") if last else None,
    }
    if last:
        choice["weight_versions"] = [{"version": "0", "start": 0, "end": len(said)}]
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
