"""The chain on eight hosts with links of 1 Gbit/s: against itself on two, a star, gloo's broadcast, and the formula.

Method. Network namespaces on one bridge, each host's cable limited both ways by tbf with a burst of 160 KiB, which any
transfer drains at once. The publisher runs beside the master relay and writes into its memory; a time runs from the
call of `publish` until the ticket says that every relay of the chain holds the version verified, so it includes
announcing, copying, sealing and the registry. Rounds alternate between the tiers, or between chain, gloo and star.
The star's receivers take the version from the master with the same code, verify every digest, and keep nothing.
gloo's broadcast verifies nothing.

The formula is T(p,k) = (p+k-2)(M/k T_byte + T_start) (Laminar, appendix D) with p = 8 relays, the master included, and
k chunks. T_byte comes from a bare socket loop over one such link; T_start from fetching chunks of 4 KiB over one such
hop, in seconds per chunk, so that requests which overlap count as little as they do in the chain.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from paramserver.client import RelayClient, TensorSource
from paramserver.core.chunk_size import HopCost, choose_chunk_bytes
from tests.bench.environment import peers
from tests.bench.figures import ROUNDS, Figure, median
from tests.bench.needs import compiler, namespaces, packages
from tests.bench.relay.contenders import PEERS, Contender, files, project
from tests.bench.relay.links.stations import stations, together
from tests.bench.relay.scene import MIB, WAIT_S, Scene, content, scene, tensors, timed_publish
from tests.support.links import Net
from tests.support.processes import Daemon

NUM_HOSTS = 8
RATE_BIT_S = 1e9
NUM_BYTES = 512 * MIB
TINY_CHUNK_BYTES = 4096
TINY_BYTES = 8 * MIB
BARE_BYTES = 128 * MIB
WARM_UP = 3
CHUNK_BYTES = choose_chunk_bytes(NUM_BYTES, NUM_HOSTS, HopCost(RATE_BIT_S / 8))
"""What the relays choose by themselves for these links; given to them, so that no first version differs."""
CHUNKS = ("--chunk-bytes", str(CHUNK_BYTES))
KEYS = {"chain_flatness": 1.06, "chain_vs_star": 5.0, "chain_vs_gloo": 2.0, "chain_vs_formula": 1.15}


@dataclass
class Tier:
    """Relays on the first hosts of a net; the first is the master."""

    daemons: list[Daemon]
    client: RelayClient
    model: str
    step: int = 0
    version: int = 0

    async def broadcast(self, sources: list[TensorSource]) -> float:
        """Seconds from the call of publish until every relay holds it."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        self.step += 1
        ticket, _ = await timed_publish(self.client, self.model, sources, self.step)
        await ticket.wait_all(WAIT_S)
        took = loop.time() - started
        self.version = ticket.version
        assert len(await ticket.holders()) == len(self.daemons)
        return took


def lacking() -> list[str]:
    return [*namespaces(), *compiler(), *packages(peers(PEERS / "requirements.txt"), "torch")]


def run() -> Iterator[Figure]:
    sources = tensors(content(NUM_BYTES))
    with Net(NUM_HOSTS, rate_bit_s=RATE_BIT_S) as net:
        seconds_per_byte, seconds_per_chunk = _one_hop(net)
        with scene(net) as long:
            with scene(net) as short:
                eight, two = asyncio.run(_lengths(long, short, net, sources))
            yield median(
                "chain_flatness",
                f"time on {NUM_HOSTS} relays over time on 2, {NUM_BYTES // MIB} MiB, 1 Gbit/s",
                [e / t for e, t in zip(eight, two, strict=True)],
                bar=KEYS["chain_flatness"],
                details={"eight_s": _short(eight), "two_s": _short(two)},
            )
            num_chunks = NUM_BYTES // CHUNK_BYTES + 1
            steps = NUM_HOSTS + num_chunks - 2
            formula = steps * (NUM_BYTES / num_chunks * seconds_per_byte + seconds_per_chunk)
            yield median(
                "chain_vs_formula",
                f"measured over T({NUM_HOSTS}, {num_chunks}) = {formula:.2f} s",
                [e / formula for e in eight],
                bar=KEYS["chain_vs_formula"],
                details={"t_byte_s": seconds_per_byte, "t_start_s": seconds_per_chunk, "measured_s": _short(eight)},
            )
            yield from asyncio.run(_others(long, net, sources))


def _short(times: list[float]) -> list[float]:
    return [round(time, 3) for time in times]


