"""Mock engines in one process: vLLM's dialect over plain asyncio protocols, so that they are not the bottleneck.

They stand apart from the scripted engine of `gateway.faultkit`, which costs more for each event than the gateway does.

`python -m tests.bench.gateway.mock_engine --engines 4 --rate 50` prints their addresses as one JSON line. Every event
is prebuilt bytes. A stream sends `stream_interval` tokens per event (the body's; 1 unless told), `--rate` tokens per
second, and so long a whole answer takes; rate 0 sends all at once.

`GET /bench/sent` tells how many tokens an engine's timed streams have had, and in how many events; `GET /bench/turns`
what its latest timed streams were asked and how far they came. With `--cache-tokens` and `--tokenizer`,
`GET /bench/prefix` tells how many of the prompts' tokens it had seen before. A text becomes ids through the chat
template, and an answer's text becomes the ids again that it was made from: for who sends text and for who sends ids the
same blocks are the same.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import uvloop

from gateway.tokens import Codec

MODEL = "policy"
WORDS = (" the", " turn", " goes", " on", " where", " there", " is", " room")
FIRST_ID, NUM_IDS = 300, 8
BLOCK = 16  # tokens of one block of the prefix cache
CONTEXT_TOKENS = 32_768
KV_TOKENS = 100_000_000  # as told: never what limits the number of streams here
STARTED_UNIX_S = time.time()
NAMING = 3  # ids of a prompt that tell one stream from another
TURNS_MAX = 10_000  # streams told of, the latest


@dataclass(slots=True)
class Turn:
    """A timed stream. Times are `time.monotonic()`: one clock for all processes of a machine."""

    name: tuple[int, ...]  # the prompt's first ids; none of a text
    prompt_tokens: int
    tokens: int
    interval: int
    begun_at: float
    sent: int = 0
    ended_at: float | None = None


class PrefixCache:
    """What an engine's KV cache would hold: blocks chained by hash, least recently used out first."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.tokens = 0
        self.hits = 0

    def take(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """A prompt came: counts what of it is held, then holds it, with the answer that will follow."""
        self.tokens += len(prompt)
        held, missed = 0, False
        for block in self._chain((*prompt, *answer)):
            missed = missed or block not in self._blocks
            held += not missed
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        self.hits += min(held * BLOCK, len(prompt))
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    @staticmethod
    def _chain(ids: Sequence[int]) -> list[int]:
        found, last = [], 0
        for at in range(0, len(ids) - BLOCK + 1, BLOCK):
            last = hash((last, ids[at : at + BLOCK]))
            found.append(last)
        return found


@functools.lru_cache(4096)
def event(count: int, first: int, chat: bool, tokens: bool, finish: str | None, prompt_ids: str | None) -> bytes:
    """One chunk with tokens `first` to `first + count` of an answer, in vLLM's shape."""
    numbers = range(first, first + count)
    words = [WORDS[n % NUM_IDS] for n in numbers]
    choice: dict[str, Any] = {"index": 0}
    if chat:
        choice["delta"] = {"content": "".join(words)}
    else:
        choice["text"] = "".join(words)
    choice["logprobs"] = None
    if tokens:
        choice["logprobs"] = {
            "text_offset": list(range(first, first + count)),
            "token_logprobs": [-0.6931471824645996 - (n % 7) / 10 for n in numbers],
            "tokens": words,
            "top_logprobs": [{word: -0.6931471824645996} for word in words],
        }
        choice["token_ids"] = [FIRST_ID + n % NUM_IDS for n in numbers]
    choice |= {"finish_reason": finish, "stop_reason": None}
    head = {"id": "cmpl-7f2c6d8ad8f14f6f", "object": "text_completion", "created": 1_700_000_000, "model": MODEL}
    if chat:
        head |= {"id": "chatcmpl-7f2c6d8ad8f14f6f", "object": "chat.completion.chunk"}
    return b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def answer_ids(count: int) -> list[int]:
    return [FIRST_ID + n % NUM_IDS for n in range(count)]


def whole(count: int, chat: bool, codec: Codec | None) -> bytes:
    text = "".join(WORDS[n % NUM_IDS] for n in range(count)) if codec is None else codec.decode(answer_ids(count))
    said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    choice = {"index": 0, **said, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    usage = {"prompt_tokens": 512, "completion_tokens": count, "total_tokens": 512 + count}
    kind = "chat.completion" if chat else "text_completion"
    body = {"id": "cmpl-7f2c", "object": kind, "created": 1_700_000_000, "model": MODEL, "choices": [choice]}
    return json.dumps({**body, "usage": usage}).encode()


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Engine:
    """One engine: what its connections share."""

    def __init__(self, rate: float, cache_tokens: int, codec: Codec | None) -> None:
        self.rate = rate
        self.codec = codec
        self.running = 0
        self.tokens_sent = self.events_sent = 0
        self.turns = deque[Turn](maxlen=TURNS_MAX)
        self.cache = PrefixCache(cache_tokens // BLOCK) if cache_tokens else None

    def page(self, path: str) -> bytes | None:
        """What a GET is answered; None: nothing is there."""
        info = {"model_path": MODEL, "served_model_name": MODEL, "max_total_num_tokens": KV_TOKENS}
        pages: dict[str, Any] = {
            "/health": {},
            "/health_generate": {},
            "/is_paused": {"is_paused": False},
            "/weight_info": {"weight_version": "1"},
            "/v1/models": {"object": "list", "data": [{"id": MODEL, "max_model_len": CONTEXT_TOKENS}]},
            "/model_info": info,
            "/get_model_info": info,
            "/server_info": info,
            "/get_server_info": info,
            "/bench/sent": {"tokens": self.tokens_sent, "events": self.events_sent},
            "/bench/prefix": {"tokens": self.cache.tokens, "hits": self.cache.hits} if self.cache else {},
        }
        if path == "/metrics":
            return self._metrics()
        if path == "/bench/turns":
            return json.dumps([asdict(turn) for turn in self.turns]).encode()
        return json.dumps(pages[path]).encode() if path in pages else None

    def _metrics(self) -> bytes:
        return (
            f"process_start_time_seconds {STARTED_UNIX_S}\nvllm:kv_cache_usage_perc 0.1\n"
            f"vllm:num_requests_running {self.running}\nvllm:num_requests_waiting 0\n"
            f'vllm:cache_config_info{{num_gpu_blocks="{KV_TOKENS // BLOCK}",block_size="{BLOCK}"}} 1\n'
        ).encode()


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection, kept alive; requests one after the other."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._turn: Turn | None = None  # None: a whole answer
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._engine.running -= 1
            if self._turn is not None:
                self._turn.ended_at = time.monotonic()

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._received[:end]).lower()
        if not head.startswith((b"get ", b"post ")):  # a router that tries whether gRPC is spoken here
            self._transport.close()
            return
        at = head.find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r", 1)[0]) if at >= 0 else 0
        if len(self._received) < end + 4 + length:
            return
        body = bytes(self._received[end + 4 : end + 4 + length])
        del self._received[: end + 4 + length]
        method, path, _ = head.split(b" ", 2)
        if method == b"get":
            self._answer(self._engine.page(path.decode().partition("?")[0]))
        elif path in (b"/v1/completions", b"/v1/chat/completions"):
            self._generate(json.loads(body), chat=b"chat" in path)
        else:
            self._control(path.decode(), body)

    def _control(self, path: str, body: bytes) -> None:
        """A call that is no generation."""
        self._answer(b"{}")

    def _answer(self, page: bytes | None) -> None:
        status = b"200 OK" if page is not None else b"404 Not Found"
        page = page or b"{}"
        self._transport.write(
            b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (status, len(page), page)
        )

    def _generate(self, body: dict[str, Any], chat: bool) -> None:
        total = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        if self._engine.cache is not None:
            self._engine.cache.take(_prompt_ids(body, chat, self._engine.codec), answer_ids(total))
        if not body.get("stream"):
            self._answer_whole(whole(total, chat, self._engine.codec), total)
            return
        tokens = body.get("logprobs") is not None and bool(body.get("return_token_ids"))
        interval = body.get("stream_interval") or 1
        self._transport.write(STREAM_HEAD)
        if self._engine.rate <= 0:
            for first in range(0, total, interval):
                count = min(interval, total - first)
                finish = "length" if first + count >= total else None
                self._transport.write(chunk(event(count, first, chat, tokens, finish, None)))
            self._transport.write(DONE)
            return
        self._engine.running += 1
        self._due = self._loop.time()
        self._sent, self._total, self._interval, self._chat, self._tokens = 0, total, interval, chat, tokens
        prompt = body.get("prompt")
        ids = prompt if isinstance(prompt, list) else []
        self._turn = Turn(tuple(ids[:NAMING]), len(ids), total, interval, time.monotonic())
        self._engine.turns.append(self._turn)
        self._timer = self._loop.call_later(0, self._decode)

    def _answer_whole(self, page: bytes, total: int) -> None:
        if self._engine.rate <= 0:
            self._answer(page)
            return
        self._engine.running += 1
        self._turn = None
        self._timer = self._loop.call_later(total / self._engine.rate, self._end_whole, page)

    def _end_whole(self, page: bytes) -> None:
        self._timer = None
        self._engine.running -= 1
        self._answer(page)

    def _decode(self) -> None:
        """One event; the first has one token, as vLLM's has."""
        count = min(self._interval if self._sent else 1, self._total - self._sent)
        finish = "length" if self._sent + count >= self._total else None
        first = self._sent % NUM_IDS
        self._transport.write(chunk(event(count, first, self._chat, self._tokens, finish, None)))
        assert self._turn is not None
        self._sent += count
        self._turn.sent = self._sent
        self._engine.tokens_sent += count
        self._engine.events_sent += 1
        if finish is not None:
            self._timer = None
            self._turn.ended_at = time.monotonic()
            self._engine.running -= 1
            self._transport.write(DONE)
            return
        self._due += min(self._interval, self._total - self._sent) / self._engine.rate
        self._timer = self._loop.call_at(self._due, self._decode)


def _prompt_ids(body: dict[str, Any], chat: bool, codec: Codec | None) -> Sequence[int]:
    assert codec is not None, "prefixes are counted in tokens: --tokenizer"
    if chat:
        return codec.render(body["messages"])
    return codec.encode(body["prompt"]) if isinstance(body["prompt"], str) else body["prompt"]


async def serve(engines: int, rate: float, cache_tokens: int, codec: Codec | None) -> None:
    loop = asyncio.get_running_loop()
    servers = []
    for _ in range(engines):
        engine = Engine(rate, cache_tokens, codec)
        servers.append(await loop.create_server(functools.partial(Connection, engine), "127.0.0.1", 0, backlog=4096))
    print(json.dumps([f"http://127.0.0.1:{s.sockets[0].getsockname()[1]}" for s in servers]), flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--cache-tokens", type=int, default=0, help="prefix cache of each engine; 0: not counted")
    parser.add_argument("--tokenizer", type=Path, help="directory with tokenizer.json and the chat template")
    arguments = parser.parse_args()
    codec = None if arguments.tokenizer is None else Codec.load(arguments.tokenizer)
    uvloop.run(serve(arguments.engines, arguments.rate, arguments.cache_tokens, codec))


if __name__ == "__main__":
    main()
