"""`make bench-data`: a trainer's batch on its way from the gateway's database to arrays, packed and as JSON.

1,024 trajectories of 2,048 tokens with logprobs, read by the SDK from a gateway's own routes in another process, over
loopback. A round is a whole sample: request, lease, answer, and arrays (`Batch.pack`); it is given back, and the next
round has the same.

- `sample_vs_json`: time of a round through JSON over the time of one by the SDK;
- `sample_mb_s`: the arrays' bytes (13 a token: id, logprob, mask, version) by a second of processor time, of SDK and
  gateway together.

Writes bench-results/data.json.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import numpy as np
import psutil
import uvloop
from aiohttp import web

from gateway.store import Database
from protos.decoding import decode_json
from protos.trajectories import Trajectory
from tests.bench.figures import ROUNDS, Figure, keep, median, show
from tests.support.experience import experience_app
from tests.support.trajectories import make_trajectory
from trainer_client import AsyncExperienceReader, Packed, pack

TRAJECTORIES, TOKENS, PROMPT = 1024, 2048, 256
BYTES_A_TOKEN = 4 + 4 + 1 + 4
VOCABULARY = 151_000
FASTER, MB_S = 10.0, 300.0
"""The bars."""


class _JsonAnswer(msgspec.Struct):
    lease_id: str
    trajectories: list[Trajectory]


@dataclass(frozen=True, slots=True)
class Round:
    wall_s: float
    cpu_s: float
    gateway_cpu_s: float


def trajectory(number: int, random: np.random.Generator) -> Trajectory:
    """Ids as frequent as words are (Zipf), logprobs that no two tokens share, under two versions."""
    made = make_trajectory(f"g{number // 8}", number % 8, range(PROMPT), (range(TOKENS - PROMPT), []))
    ids = np.minimum(random.zipf(1.2, TOKENS) - 1, VOCABULARY).tolist()
    logprobs = (-random.exponential(0.7, TOKENS)).astype(np.float32)
    logprobs[:PROMPT] = 0.0
    turn = int(random.integers(TOKENS - PROMPT))
    versions = [-1] * PROMPT + [7] * turn + [8] * (TOKENS - PROMPT - turn)
    return msgspec.structs.replace(
        made, token_ids=ids, logprobs=logprobs.astype(float).tolist(), versions=versions, reward=float(number % 2)
    )


async def serve(directory: Path) -> None:
    """The gateway's side: fills its buffer, serves the routes, and says where in its only line."""
    async with Database(directory / "gateway.sqlite") as database, experience_app(database) as (app, stores, _):
        random = np.random.default_rng(0)
        for number in range(TRAJECTORIES):
            await stores.buffer.add(trajectory(number, random))
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        await asyncio.to_thread(sys.stdin.read)  # until the benchmark closes it
        await runner.cleanup()


async def by_sdk(reader: AsyncExperienceReader) -> tuple[str, Packed]:
    batch = await reader.sample(trajectories=TRAJECTORIES, wait_s=0)
    return batch.lease_id, batch.pack()


async def by_json(reader: AsyncExperienceReader, http: httpx.AsyncClient, url: str) -> tuple[str, Packed]:
    body = {"reader": "trainer", "trainer_version": 8, "trajectories": TRAJECTORIES, "wait_s": 0}
    answer = await http.post(url + "/experience/sample", json=body, headers={"Accept": "application/json"})
    found = decode_json(answer.content, _JsonAnswer)
    return found.lease_id, pack(found.trajectories)


async def measure(url: str, server: psutil.Process, rounds: int) -> tuple[list[Round], list[Round]]:
    packed: list[Round] = []
    json: list[Round] = []
    async with (
        AsyncExperienceReader(url, trainer_version=8, timeout_s=300) as reader,
        httpx.AsyncClient(timeout=300, trust_env=False) as http,
    ):
        for number in range(rounds + 1):  # the first of each warms up
            one = await _round(lambda: by_sdk(reader), server, http, url)
            other = await _round(lambda: by_json(reader, http, url), server, http, url)
            if number:
                packed.append(one)
                json.append(other)
    return packed, json


async def _round(sample: Callable[[], object], server: psutil.Process, http: httpx.AsyncClient, url: str) -> Round:
    def cpu_s() -> tuple[float, float]:
        return time.process_time(), sum(server.cpu_times()[:2])

    began, before = time.perf_counter(), cpu_s()
    lease_id, arrays = await sample()  # type: ignore[misc]
    done = Round(time.perf_counter() - began, *(after - b for after, b in zip(cpu_s(), before, strict=True)))
    assert arrays.num_tokens == TRAJECTORIES * TOKENS
    (await http.post(url + "/experience/release", json={"lease_id": lease_id})).raise_for_status()
    return done


def figures(packed: list[Round], json: list[Round]) -> list[Figure]:
    mb = TRAJECTORIES * TOKENS * BYTES_A_TOKEN / 1e6
    what = f"{TRAJECTORIES} trajectories of {TOKENS} tokens"
    return [
        median(
            "sample_vs_json",
            f"a whole sample of {what}: through JSON over packed",
            [slow.wall_s / fast.wall_s for fast, slow in zip(packed, json, strict=True)],
            bar=FASTER,
            better="more",
        ),
        median(
            "sample_mb_s",
            "arrays by processor time of SDK and gateway together",
            [mb / (one.cpu_s + one.gateway_cpu_s) for one in packed],
            bar=MB_S,
            better="more",
            unit="MB/s",
        ),
        median(
            "sdk_mb_s", "by that of the SDK alone", [mb / one.cpu_s for one in packed], better="reported", unit="MB/s"
        ),
        median("sample_s", "a whole sample, packed", [one.wall_s for one in packed], better="reported", unit="s"),
        median("sample_json_s", "the same through JSON", [one.wall_s for one in json], better="reported", unit="s"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-data ARGS=...", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each way (default %(default)s)")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(sys.argv[1:] if sys.argv[0].endswith("data.py") else [])
    if asked.serve is not None:
        uvloop.run(serve(asked.serve))  # as `gateway serve` does
        return
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "tests.bench.data", "--serve", directory]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            if not url:
                sys.exit("bench-data: the gateway's side did not start: see above")
            packed, json = asyncio.run(measure(url, psutil.Process(server.pid), asked.rounds))
            server.communicate("")
    found = figures(packed, json)
    show("data", found)
    keep("data", found)


if __name__ == "__main__":
    main()
