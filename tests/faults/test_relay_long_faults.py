"""Long faults under load: a relay stopped for half a minute, etcd away for a minute, twenty joiners, a slow host.

Beside every relay somebody reads all the time: each version that it gets is whole, none is older than one before. The
last assertion is the same digests everywhere. `make test-faults` runs them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paramserver.client import RelayClient, Ticket
from paramserver.core.stragglers import GOOD_AFTER_MAX
from paramserver.membership import LocalEtcd
from protos.errors import InDoubt, LaminarError
from tests.support import links
from tests.support.links import Host, Net
from tests.support.processes import Daemon
from tests.support.relays import Relays, until
from tests.support.survivors import (
    MODEL,
    SLOW,
    Reading,
    client,
    contents,
    held,
    identical,
    in_the_middle,
    publish_seed,
    reading,
    stage_of,
    status_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.long]

STOPPED_S = 30.0
AWAY_S = 60.0
NUM_JOINERS = 20
STEP_S = 2.0  # a trainer's, between two publishes
bytes_of = functools.cache(contents)


def now() -> float:
    return asyncio.get_running_loop().time()


@contextlib.asynccontextmanager
async def relays_on(etcd: str, directory: Path) -> AsyncIterator[Relays]:
    found = Relays(etcd, directory)
    try:
        yield found
    finally:
        await asyncio.to_thread(found.close)


async def start(relays: Relays, name: str, *flags: str, on: Host | None = None, pool_bytes: str = "64MiB") -> Daemon:
    return await asyncio.to_thread(functools.partial(relays.start, name, *flags, on=on, pool_bytes=pool_bytes))


async def members_at(daemon: Daemon) -> tuple[str, ...]:
    status = await status_of(daemon)
    return status.members if status else ()


async def chain_at(daemon: Daemon) -> tuple[str, ...]:
    """The order of the newest plan, as this relay knows it."""
    status = await status_of(daemon)
    return next((model.chain for model in status.models if model.model == MODEL), ()) if status else ()


async def publish_until(head: RelayClient, end: float, first: int, daemons: list[Daemon]) -> int:
    """One version after the other reaches all of `daemons`; the first seed that was not published."""
    seed = first
    while now() < end or seed == first:
        ticket = await publish_seed(head, seed)
        await identical(daemons, ticket.version, seed)
        seed += 1
        await asyncio.sleep(min(STEP_S, max(0.0, end - now())))
    return seed


async def test_a_relay_stopped_for_half_a_minute_holds_up_nobody_and_is_one_of_them_again(
    relays: Relays,
) -> None:
    """First it is a silent member, which the hop's heartbeat finds out; then its lease runs out; then it is back."""
    lease = ("--lease-ttl-s", "15")
    a = await start(relays, "a", *lease, "--max-rate", "32MiB")
    b, c, d = [await start(relays, name, *lease, "--max-rate", "1280KiB") for name in "bcd"]
    others = [a, c, d]
    async with client(a) as head, reading(others, bytes_of) as readers, reading([b], bytes_of) as [stopped]:
        first = await publish_seed(head, 1)
        await identical([a, b, c, d], first.version, 1)
        ticket = await publish_seed(head, 2)
        await until(lambda: in_the_middle(c, ticket.version), "the next one is on its way")
        b.process.send_signal(signal.SIGSTOP)
        wakes_at = now() + STOPPED_S
        try:
            await identical(others, ticket.version, 2)
            assert "b" in await members_at(a), "a hop's silence is noticed long before a lease runs out"
            seed = await publish_until(head, wakes_at, 3, others)
            assert "b" not in await members_at(a), "its lease ran out"
        finally:
            b.process.send_signal(signal.SIGCONT)
        await ends_the_same(head, seed, [a, b, c, d], [*readers, stopped])
    assert "bypassing b" in c.log()
    assert not [reader.refused for reader in readers if reader.refused]


async def ends_the_same(head: RelayClient, seed: int, daemons: list[Daemon], readers: list[Reading]) -> None:
    """One more version comes to all, under one root, and every reader gets it."""
    ticket = await publish_seed(head, seed)
    await identical(daemons, ticket.version, seed)
    await ticket.wait_copies(len(daemons), 60.0)

    async def read() -> bool:
        return all(seed in reader.read_at for reader in readers)

    await until(read, "all readers have the newest version")


