"""A relay that joins late: from three holders against from one, each holder's uplink limited.

Method. Network namespaces; three hosts whose uplinks are limited to 500 Mbit/s, and a joiner without a limit. Two
tiers hold the same bytes: one of three relays, one of the first host's relay alone. In turn, a relay is started
beside each, and its own log says how long the version took from its first request to its last verified chunk.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

from paramserver.client import RelayClient, publish
from tests.bench.figures import ROUNDS, Figure, median
from tests.bench.needs import namespaces
from tests.bench.relay.scene import MIB, WAIT_S, Scene, content, scene, tensors
from tests.support.links import Host, Net
from tests.support.relays import until

NUM_HOLDERS = 3
UPLINK_BIT_S = 500e6
NUM_BYTES = 256 * MIB
MODEL = "policy"
_COMPLETE = re.compile(r"complete, .* in (\d+\.\d+) s")


lacking = namespaces


def run() -> Iterator[Figure]:
    with Net(NUM_HOLDERS + 1) as net, scene(net) as three, scene(net) as one:
        asyncio.run(_hold(three, net.hosts[:NUM_HOLDERS]))
        asyncio.run(_hold(one, net.hosts[:1]))
        for host in net.hosts[:NUM_HOLDERS]:
            host.limit(UPLINK_BIT_S, "out")
        pairs = [(_join(three, net.hosts[-1], n), _join(one, net.hosts[-1], n)) for n in range(ROUNDS)]
    yield median(
        "join_parallel_gain",
        "late joiner: time from 1 holder over time from 3, the holders' uplinks limited",
        [alone / shared for shared, alone in pairs],
        bar=2.4,
        better="more",
        details={"three_s": [s for s, _ in pairs], "one_s": [a for _, a in pairs], "bytes": NUM_BYTES},
    )


async def _hold(stage: Scene, hosts: list[Host]) -> None:
    daemons = [stage.relay(f"holder{n}", NUM_BYTES, on=host) for n, host in enumerate(hosts)]
    async with RelayClient(daemons[0].ready["grpc"]) as client:
        ticket = await publish(client, MODEL, tensors(content(NUM_BYTES)), step=1, run="bench")
        await ticket.wait_all(WAIT_S)
        assert len(await ticket.holders()) == len(hosts)


def _join(stage: Scene, host: Host, number: int) -> float:
    """Seconds that the version took; the joiner is gone afterwards."""
    joiner = stage.relay(f"joiner{number}", NUM_BYTES, "--no-publish-host", on=host)

    async def took() -> float:
        found = _COMPLETE.search(joiner.log())
        return float(found[1]) if found else 0.0

    seconds = asyncio.run(until(took, "the joiner holds the version", WAIT_S))
    joiner.stop()
    return seconds
