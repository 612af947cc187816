"""What a fault in the middle of a chain adds to a broadcast under way, and what it sends twice.

Method. Four relays on hosts of their own (network namespaces), links of 2.5 Gbit/s, versions of 1 GiB. The third of
the chain is the victim; the fault comes when the fourth has half of the version. A time runs from the call of
`publish` until every survivor says that the version is available. Added: that time, less the time of the undisturbed
broadcast of the same round. Received twice: what came in over the cable of a survivor, headers included, less what
came in over the cable of a relay at the same place in the undisturbed broadcast; the worst survivor counts. After
each round the victim comes back, and the next round waits until it holds the newest version.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from paramserver.client import RelayClient, TensorSource, publish
from tests.bench.figures import ROUNDS, Figure, median
from tests.bench.needs import namespaces
from tests.bench.relay.scene import MIB, WAIT_S, Scene, content, scene, tensors
from tests.support.links import Host, Net
from tests.support.processes import Daemon
from tests.support.relays import until

NUM_RELAYS = 4
VICTIM = 2  # place in the chain
RATE_BIT_S = 2.5e9
NUM_BYTES = 1 << 30
MODEL = "policy"
KILL = "kill"
KINDS = (KILL, "stop", "cut_both", "cut_out", "cut_in")
BARS = {"repair_added_s": 0.5, "hang_added_s": 1.5, "repair_resent_share": 0.01}


@dataclass
class Site:
    """A relay and its host."""

    name: str
    host: Host
    daemon: Daemon
    client: RelayClient


@dataclass
class Broadcast:
    """One measured broadcast: seconds until the survivors had it, bytes in over the cables by place in the chain."""

    seconds: float
    received: dict[int, int]


@dataclass
class Tier:
    """Four relays, and what is measured on them."""

    stage: Scene
    net: Net
    sources: list[TensorSource]
    sites: dict[str, Site] = field(default_factory=dict)
    step: int = 0

    async def start(self, name: str, host: Host) -> None:
        flags = ["--retain", "1"] + ([] if name == "r0" else ["--no-publish-host"])
        room = str(2 * (NUM_BYTES + MIB))
        daemon = await asyncio.to_thread(self.stage.relays.start, name, *flags, pool_bytes=room, on=host)
        self.sites[name] = Site(name, host, daemon, RelayClient(daemon.ready["grpc"], timeout_s=3.0))

    async def chain(self) -> list[Site]:
        """In the order of the next version: members as the master sees them."""
        status = await self.sites["r0"].client.status()
        [model] = [model for model in status.models if model.model == MODEL]
        return [self.sites[name] for name in model.chain if name in status.members]

    async def broadcast(self, fault: Callable[[Site], None] | None = None) -> Broadcast:
        self.step += 1
        order = await self.chain() if self.step > 1 else list(self.sites.values())
        survivors = [site for place, site in enumerate(order) if fault is None or place != VICTIM]
        before = {site.name: site.host.bytes_received() for site in order}
        started = time.perf_counter()
        ticket = await publish(self.sites["r0"].client, MODEL, self.sources, step=self.step, run="bench")
        async with asyncio.TaskGroup() as group:
            waits = [group.create_task(_available(site.client, ticket.version)) for site in survivors]
            if fault is not None:
                await _half(order[-1].client)
                fault(order[VICTIM])
        took = max(wait.result() for wait in waits) - started
        received = {
            place: site.host.bytes_received() - before[site.name]
            for place, site in enumerate(order)
            if site in survivors and place > 0
        }
        return Broadcast(took, received)

    async def settled(self) -> None:
        """Everybody is a member of the chain again and holds the newest version."""

        async def all_there() -> bool:
            held = set()
            for site in self.sites.values():
                with contextlib.suppress(Exception):
                    status = await site.client.status()
                    if len(status.members) == NUM_RELAYS:
                        held.add(max(status.held.get(MODEL, ()), default=0))
                    else:
                        return False
            return len(held) == 1 and 0 not in held

        await until(all_there, "every relay holds the newest version", WAIT_S)


async def _available(client: RelayClient, version: int) -> float:
    """When it was."""
    async with asyncio.timeout(WAIT_S):
        async for event in client.watch(MODEL):
            if event.kind == "available" and event.version.version >= version:
                return time.perf_counter()
    raise AssertionError("a watch does not end")


async def _half(client: RelayClient) -> None:
    async def there() -> bool:
        return any(2 * t.bytes_done >= t.bytes_total for t in (await client.status()).transfers)

    await until(there, "half of the version", WAIT_S)


lacking = namespaces


def run() -> Iterator[Figure]:
    sources = tensors(content(NUM_BYTES))
    with Net(NUM_RELAYS, rate_bit_s=RATE_BIT_S) as net, scene(net) as stage:
        yield from _figures(asyncio.run(_measure(Tier(stage, net, sources))))


@contextlib.asynccontextmanager
async def _started(tier: Tier) -> AsyncIterator[Tier]:
    try:
        for n in range(NUM_RELAYS):
            await tier.start(f"r{n}", tier.net.hosts[n])
        yield tier
    finally:
        for site in tier.sites.values():
            await site.client.close()


async def _measure(tier: Tier) -> dict[str, list[tuple[Broadcast, Broadcast]]]:
    """By kind of fault: (undisturbed, disturbed) of each round."""
    found: dict[str, list[tuple[Broadcast, Broadcast]]] = {kind: [] for kind in KINDS}
    async with _started(tier):
        for _ in range(3):
            await tier.broadcast()
        for _ in range(ROUNDS):
            quiet = await tier.broadcast()
            for kind in KINDS:
                await tier.settled()
                victim: list[Site] = []
                hurt = await tier.broadcast(lambda site, kind=kind, victim=victim: _hurt(site, kind, victim))  # type: ignore[misc]
                found[kind].append((quiet, hurt))
                await _heal(tier, victim[0], kind)
                await tier.settled()
    return found


def _hurt(site: Site, kind: str, victim: list[Site]) -> None:
    victim.append(site)
    if kind == KILL:
        site.daemon.kill()
    elif kind == "stop":
        site.daemon.process.send_signal(signal.SIGSTOP)
    elif kind == "cut_out":
        site.host.cut("out")
    elif kind == "cut_in":
        site.host.cut("in")
    else:
        site.host.cut("both")


async def _heal(tier: Tier, site: Site, kind: str) -> None:
    if kind == KILL:
        await site.client.close()
        await tier.start(site.name, site.host)
    elif kind == "stop":
        site.daemon.process.send_signal(signal.SIGCONT)
    else:
        site.host.restore()


def _figures(found: dict[str, list[tuple[Broadcast, Broadcast]]]) -> Iterator[Figure]:
    added = {kind: [hurt.seconds - quiet.seconds for quiet, hurt in rounds] for kind, rounds in found.items()}
    twice = {kind: [_twice(quiet, hurt) for quiet, hurt in rounds] for kind, rounds in found.items()}
    medians = {kind: round(statistics.median(seconds), 3) for kind, seconds in added.items()}
    all_rounds = {kind: [round(s, 3) for s in seconds] for kind, seconds in added.items()}
    quiet = [round(q.seconds, 3) for q, _ in found[KILL]]
    details = {"bytes": NUM_BYTES, "medians_s": medians, "rounds_s": all_rounds, "undisturbed_s": quiet}
    yield median(
        "repair_added_s",
        "what kill -9 of a middle relay adds to a running broadcast",
        added[KILL],
        bar=BARS["repair_added_s"],
        unit="s",
        details=details,
    )
    worst = _worst([kind for kind in KINDS if kind != KILL], added)
    yield median(
        "hang_added_s",
        f"what SIGSTOP, a link dropped both ways, and one way add; the worst of them: {worst}",
        added[worst],
        bar=BARS["hang_added_s"],
        unit="s",
        details=details,
    )
    worst = _worst(KINDS, twice)
    yield median(
        "repair_resent_share",
        f"bytes that a survivor received twice over the version's, 1 GiB; the worst of these cases: {worst}",
        twice[worst],
        bar=BARS["repair_resent_share"],
        details={kind: [round(share, 4) for share in shares] for kind, shares in twice.items()},
    )


def _worst(kinds: Sequence[str], of: dict[str, list[float]]) -> str:
    return max(kinds, key=lambda kind: statistics.median(of[kind]))


def _twice(quiet: Broadcast, hurt: Broadcast) -> float:
    return max(hurt.received[place] - quiet.received[place] for place in hurt.received) / NUM_BYTES
