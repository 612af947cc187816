"""One life: the real gateway in a process of its own, sixteen scripted engines, a trainer that publishes by the clock.

A life is warmed up once, then measured in consecutive stretches of equal length. Every life's stretches begin at the
same times after its first request, so that stretch n of two modes saw the same publishes and began with the same trace.
All figures that leave here are at the paper's scale.

Invariants:
- what a stretch's figures count happened in it: tokens decoded, trajectories that ended (wherever they began), moves
  planned; none is in two stretches, none between them;
- a wrong answer counts, in the warm-up too, with the first stretch.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from gateway.core.fleet.config import FleetConfig
from tests.bench.repack.engines import BUDGET_UNITS, KV_UNITS, TRACE_LENGTH, answer_of, prompt_of
from tests.bench.repack.trace import COMMITTED, TOKENS_PER_UNIT, lengths, units
from tests.support import processes
from tests.support.fake_relay import relay
from tests.support.words import tokenizer

Mode = str
REPEATS_MAX = 6
TRAJECTORIES_OF_A_REPEAT = TRACE_LENGTH // REPEATS_MAX
"""More than any mode gets through in a life of one stretch; lives of several all begin with the first."""
LIFE_EXTRA_S = 8.0
"""To start engines and gateway, and to end them."""


@dataclass(frozen=True)
class Point:
    """What is run. Times and tokens are the paper's; `scale` of its seconds pass in one of ours."""

    mode: Mode
    batch: int = COMMITTED["batch"]
    publish_period_s: float = COMMITTED["publish_period_s"]
    scale: float = 10.0
    warm_up_s: float = 400.0
    stretch_s: float = 400.0
    stretches: int = 1
    """Measured one after the other in one life, as the means of batches of one simulation are."""
    engines: int = COMMITTED["engines"]
    concurrency: int = COMMITTED["concurrency"]
    shipped: bool = False
    """With the gateway's own relief from stragglers: a drained engine takes another batch, within a bound of staleness.
    Off, as in the paper, engines wait for their last trajectory."""
    repeat: int = 0
    """Each takes a part of the trace of its own."""
    least: Mapping[str, float] = field(default_factory=dict)
    """What figures must reach before the last stretch ends, however long that takes: for tests, on any machine."""

    @property
    def relief(self) -> tuple[float, int]:
        """`drain_max_s` and `staleness_max`: the gateway's defaults where it runs as it ships, else the committed."""
        default = FleetConfig()
        committed = (COMMITTED["drain_max_s"], COMMITTED["staleness_max"])
        return (default.drain_max_s, default.staleness_max) if self.shipped else committed

    @property
    def first_trajectory(self) -> int:
        return self.repeat * TRAJECTORIES_OF_A_REPEAT

    @property
    def wall_s(self) -> float:
        """What a life takes over HTTP, about."""
        return (self.warm_up_s + self.stretches * self.stretch_s) / self.scale + LIFE_EXTRA_S


@dataclass(frozen=True)
class Life:
    """Figures of all that was measured as one stretch, and of each stretch."""

    whole: dict[str, Any]
    stretches: list[dict[str, Any]]


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


@dataclass
class Watch:
    """What is seen of one life from outside. `ended`: trajectories with their first place's time and their end's."""

    point: Point
    http: aiohttp.ClientSession
    url: str
    engines: processes.Daemon
    gateway: processes.Daemon
    clients: Clients
    ended: list[tuple[int, float, float]] = field(default_factory=list)
    receipts: list[Any] = field(default_factory=list)

    async def look(self) -> dict[str, Any]:
        """Counts since the start, at this moment."""
        async with self.http.get(self.engines.ready["statistics"]) as response:
            looked: dict[str, Any] = await response.json()
        async with self.http.get(f"{self.url}/status") as response:
            looked["status"] = await response.json()
        times = psutil.Process(self.gateway.process.pid).cpu_times()
        looked |= {"gateway_cpu_s": times.user + times.system, "client_cpu_s": time.process_time()}
        async with self.http.get(f"{self.url}/admin/receipts?limit=100000") as response:
            self.receipts = (await response.json())["receipts"]
        self.ended += looked["ended"]  # those since the last look
        wrong = len(self.clients.wrong) + looked["wrong"]
        looked |= {"ended": len(self.ended), "answered": len(self.clients.answers), "wrong": wrong}
        return {**looked, "unix_s": time.time()}