async def test_etcd_away_for_a_minute_stops_neither_training_nor_reading(tmp_path: Path) -> None:
    """What was sealed is served and flows on; what is published meanwhile stays copied, and is settled afterwards."""
    async with LocalEtcd() as etcd, relays_on(etcd.endpoint, tmp_path) as relays:
        a = await start(relays, "a", "--max-rate", "16MiB")
        b, c = await start(relays, "b", "--max-rate", SLOW), await start(relays, "c")
        async with client(a) as head, reading([a, b, c], bytes_of) as readers:
            first = await publish_seed(head, 1)
            await identical([a, b, c], first.version, 1)
            sealed = await publish_seed(head, 2)
            await sealed.wait_sealed(60.0)
            await until(lambda: in_the_middle(c, sealed.version), "the tail has a part")
            await etcd.kill()
            back_at = now() + AWAY_S
            await identical([a, b, c], sealed.version, 2)
            pending = await publish_meanwhile(head, back_at, 3)
            assert [await stage_of(ticket) for ticket in pending] == ["copied"] * len(pending)
            assert {(await held(daemon))[-1] for daemon in (a, b, c)} == {sealed.version}
            await etcd.start()
            assert not [reader.refused for reader in readers if reader.refused]
            seed = 3 + len(pending)
            newest = await until(lambda: publish_again(head, seed), "publishing goes on")
            await identical([a, b, c], newest.version, seed)
            await same_fate(pending, [a, b, c])
            await ends_the_same(head, seed + 1, [a, b, c], readers)
        assert not [reader.refused for reader in readers if reader.refused]


async def publish_meanwhile(head: RelayClient, end: float, first: int) -> list[Ticket]:
    """A trainer that goes on: each publish returns at copied, and none is called sealed."""
    pending: list[Ticket] = []
    while now() < end:
        pending.append(await publish_seed(head, first + len(pending)))
        with pytest.raises(InDoubt, match="it is copied"):
            await pending[-1].wait_sealed(min(AWAY_S / 4, max(0.1, end - now())))
    return pending


async def publish_again(head: RelayClient, seed: int) -> Ticket | None:
    with contextlib.suppress(LaminarError):
        ticket = await publish_seed(head, seed)
        await ticket.wait_sealed(60.0)
        return ticket
    return None


async def same_fate(pending: list[Ticket], daemons: list[Daemon]) -> None:
    """Each of them is sealed or came to nothing, and no relay thinks otherwise."""
    for ticket in pending:

        async def decided(ticket: Ticket = ticket) -> bool:
            return await stage_of(ticket) not in ("", "copied")

        await until(decided, f"version {ticket.version} is settled")
    known = [{m.newest_sealed for m in status.models} for d in daemons if (status := await status_of(d)) is not None]
    assert known == [known[0]] * len(daemons)


async def test_twenty_relays_that_join_at_once_all_get_what_is_there_and_what_comes(
    relays: Relays,
) -> None:
    """As processes, each with its own pool and lease, while a trainer publishes."""
    lease = ("--lease-ttl-s", "15")
    a, b = [await start(relays, name, *lease, pool_bytes="32MiB") for name in "ab"]
    names = [f"j{number:02d}" for number in range(NUM_JOINERS)]
    with ThreadPoolExecutor(NUM_JOINERS) as threads:
        async with client(a) as head, reading([a, b], bytes_of) as readers:
            first = await publish_seed(head, 1)
            await identical([a, b], first.version, 1)
            begin = functools.partial(relays.start, pool_bytes="32MiB", ready_within_s=180.0)
            joining = [asyncio.wrap_future(threads.submit(begin, name, *lease)) for name in names]
            started = asyncio.gather(*joining)
            seed = 2
            while not started.done():
                ticket = await publish_seed(head, seed)
                await identical([a, b], ticket.version, seed)
                seed += 1
                await asyncio.wait([started], timeout=STEP_S)
            everybody = [a, b, *await started]
            await until(lambda: all_members(a, 2 + NUM_JOINERS), "all are members")
            async with reading(everybody[2:], bytes_of) as joined:
                await ends_the_same(head, seed, everybody, [*readers, *joined])
            chains = {await chain_at(daemon) for daemon in everybody}
            assert [sorted(chain) for chain in chains] == [sorted(["a", "b", *names])], "one order, each of them once"
        assert not [reader.refused for reader in [*readers, *joined] if reader.refused]
        assert set(threads.map(Daemon.stop, everybody)) == {0}


async def all_members(daemon: Daemon, num_members: int) -> bool:
    return len(await members_at(daemon)) == num_members


RATE_BIT_S = 50e6  # a version takes a second on each hop: a busy machine's own delays are little beside that
SLOWED = 10  # times
CHUNK_BYTES = "1MiB"
"""Much more than a link lets pass at once after a pause (`links.BURST_BYTES`), so that rates are the link's."""


