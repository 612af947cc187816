"""A relay's own memory, its pool left out, over 50 versions of 1 GiB.

Method. A master and one relay behind it. Private memory is RssAnon + RssFile of /proc/PID/status; the pool is
RssShmem, and left out. Sampled after every fifth version; the figure is the larger of both relays at the end. Growth
is from the tenth version to the last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from paramserver.client import RelayClient
from tests.bench.figures import Figure
from tests.bench.relay.scene import WAIT_S, Scene, content, scene, tensors, timed_publish

NUM_BYTES = 1 << 30
NUM_VERSIONS = 50
EVERY = 5
GROWTH_MB_MAX = 10.0  # what an allocator may still gather in forty versions; a leak of a table per version is more


def run() -> Iterator[Figure]:
    with scene() as stage:
        samples = asyncio.run(_samples(stage))
    growth = max(of[-1] - of[1] for of in samples.values())
    worst = max(samples, key=lambda name: samples[name][-1])
    growing = growth > GROWTH_MB_MAX
    yield Figure(
        "rss_outside_pool_mb",
        f"a relay's own memory after {NUM_VERSIONS} versions of 1 GiB ({worst})",
        samples[worst][-1],
        bar=200,
        unit="MB",
        rounds=samples[worst],
        of="last sample",
        note=f"{'GROWING: ' if growing else ''}{growth:+.1f} MB from version 10 to {NUM_VERSIONS}",
        details={"samples_mb": samples, "growth_mb": round(growth, 2)},
    )


async def _samples(stage: Scene) -> dict[str, list[float]]:
    daemons = {"master": stage.relay("a", NUM_BYTES), "relay": stage.relay("b", NUM_BYTES, "--no-publish-host")}
    sources = tensors(content(NUM_BYTES))
    found: dict[str, list[float]] = {name: [] for name in daemons}
    async with RelayClient(daemons["master"].ready["grpc"]) as client:
        for step in range(1, NUM_VERSIONS + 1):
            ticket, _ = await timed_publish(client, "policy", sources, step)
            await ticket.wait_all(WAIT_S)
            if step % EVERY == 0:
                for name, daemon in daemons.items():
                    found[name].append(round(_private_mb(daemon.process.pid), 1))
    return found


def _private_mb(pid: int) -> float:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssFile")) / 1024