async def run(point: Point, progress: Callable[[dict[str, Any]], None] = lambda found: None) -> Life:
    """See `figures`; `progress` gets those of each stretch as it ends."""
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
        watch = Watch(point, http, url, engines, gateway, clients)
        async with asyncio.TaskGroup() as group:
            began_at = time.monotonic()
            tasks = [group.create_task(clients.work(http)) for _ in range(point.concurrency)]
            tasks.append(group.create_task(_publish(found_relay, began_at, point.publish_period_s / point.scale)))
            looks = await _stretches(watch, began_at, progress)
            for task in tasks:
                task.cancel()
    found = [figures(watch, n, before, after) for n, (before, after) in enumerate(itertools.pairwise(looks))]
    return Life(figures(watch, 0, looks[0], looks[-1]), found)


async def _stretches(watch: Watch, began_at: float, progress: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """A look when the warm-up ends and one at each stretch's end, by the clock: a late look delays no later one."""
    point, looks = watch.point, list[dict[str, Any]]()
    for n in range(point.stretches + 1):
        end = began_at + (point.warm_up_s + n * point.stretch_s) / point.scale
        await asyncio.sleep(max(0.0, end - time.monotonic()))
        looks.append(await watch.look())
        if n == 0:
            looks[0]["wrong"] = 0
        elif n < point.stretches:
            progress(figures(watch, n - 1, *looks[-2:]))
    while not _enough(found := figures(watch, point.stretches - 1, *looks[-2:]), point.least):
        await asyncio.sleep(1.0)
        looks[-1] = await watch.look()
    progress(found)
    return looks


def _enough(found: Mapping[str, Any], least: Mapping[str, float]) -> bool:
    return all((found[name] or 0) >= count for name, count in least.items())


async def _until_serving(http: aiohttp.ClientSession, url: str, count: int) -> None:
    deadline = time.monotonic() + 180
    while True:
        async with http.get(f"{url}/status") as response:
            status = await response.json()
        if sum(e["state"] == "serving" and e["version"] == 1 for e in status["engines"]) == count:
            return
        assert time.monotonic() < deadline, status["engines"]
        await asyncio.sleep(0.05)


async def _publish(found_relay: Any, began_at: float, period_s: float) -> None:
    for count in itertools.count(1):
        await asyncio.sleep(max(0.0, began_at + count * period_s - time.monotonic()))
        found_relay.publish(1 + count)


def figures(watch: Watch, stretch: int, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Differences of the two looks, at the paper's scale where they are times.

    Moves that are under way when their stretch ends have no pause yet: figures made later have it.
    """
    point, clients = watch.point, watch.clients
    wall_s = after["now"] - before["now"]
    paper_s = wall_s * point.scale

    def gained(name: str) -> float:
        return float(sum(after["engines"][e][name] - before["engines"][e][name] for e in after["engines"]))

    def counted(name: str) -> int:
        return int(after["status"]["counters"][name] - before["status"]["counters"][name])

    ended = watch.ended[before["ended"] : after["ended"]]
    latencies = sorted((end - start) * point.scale for _, start, end in ended)
    answered = clients.answers[before["answered"] : after["answered"]]
    answers = sorted((end - start) * point.scale for start, end in answered)
    done_tokens = sum(clients.trace[n] for n, _, _ in ended)
    mine = [r for r in watch.receipts if before["unix_s"] <= r["planned_unix_s"] < after["unix_s"]]
    pauses = sorted(m["pause_s"] * point.scale for r in mine for m in r["moves"] if m["pause_s"] is not None)
    gains = [r for r in mine if r["gain_s"]["measured"] is not None]
    return {
        "mode": point.mode,
        "shipped": point.shipped,
        "stretch": point.repeat + stretch,
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
        "wrong_answers": after["wrong"] - before["wrong"],
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