def start_tier(stage: Scene, net: Net, count: int, *flags: str) -> list[Daemon]:
    """A relay on each of the first `count` hosts, with room for two versions: one kept, one in transit."""
    room = str(2 * (NUM_BYTES + MIB))
    masters = [stage.relays.start("r0", "--retain", "1", *CHUNKS, *flags, pool_bytes=room, on=net.hosts[0])]
    others = [
        stage.relays.start(
            f"r{n}", "--retain", "1", "--no-publish-host", *CHUNKS, *flags, pool_bytes=room, on=net.hosts[n]
        )
        for n in range(1, count)
    ]
    return masters + others


@contextlib.asynccontextmanager
async def _tier(stage: Scene, model: str) -> AsyncIterator[Tier]:
    daemons = stage.relays.daemons
    async with RelayClient(daemons[0].ready["grpc"]) as client:
        yield Tier(daemons, client, model)


async def _lengths(long: Scene, short: Scene, net: Net, sources: list[TensorSource]) -> tuple[list[float], list[float]]:
    start_tier(long, net, NUM_HOSTS)
    start_tier(short, net, 2)
    async with _tier(long, "long") as eight, _tier(short, "short") as two:
        for _ in range(WARM_UP):
            await eight.broadcast(sources)
            await two.broadcast(sources)
        pairs = [(await eight.broadcast(sources), await two.broadcast(sources)) for _ in range(ROUNDS)]
    return [e for e, _ in pairs], [t for _, t in pairs]


async def _others(long: Scene, net: Net, sources: list[TensorSource]) -> list[Figure]:
    environment = peers(PEERS / "requirements.txt")
    pull = [*project("puller"), "--holder", long.relays.daemons[0].ready["data"], "--model", "long"]
    store = f"tcp://{net.hosts[0].address}:29500"
    broadcast = [str(environment.python), str(PEERS / "gloo_broadcast.py"), "--ranks", str(NUM_HOSTS)]
    rank = [*broadcast, "--bytes", str(NUM_BYTES), "--store", store, "--rank"]
    chain, star, gloo = [], [], []
    with contextlib.ExitStack() as stack:
        pullers = stack.enter_context(stations([[*h.prefix, *pull] for h in net.hosts[1:]], _logs(long, "star")))
        commands = [[*host.prefix, *rank, str(host.number)] for host in net.hosts]
        ranks = stack.enter_context(stations(commands, _logs(long, "gloo")))
        async with _tier(long, "long") as tier:
            await tier.broadcast(sources)
            for _ in range(ROUNDS):
                chain.append(await tier.broadcast(sources))
                star.append(await asyncio.to_thread(together, pullers, str(tier.version)))
                gloo.append(await asyncio.to_thread(together, ranks))
    times = {"chain_s": _short(chain), "star_s": _short(star), "gloo_s": _short(gloo)}
    found = [
        median(
            "chain_vs_star",
            f"{NUM_HOSTS} relays: time when everybody pulls from the master, over the chain",
            [s / c for s, c in zip(star, chain, strict=True)],
            bar=KEYS["chain_vs_star"],
            better="more",
            details=times,
        )
    ]
    what = "the same hosts and links: gloo's broadcast, which verifies nothing, over the chain"
    ratios = [g / c for g, c in zip(gloo, chain, strict=True)]
    return [*found, median("chain_vs_gloo", what, ratios, bar=KEYS["chain_vs_gloo"], better="more", details=times)]


def _logs(stage: Scene, name: str) -> Path:
    directory = stage.directory / name
    directory.mkdir()
    return directory


def _one_hop(net: Net) -> tuple[float, float]:
    """(T_byte, T_start) from the first host to the second: seconds per byte, and per chunk."""
    sender, receiver = net.hosts[:2]
    settings = {"stripes": 1, "listen": sender.address, "sender_prefix": list(sender.prefix)}
    with files(BARE_BYTES) as where, Contender([*receiver.prefix, *project("bare")], settings, where) as bare:
        bare.round()
        per_byte = statistics.median(bare.round() for _ in range(ROUNDS)) / BARE_BYTES
    tiny = {**settings, "chunk_bytes": TINY_CHUNK_BYTES}
    with files(TINY_BYTES) as where, Contender([*receiver.prefix, *project("ours")], tiny, where) as ours:
        ours.round()
        per_chunk = statistics.median(ours.round() for _ in range(ROUNDS)) * TINY_CHUNK_BYTES / TINY_BYTES
    return per_byte, per_chunk - TINY_CHUNK_BYTES * per_byte
