"""One run: the real gateway in a process of its own, sixteen scripted engines, a trainer that publishes by the clock.

All figures that leave here are at the paper's scale.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from gateway.core.fleet import FleetConfig
from tests.bench.repack.engines import BUDGET_UNITS, KV_UNITS, TRACE_LENGTH, answer_of, prompt_of
from tests.bench.repack.trace import COMMITTED, TOKENS_PER_UNIT, lengths, units
from tests.support import processes
from tests.support.fake_relay import relay
from tests.support.words import tokenizer

Mode = str
REPEATS_MAX = 5
TRAJECTORIES_OF_A_REPEAT = TRACE_LENGTH // REPEATS_MAX
"""More than any mode gets through in one run."""


@dataclass(frozen=True)
class Point:
    """What is run. Times and tokens are the paper's; `scale` of its seconds pass in one of ours."""

    mode: Mode
    batch: int = COMMITTED["batch"]
    publish_period_s: float = COMMITTED["publish_period_s"]
    scale: float = 10.0
    warm_up_s: float = 400.0
    measured_s: float = 1000.0
    engines: int = COMMITTED["engines"]
    concurrency: int = COMMITTED["concurrency"]
    shipped: bool = False
    """With the gateway's own relief from stragglers: a drained engine takes another batch, within a bound of staleness.
    Off, as in the paper, engines wait for their last trajectory."""
    repeat: int = 0
    """Each takes a stretch of the trace of its own."""
    least: Mapping[str, float] = field(default_factory=dict)
    """What figures must reach before the measuring ends, however long that takes: for tests, on any machine."""

    @property
    def relief(self) -> tuple[float, int]:
        """`drain_max_s` and `staleness_max`: the gateway's defaults where it runs as it ships, else the committed."""
        default = FleetConfig()
        committed = (COMMITTED["drain_max_s"], COMMITTED["staleness_max"])
        return (default.drain_max_s, default.staleness_max) if self.shipped else committed

    @property
    def first_trajectory(self) -> int:
        return self.repeat * TRAJECTORIES_OF_A_REPEAT


@dataclass
class Clients:
    """Workers that take the next trajectory as soon as their last one is answered."""

    url: str
    trace: list[int] = field(default_factory=lambda: lengths(TRACE_LENGTH))
    next_trajectory: int = 0
    answers: list[tuple[float, float]] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)

    async def work(self, http: aiohttp.ClientSession) -> None:
        while True:
            trajectory, self.next_trajectory = self.next_trajectory, self.next_trajectory + 1
            body = {
                "model": "policy",
                "prompt": prompt_of(trajectory),
                "max_tokens": BUDGET_UNITS,
                "return_token_ids": True,
            }
            asked_at = time.monotonic()
            async with http.post(f"{self.url}/v1/completions", json=body) as response:
                answer = await response.json()
            if response.status != 200:
                raise RuntimeError(f"trajectory {trajectory}: {response.status} {answer}")
            self.answers.append((asked_at, time.monotonic()))
            if answer["choices"][0]["token_ids"] != answer_of(trajectory, units(self.trace[trajectory])):
                self.wrong.append(trajectory)


def gateway_command(point: Point, engines: Mapping[str, str], relay_address: str, directory: Path) -> list[str]:
    c, scale = COMMITTED, point.scale
    drain_max_s, staleness_max = point.relief
    flags: dict[str, object] = {
        "model": "policy",
        "tokenizer": directory,
        "port": 0,
        "relay": relay_address,
        "mode": point.mode,
        "max-running": c["max_running"],
        "kv-max": c["kv_max"],
        "intake-batch": point.batch,
        "intake-min-batch": point.batch,
        "intake-age-s": 1e6,
        "drain-max-s": drain_max_s / scale,
        "staleness-max": staleness_max,
        "repack-interval-s": c["repack_interval_s"] / scale,
        "prefill-tokens-per-s": c["prefill_tokens_per_s"] / TOKENS_PER_UNIT * scale,
        "poll-interval-s": 1.0,
        "queue-timeout-s": 1e6,
        "queue-max": 8 * point.concurrency,
        "log-level": "warning",
    }
    named = [f"--engine={name}=vllm={url}" for name, url in engines.items()]
    # Scripted engines know the trace's prompts alone, and their weights are all the same.
    return ["gateway", "serve", "--no-probe", *(f"--{name}={value}" for name, value in flags.items()), *named]