@pytest.fixture
def net() -> Iterator[Net]:
    with Net(5, rate_bit_s=RATE_BIT_S) as found:
        yield found


@pytest.fixture
def five(net: Net, tmp_path: Path) -> Iterator[list[Daemon]]:
    """Relays a > b > c > d > e, each on a host of its own; the etcd is at the switch."""
    found = Relays(net.start_etcd(tmp_path).ready["etcd"], tmp_path)
    flags = ("--lease-ttl-s", "15", "--chunk-bytes", CHUNK_BYTES)
    yield [found.start(name, *flags, on=host) for name, host in zip("abcde", net.hosts, strict=True)]
    found.close()


@pytest.mark.skipif(bool(links.missing()), reason=links.missing() or "-")
async def test_a_slow_link_in_the_middle_of_the_chain_costs_the_others_a_few_versions_and_not_their_speed(
    net: Net, five: list[Daemon]
) -> None:
    """Those before it never wait; those behind it do until it has been slow twice and is the tail; then it is back."""
    a = five[0]
    async with client(a) as head, reading(five, bytes_of) as readers:
        for seed in (1, 2):
            await identical(five, (await publish_seed(head, seed)).version, seed)
        assert await chain_at(a) == ("a", "b", "c", "d", "e")
        net.hosts[2].limit(RATE_BIT_S / SLOWED)
        seed, moved = 3, False
        while not moved:
            await ends_the_same(head, seed, five, readers)
            assert earlier(readers, seed) >= {"a", "b"}, "those before it have it long before"
            moved = (await chain_at(a))[-1] == "c"
            seed += 1
            assert seed < 10, "slow on two versions in a row, it goes to the tail"
        await ends_the_same(head, seed, five, readers)
        assert earlier(readers, seed) == {"a", "b", "d", "e"}, "nobody else waits for it now"
        net.hosts[2].limit(RATE_BIT_S)
        for _ in range(GOOD_AFTER_MAX):
            if not await published_and_slow(head, five):
                break
        else:
            raise AssertionError("it had many good versions and is at the tail still")
        await ends_the_same(head, 99, five, readers)
    assert not [reader.refused for reader in readers if reader.refused]
    assert not any("bypassing c" in daemon.log() for daemon in five), "slow is not dead"


def earlier(readers: list[Reading], seed: int) -> set[str]:
    """The relays that had the seed's version half a second, or more, before the slow one."""
    slow_at = next(reader.read_at[seed] for reader in readers if reader.name == "c")
    return {reader.name for reader in readers if reader.read_at[seed] < slow_at - 0.5}


async def published_and_slow(head: RelayClient, daemons: list[Daemon]) -> str:
    """After one more version: why the middle one is at the tail; "" when it counts as the others do."""
    ticket = await publish_seed(head, 50)
    await identical(daemons, ticket.version, 50)
    [model] = (await head.status()).models
    assert sorted(model.chain) == ["a", "b", "c", "d", "e"]
    return next(hop.slow for hop in model.hops if hop.relay == "c")


RUNS_S, RESTS_S = 0.02, 0.18  # of a process that gets a tenth of a processor; its rests are below a hop's silence


async def test_a_host_with_a_tenth_of_a_processor_in_the_middle_is_slow_and_not_dead(relays: Relays) -> None:
    lease = ("--lease-ttl-s", "15")
    a, b, c, d = [await start(relays, name, *lease) for name in "abcd"]
    async with client(a) as head, reading([a, b, d], bytes_of) as readers, reading([c], bytes_of) as [slow]:
        await identical([a, b, c, d], (await publish_seed(head, 1)).version, 1)
        throttling = asyncio.create_task(throttle(c))
        try:
            for seed in range(2, 8):
                ticket = await publish_seed(head, seed)
                await identical([a, b, d], ticket.version, seed)
                await identical([c], ticket.version, seed)
            assert "c" in await members_at(a), "it keeps its lease"
        finally:
            throttling.cancel()
            await asyncio.gather(throttling, return_exceptions=True)
        await ends_the_same(head, 8, [a, b, c, d], [*readers, slow])
    assert not [reader.refused for reader in readers if reader.refused]


async def throttle(daemon: Daemon) -> None:
    """Stops and continues the process in turns."""
    try:
        while True:
            daemon.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(RESTS_S)
            daemon.process.send_signal(signal.SIGCONT)
            await asyncio.sleep(RUNS_S)
    finally:
        daemon.process.send_signal(signal.SIGCONT)
