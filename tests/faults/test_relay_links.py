"""Links between hosts that are cut, one-way or both, or slow, in mid-broadcast. Needs network namespaces.

The heartbeat on the hop notices a cut, by default in 500 ms; TCP alone would wait for minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paramserver.client import RelayClient
from tests.support import links
from tests.support.links import Direction, Net
from tests.support.processes import Daemon
from tests.support.relays import Relays, until
from tests.support.survivors import client, held, identical, in_the_middle, publish_seed, status_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(links.missing()), reason=links.missing() or "-"),
]

RATE_BIT_S = 100e6  # 11 MiB take a second on each hop
SLOW_BIT_S = 8e6  # what one that is to be cut off sends, 11 MiB in as many seconds: there is time to act in the middle


@pytest.fixture
def net() -> Iterator[Net]:
    with Net(4, rate_bit_s=RATE_BIT_S) as found:
        yield found


@pytest.fixture
def four(net: Net, tmp_path: Path) -> Iterator[list[Daemon]]:
    """Relays a > b > c > d, each on a host of its own; the etcd is at the switch."""
    found = Relays(net.start_etcd(tmp_path).ready["etcd"], tmp_path)
    yield [found.start(name, on=host) for name, host in zip("abcd", net.hosts, strict=True)]
    for host in net.hosts:
        host.restore()
    found.close()


async def begun(head: RelayClient, tail: Daemon, seed: int) -> int:
    """A version that is on its way: the tail has a part of it."""
    ticket = await publish_seed(head, seed, scale=2)
    await until(lambda: in_the_middle(tail, ticket.version), "the tail has a part")
    return ticket.version


@pytest.mark.parametrize("direction", ["both", "out", "in"])
async def test_a_relay_cut_off_in_mid_broadcast_is_bypassed_and_catches_up_when_it_is_back(
    net: Net, four: list[Daemon], direction: Direction
) -> None:
    """One-way cuts are the worse ones: the one side still hears the other, and only an answer proves life."""
    a, b, c, d = four
    async with client(a) as head:
        net.hosts[1].limit(SLOW_BIT_S, "out")
        version = await begun(head, d, 1)
        net.hosts[1].cut(direction)
        await identical([a, c, d], version, 1, scale=2)  # while it is still cut off
        assert "bypassing b" in c.log()
        net.hosts[1].restore()
        net.hosts[1].limit(RATE_BIT_S)
        await identical([a, b, c, d], version, 1, scale=2)
        later = await publish_seed(head, 2)
        await identical([a, b, c, d], later.version, 2)


async def test_the_head_cut_off_seals_nothing_behind_the_back_of_its_successor(net: Net, four: list[Daemon]) -> None:
    a, b, c, d = four
    async with client(a) as head, client(b) as other:
        first = await publish_seed(head, 1)
        await identical(four, first.version, 1)
        net.hosts[0].cut("both")
        ticket = await publish_seed(other, 2)  # waits for the end of a lease and for the election
        await ticket.wait_copies(3, 60.0)
        net.hosts[0].restore()
        await identical([a, b, c, d], ticket.version, 2)


async def test_behind_a_link_slowed_to_a_tenth_the_version_still_arrives_and_nobody_else_waits(
    net: Net, four: list[Daemon]
) -> None:
    """The slow one's own bytes take ten times as long; those before it in the chain are as quick as ever."""
    a, b, c, d = four
    async with client(a) as head:
        ticket = await publish_seed(head, 1)
        await identical(four, ticket.version, 1)
        net.hosts[3].limit(RATE_BIT_S / 10)
        ticket = await publish_seed(head, 2)
        await identical([a, b, c], ticket.version, 2)
        assert await held(d) == (1,)
        status = await status_of(c)
        assert status is not None
        assert status.cut_off == ()
        await identical([d], ticket.version, 2)
        assert "bypassing" not in d.log(), "slow is not dead"
