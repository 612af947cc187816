"""Mock engines for the pictures of the dashboard: they take versions, read prompts at a pace, and say whole sentences.

`python -m tests.ui.engines --engines 80 --tokenizer DIR --ready-file FILE`. Built on the mock engines of the gateway's
benchmark, in one process, whose answers have no prefill and no text.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import random
from pathlib import Path
from typing import Any

import uvloop

from gateway.tokens import Codec
from protos.process import write_ready_file
from tests.bench.gateway.mock_engine import BLOCK, DONE, MODEL, STARTED_UNIX_S, STREAM_HEAD, Connection, Engine, chunk

CONTEXT_TOKENS = 2048
KV_TOKENS = 64 * 1024
PREFILL_TOKENS_PER_S = 100.0
LOAD_S = 4.0
SAYINGS = (
    "I look at the test first. It fails in the parser, where an empty line ends the record too early.",
    "The list is sorted twice. One pass is enough, if the key is computed before the loop and kept.",
    "Let me run the program with a smaller input, and print the state after each step.",
    "x squared plus three x is ten, so x is two or minus five. Only two is positive.",
    "The file is opened but never closed when the second read fails. A context manager mends that.",
    "There are seven ways to reach the third step, and thirteen for the fourth: it is a sum of three before it.",
)


class SayingEngine(Engine):
    """One engine. `version`: as its last load left it."""

    def __init__(self, number: int, rate: float, codec: Codec) -> None:
        super().__init__(rate, 0, codec)
        self.version, self.tokens = "0", 0
        self.random = random.Random(number)
        self.sayings = [codec.encode(" " + text) for text in SAYINGS]
        [self.eos] = codec.eos_ids

    def answer(self, length: int) -> list[int]:
        """So many ids of sentences, and the end of sequence."""
        ids: list[int] = []
        while len(ids) < length - 1:
            ids += self.random.choice(self.sayings)
        return [*ids[: length - 1], self.eos]

    def page(self, path: str) -> bytes | None:
        if path == "/weight_info":
            return json.dumps({"weight_version": self.version}).encode()
        if path == "/v1/models":
            model = {"id": MODEL, "max_model_len": CONTEXT_TOKENS, "dtype": "bfloat16"}
            return json.dumps({"object": "list", "data": [model]}).encode()
        return super().page(path)

    def _metrics(self) -> bytes:
        return (
            f"process_start_time_seconds {STARTED_UNIX_S}\n"
            f"vllm:kv_cache_usage_perc {min(1.0, self.tokens / KV_TOKENS)}\n"
            f"vllm:num_requests_running {self.running}\nvllm:num_requests_waiting 0\n"
            f'vllm:cache_config_info{{num_gpu_blocks="{KV_TOKENS // BLOCK}",block_size="{BLOCK}"}} 1\n'
        ).encode()


class SayingConnection(Connection):
    """Streams of a `SayingEngine`, and its control routes."""

    _engine: SayingEngine

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._engine.tokens -= self._held
        super().connection_lost(exc)

    def _control(self, path: str, body: bytes) -> None:
        wait_s = 0.0
        if path == "/update_weights":
            wait_s = LOAD_S * self._engine.random.uniform(0.6, 1.4)
        if path == "/finish_weight_update":
            self._engine.version = json.loads(body)["weight_version"]
        self._loop.call_later(wait_s, self._answer, b"{}")

    def _generate(self, body: dict[str, Any], chat: bool) -> None:
        engine = self._engine
        self._ids = engine.answer(max(2, int(body["max_tokens"] * engine.random.betavariate(1.2, 3.0))))
        self._at, self._step = 0, body.get("stream_interval") or 1
        self._held = len(body["prompt"]) + len(self._ids)
        engine.running += 1
        engine.tokens += self._held
        self._turn = None
        self._transport.write(STREAM_HEAD)
        self._timer = self._loop.call_later(len(body["prompt"]) / PREFILL_TOKENS_PER_S, self._say)

    def _say(self) -> None:
        step = self._step if self._at else 1
        ids = self._ids[self._at : self._at + step]
        self._at += len(ids)
        over = self._at >= len(self._ids)
        self._transport.write(chunk(self._event(ids, "stop" if over else None)))
        if not over:
            self._timer = self._loop.call_later(min(step, len(self._ids) - self._at) / self._engine.rate, self._say)
            return
        self._timer = None
        self._engine.running -= 1
        self._engine.tokens -= self._held
        self._transport.write(DONE)

    def _event(self, ids: list[int], finish: str | None) -> bytes:
        logprobs = [-self._engine.random.expovariate(1.6) for _ in ids]
        choice = {"index": 0, "text": "", "token_ids": ids, "finish_reason": finish}
        choice["logprobs"] = {"token_logprobs": logprobs, "tokens": [""] * len(ids), "top_logprobs": None}
        return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


async def serve(engines: int, rate: float, codec: Codec, ready_file: Path) -> None:
    loop, servers = asyncio.get_running_loop(), []
    for number in range(engines):
        make = functools.partial(SayingConnection, SayingEngine(number, rate, codec))
        servers.append(await loop.create_server(make, "127.0.0.1", 0, backlog=4096))
    urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    write_ready_file(ready_file, {f"e{number:02}": url for number, url in enumerate(urls)})
    await asyncio.gather(*(server.serve_forever() for server in servers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=80)
    parser.add_argument("--rate", type=float, default=1.0, help="tokens per second of a turn")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--ready-file", type=Path, required=True)
    given = parser.parse_args()
    uvloop.run(serve(given.engines, given.rate, Codec.load(given.tokenizer), given.ready_file))


if __name__ == "__main__":
    main()
