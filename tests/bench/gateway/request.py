"""Processor time of whole answers, relayed as text by everybody: the Rust routers, the gateway, and httpx on uvicorn.

Method. All contenders run at once in front of the same mock engines, and take turns: in every round each gets the same
load from the same client (whole answers of 64 tokens to chats of 2 KiB over 16 connections), and the processor time of
all its processes and threads is read from their own clocks. A round's ratio is ours over the better router's of that
round; the figure is the median of the rounds' ratios.

- `laminar` runs with `--relay-text`: it does what the routers do, and tells the weight version.
- `laminar-tokens` is the gateway as it is by default: it also renders the template, tokenises, streams from the engine,
  records ids and logprobs on disk, and makes the text. Its cost is told beside the figure.
- `httpx` relays the same text with httpx towards the engines, as an ASGI application on uvicorn.
"""

from __future__ import annotations

from collections.abc import Iterator

import uvloop

from tests.bench.figures import ROUNDS, Figure, median
from tests.bench.gateway import load
from tests.bench.gateway.contenders import contenders, lacking, mock_engines
from tests.bench.gateway.cpu import NUM_ENGINES, over_better

__all__ = ["lacking", "run"]

TEXT_2_KIB = ("What is the sum of 12 and 30? First call the calculator with the expression. " * 40)[:1950]
ANSWER_TOKENS = 64
REQUESTS = {"sglang": 1600, "vllm": 1600, "laminar": 1600, "laminar-tokens": 480, "httpx": 480}
CONNECTIONS = 16


def run() -> Iterator[Figure]:
    body = load.chat(TEXT_2_KIB, ANSWER_TOKENS)
    rounds: dict[str, list[float]] = {name: [] for name in REQUESTS}
    relaying = {"laminar": ("--relay-text",)}
    with mock_engines(NUM_ENGINES, rate=0) as engines, contenders([*REQUESTS], engines, each=relaying) as found:
        for at in range(ROUNDS + 1):
            for name, contender in found.items():
                cost = uvloop.run(load.requests(contender, body, num=REQUESTS[name], connections=CONNECTIONS))
                if at:  # the first warms up
                    rounds[name].append(cost.us)
    told = {"us_per_request": load.medians(rounds)}
    what = "router CPU per non-streaming chat of 2 KiB relayed as text, ours over the better Rust router's"
    yield median("cpu_per_request_vs_rust", what, over_better(rounds, "laminar"), bar=4.0, details=told)
    speedups = [theirs / ours for theirs, ours in zip(rounds["httpx"], rounds["laminar"], strict=True)]
    what = "CPU per request of the same relaying on httpx and uvicorn, over ours"
    yield median("httpx_style_speedup", what, speedups, bar=5.0, better="more", details=told)
