"""The price of a relay's port in front of an engine: the gateway's streams from a mock engine, direct and through it.

Engine, port and the gateway's side are a process each, and take turns on the same cores, direct and by the port in each
round. Tokens/s are those of an engine that sends one token per event as fast as it is read, so they say what the path
can carry; an engine that computes sends far fewer. The latency is a whole request for one token over a kept
connection, alone and beside `STREAMS` streams at `RATE` tokens/s each that take the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import uvloop

from deploy.setup_env import ROOT
from gateway.engines.base import engine_tls
from gateway.engines.connections import Wire
from paramserver.credentials.fleet import Fleet
from paramserver.data import engine_ports
from paramserver.data.engine_ports import EnginePort
from protos.access.credentials import Credentials
from tests.bench.figures import ROUNDS, Figure, median
from tests.bench.gateway.contenders import mock_engines

__all__ = ["lacking", "run"]

STREAMS = 64
RATE = 50.0
UNTHROTTLED = 1e6
TOKENS = {1: 8000, STREAMS: 500}
"""Of a stream, by how many there are."""
PACED_TOKENS = 250
"""Of a stream: five seconds."""
PROBES = 300
PATH = "/v1/completions"


def lacking() -> list[str]:
    return []


def run() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as directory:
        fleet = Path(directory) / "fleet"
        Fleet.init(fleet, (), 30)
        credentials = Credentials(fleet / "gateway")
        with (
            mock_engines(1, rate=UNTHROTTLED) as [fast],
            mock_engines(1, rate=RATE) as [paced],
            port(fleet / "relay", fast) as (by_port, pid),
            port(fleet / "relay", paced) as (paced_by_port, paced_pid),
        ):
            ways = {"direct": (fast, paced), "port": (by_port, paced_by_port)}
            for streams in TOKENS:
                yield _tokens(ways, credentials, streams, pid)
            for beside in (0, STREAMS):
                yield _latency(ways, credentials, beside)
            yield _paced_cpu(paced_by_port, credentials, paced_pid)


Ways = dict[str, tuple[str, str]]


def _tokens(ways: Ways, credentials: Credentials, streams: int, pid: int) -> Figure:
    rates: dict[str, list[float]] = {name: [] for name in ways}
    cpu_s = 0.0
    for number in range(ROUNDS + 1):  # the first warms up
        for name, (url, _) in ways.items():
            before = _cpu_s(pid)
            rate = uvloop.run(_read(url, credentials, streams, TOKENS[streams]))
            if number:
                rates[name].append(rate)
                cpu_s += _cpu_s(pid) - before
    shares = [by / direct for by, direct in zip(rates["port"], rates["direct"], strict=True)]
    return median(
        f"engine_port_tokens_{streams}",
        f"tokens/s through an engine's port of TLS over direct, {streams} streams, a token per event, unthrottled",
        shares,
        better="reported",
        details={
            "tokens_s": {name: round(statistics.median(found)) for name, found in rates.items()},
            "port_cpu_us_per_token": round(cpu_s * 1e6 / (ROUNDS * streams * TOKENS[streams]), 1),
        },
    )


async def _read(url: str, credentials: Credentials, streams: int, tokens: int) -> float:
    """Tokens per second of so many streams at once."""
    wire = Wire(url, stall_timeout_s=60.0, tls=engine_tls(credentials))
    await asyncio.gather(*(_stream(wire, 1) for _ in range(streams)))  # connects
    began = time.perf_counter()
    found = await asyncio.gather(*(_stream(wire, tokens) for _ in range(streams)))
    took_s = time.perf_counter() - began
    await wire.close()
    assert found == [tokens] * streams
    return streams * tokens / took_s


async def _stream(wire: Wire, tokens: int) -> int:
    events = 0

    def take(data: Sequence[bytes]) -> None:
        nonlocal events
        events += len(data)

    body = {"prompt": [5, 6, 7], "max_tokens": tokens, "stream": True, "logprobs": 0, "return_token_ids": True}
    async with wire.post(PATH, json.dumps(body).encode()) as found:
        await found.deliver(take)
    return events


def _latency(ways: Ways, credentials: Credentials, beside: int) -> Figure:
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for name, (fast, paced) in ways.items():
            took_s = uvloop.run(_probe(fast, paced, credentials, beside))
            if number:
                found[name].append(took_s * 1e3)
    added = [by - direct for by, direct in zip(found["port"], found["direct"], strict=True)]
    return median(
        f"engine_port_added_ms_{beside or 1}",
        "time of a request for one token through an engine's port of TLS, over direct, p50"
        + (f", beside {beside} streams of {RATE:g} tokens/s" if beside else ""),
        added,
        better="reported",
        unit="ms",
        details={"p50_ms": {name: round(statistics.median(each), 3) for name, each in found.items()}},
    )


async def _probe(fast: str, paced: str, credentials: Credentials, beside: int) -> float:
    tls = engine_tls(credentials)
    wire, others = Wire(fast, stall_timeout_s=60.0, tls=tls), Wire(paced, stall_timeout_s=60.0, tls=tls)
    running = [asyncio.ensure_future(_stream(others, 100_000)) for _ in range(beside)]
    took: list[float] = []
    await asyncio.sleep(1.0 if beside else 0.0)  # all have begun
    for _ in range(PROBES):
        began = time.perf_counter()
        await _stream(wire, 1)
        took.append(time.perf_counter() - began)
    for one in running:
        one.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    for each in (wire, others):
        await each.close()
    return statistics.median(took)


def _paced_cpu(url: str, credentials: Credentials, pid: int) -> Figure:
    found = []
    for _ in range(ROUNDS):
        before = _cpu_s(pid)
        uvloop.run(_read(url, credentials, STREAMS, PACED_TOKENS))
        found.append((_cpu_s(pid) - before) * 1e6 / (STREAMS * PACED_TOKENS))
    what = f"CPU of an engine's port of TLS per token, a token per event, {STREAMS} streams of {RATE:g} tokens/s"
    return median("engine_port_cpu_us_per_token", what, found, better="reported", unit="us")


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def port(holder: Path, target: str) -> Iterator[tuple[str, int]]:
    """Its address, and its process."""
    command = [sys.executable, "-m", "tests.bench.gateway.engine_port", str(holder), target]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().decode().strip(), process.pid
    finally:
        process.terminate()
        process.wait()


async def serve(holder: str, target: str, ready: Callable[[str], None]) -> None:
    """As a relay does, on asyncio's own loop."""
    listener = engine_ports.listen("127.0.0.1", 0)
    found = EnginePort("mock:0", target, listener, "127.0.0.1", engine_ports.tls_of(Credentials(Path(holder))))
    await found.serve()
    ready(found.url)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2], lambda url: print(url, flush=True)))