async def run(point: Point) -> dict[str, Any]:
    """Figures of one point; see `figures`."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="laminar-bench-")))
        tokenizer(directory)
        found_relay, relay_address = await stack.enter_async_context(relay())
        found_relay.publish(1)
        command = ["tests.bench.repack.engines", f"--scale={point.scale}", f"--count={point.engines}"]
        engines = await asyncio.to_thread(processes.start, "engines", command, directory)
        stack.callback(engines.kill)
        serve = gateway_command(point, engines.ready["engines"], relay_address, directory)
        gateway = await asyncio.to_thread(processes.start, "gateway", serve, directory)
        stack.callback(gateway.stop)
        url = gateway.ready["url"]
        connector = aiohttp.TCPConnector(limit=0)
        http = await stack.enter_async_context(
            aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        )
        await _until_serving(http, url, point.engines)
        clients = Clients(url, next_trajectory=point.first_trajectory)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(clients.work(http)) for _ in range(point.concurrency)]
            tasks.append(group.create_task(_publish(found_relay, point.publish_period_s / point.scale)))
            await asyncio.sleep(point.warm_up_s / point.scale)
            before = await _look(http, url, engines, gateway, clients)
            await asyncio.sleep(point.measured_s / point.scale)
            after = await _look(http, url, engines, gateway, clients)
            while not _enough(found := figures(point, before, after, clients), point.least):
                await asyncio.sleep(1.0)
                later = await _look(http, url, engines, gateway, clients)
                after = {
                    **later,
                    "ended": after["ended"] + later["ended"],
                }  # each look tells of those since the last one
            for task in tasks:
                task.cancel()
    return found


def _enough(found: Mapping[str, Any], least: Mapping[str, float]) -> bool:
    return all((found[name] or 0) >= count for name, count in least.items())


async def _until_serving(http: aiohttp.ClientSession, url: str, count: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        async with http.get(f"{url}/status") as response:
            status = await response.json()
        if sum(e["state"] == "serving" and e["version"] == 1 for e in status["engines"]) == count:
            return
        assert time.monotonic() < deadline, status["engines"]
        await asyncio.sleep(0.05)


async def _publish(found_relay: Any, period_s: float) -> None:
    version, due_at = 1, time.monotonic()
    while True:
        due_at += period_s
        await asyncio.sleep(max(0.0, due_at - time.monotonic()))
        version += 1
        found_relay.publish(version)


async def _look(
    http: aiohttp.ClientSession, url: str, engines: processes.Daemon, gateway: processes.Daemon, clients: Clients
) -> dict[str, Any]:
    async with http.get(engines.ready["statistics"]) as response:
        looked: dict[str, Any] = await response.json()
    async with http.get(f"{url}/status") as response:
        looked["status"] = await response.json()
    times = psutil.Process(gateway.process.pid).cpu_times()
    looked |= {"gateway_cpu_s": times.user + times.system, "client_cpu_s": time.process_time()}
    async with http.get(f"{url}/admin/receipts?limit=100000") as response:
        looked["receipts"] = (await response.json())["receipts"]
    return {**looked, "answered": len(clients.answers), "unix_s": time.time()}


def figures(point: Point, before: Mapping[str, Any], after: Mapping[str, Any], clients: Clients) -> dict[str, Any]:
    """Differences of the two looks, at the paper's scale where they are times."""
    wall_s = after["now"] - before["now"]
    paper_s = wall_s * point.scale

    def gained(name: str) -> float:
        return float(sum(after["engines"][e][name] - before["engines"][e][name] for e in after["engines"]))

    def counted(name: str) -> int:
        return int(after["status"]["counters"][name] - before["status"]["counters"][name])

    latencies = sorted((end - start) * point.scale for _, start, end in after["ended"])
    answered = clients.answers[before["answered"] : after["answered"]]
    answers = sorted((end - start) * point.scale for start, end in answered)
    done_tokens = sum(clients.trace[n] for n, _, _ in after["ended"])
    mine = [r for r in after["receipts"] if r["planned_unix_s"] >= before["unix_s"]]
    pauses = sorted(m["pause_s"] * point.scale for r in mine for m in r["moves"] if m["pause_s"] is not None)
    gains = [r for r in mine if r["gain_s"]["measured"] is not None]
    return {
        "mode": point.mode,
        "shipped": point.shipped,
        "repeat": point.repeat,
        "batch": point.batch,
        "publish_period_s": point.publish_period_s,
        "scale": point.scale,
        "measured_s": round(paper_s, 1),
        "tokens_per_s": round(gained("decoded_tokens") / paper_s, 1),
        "finished_tokens_per_s": round(done_tokens / paper_s, 1),
        "kv_util": round(gained("kv_share_s") / wall_s / point.engines, 4),
        "running_mean": round(gained("running_s") / wall_s / point.engines, 2),
        "trajectories": len(latencies),
        "latency_mean_s": _mean(latencies, 1.0),
        "latency_p99_s": round(_quantile(latencies, 0.99), 1),
        "latency_max_s": round(_quantile(latencies, 1.0), 1),
        "answer_mean_s": _mean(answers, 1.0),
        "answer_p99_s": round(_quantile(answers, 0.99), 1),
        "refreshes": counted("refreshes"),
        "repacks": counted("repacks"),
        "moves": counted("moves"),
        "cuts": counted("turns_cut"),
        "versions_mixed": counted("turns_mixed_version"),
        "prefilled_again_share": round(gained("again_tokens") / max(1.0, gained("decoded_tokens")), 4),
        "preempted": int(gained("preempted")),
        "pause_mean_s": round(statistics.fmean(pauses), 3) if pauses else None,
        "pause_p50_s": round(_quantile(pauses, 0.5), 3) if pauses else None,
        "pause_p99_s": round(_quantile(pauses, 0.99), 3) if pauses else None,
        "receipts": len(mine),
        "price_estimated_s": round(sum(r["price_s"]["estimated"] for r in mine) * point.scale, 1),
        "price_measured_s": round(sum(r["price_s"]["measured"] for r in mine) * point.scale, 1),
        "gain_estimated_s": round(sum(r["gain_s"]["estimated"] for r in gains) * point.scale, 1),
        "gain_measured_s": round(sum(r["gain_s"]["measured"] for r in gains) * point.scale, 1),
        "emptied_after_mean_s": _mean([r["emptied_after_s"] for r in mine], point.scale),
        "outcomes": _outcomes(mine),
        "staleness_mean": _staleness(
            before["status"]["staleness"]["generation"], after["status"]["staleness"]["generation"]
        ),
        "wrong_answers": len(clients.wrong) + after["wrong"],
        "cores_gateway": round((after["gateway_cpu_s"] - before["gateway_cpu_s"]) / wall_s, 3),
        "cores_engines": round((after["cpu_s"] - before["cpu_s"]) / wall_s, 3),
        "cores_clients": round((after["client_cpu_s"] - before["client_cpu_s"]) / wall_s, 3),
        "engines_late_share": round(gained("late_s") / wall_s / point.engines, 4),
        "kv_units": KV_UNITS,
    }


def _quantile(values: list[float], q: float) -> float:
    return values[min(len(values) - 1, int(q * len(values)))] if values else math.nan


def _staleness(before: Mapping[str, int], after: Mapping[str, int]) -> float:
    """Mean over tokens, when their turn ended."""
    counts = {int(behind): count - before.get(behind, 0) for behind, count in after.items()}
    return round(sum(b * n for b, n in counts.items()) / max(1, sum(counts.values())), 3)


def _mean(values: Sequence[float | None], scale: float) -> float | None:
    known = [v for v in values if v is not None]
    return round(statistics.fmean(known) * scale, 2) if known else None


def _outcomes(receipts: list[Any]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for receipt in receipts:
        for move in receipt["moves"]:
            counts[move["outcome"]] = counts.get(move["outcome"], 0) + 1
    return counts
