"""Relays killed or stopped for long, versions that overtake each other, publishers that race."""

from __future__ import annotations

import asyncio
import contextlib
import signal

import pytest

from paramserver.client import RelayClient, Ticket
from protos.errors import Conflict
from tests.support.processes import Daemon
from tests.support.relays import Relays, until
from tests.support.survivors import (
    MODEL,
    SLOW,
    client,
    contents,
    held,
    identical,
    in_the_middle,
    publish_seed,
    status_of,
)

pytestmark = pytest.mark.slow

STOPPED_S = 11.0  # past every bound that a stopped relay meets: silence 2 s, lease 6 s, a stalled connection 10 s


async def start(relays: Relays, name: str, *flags: str) -> Daemon:
    return await asyncio.to_thread(relays.start, name, *flags)


async def chain(relays: Relays, names: str, *, slow: str, rate: str = SLOW) -> list[Daemon]:
    """Those in `slow` send at `rate`, the others at 32 MiB/s."""
    return [await start(relays, name, "--max-rate", rate if name in slow else "32MiB") for name in names]


async def test_two_neighbours_killed_in_mid_broadcast_cost_their_successor_nothing_but_time(relays: Relays) -> None:
    a, b, c, d, e = await chain(relays, "abcde", slow="bc")
    async with client(a) as head:
        ticket = await publish_seed(head, 1, scale=2)
        await until(lambda: in_the_middle(d, ticket.version), "the one behind them has a part")
        b.kill()
        c.kill()
        await identical([a, d, e], ticket.version, 1, scale=2)
        await ticket.wait_all(60.0)
        await until(lambda: holders_are(ticket, "a", "d", "e"), "the dead count for nothing once their leases are over")
        later = await publish_seed(head, 2)
        await identical([a, d, e], later.version, 2)


async def holders_are(ticket: Ticket, *names: str) -> bool:
    return await ticket.holders() == names


async def test_the_tail_and_its_upstream_killed_leave_the_rest_whole(relays: Relays) -> None:
    a, b, c, d = await chain(relays, "abcd", slow="bc")
    async with client(a) as head:
        ticket = await publish_seed(head, 1, scale=2)
        await until(lambda: in_the_middle(d, ticket.version), "the tail has a part")
        d.kill()
        c.kill()
        await identical([a, b], ticket.version, 1, scale=2)
        await ticket.wait_all(60.0)


async def test_a_relay_stopped_for_long_in_mid_broadcast_comes_back_without_a_word_of_what_it_missed(
    relays: Relays,
) -> None:
    """It lost its lease and its connections; others published two versions; it goes on where the tier is now."""
    a, b, c = await chain(relays, "abc", slow="b")
    async with client(a) as head:
        ticket = await publish_seed(head, 1, scale=2)
        await until(lambda: in_the_middle(c, ticket.version), "the tail has a part")
        b.process.send_signal(signal.SIGSTOP)
        stopped_until = asyncio.get_running_loop().time() + STOPPED_S
        try:
            await identical([a, c], ticket.version, 1, scale=2)
            await until(lambda: is_no_member(a, "b"), "its lease ran out")
            for seed in (2, 3):
                ticket = await publish_seed(head, seed)
                await identical([a, c], ticket.version, seed)
            await asyncio.sleep(stopped_until - asyncio.get_running_loop().time())  # the fault's own length
        finally:
            b.process.send_signal(signal.SIGCONT)
        await identical([a, b, c], ticket.version, 3)
        await ticket.wait_copies(3, 60.0)
        later = await publish_seed(head, 4)
        await identical([a, b, c], later.version, 4)


async def is_no_member(daemon: Daemon, name: str) -> bool:
    status = await status_of(daemon)
    return status is not None and name not in status.members


async def test_the_next_version_announced_while_one_still_travels_comes_after_it(relays: Relays) -> None:
    """What has begun is finished; of those that have not, only the newest is brought."""
    a, b, c = await chain(relays, "abc", slow="b", rate="2MiB")
    events: list[int] = []
    async with client(a) as head, client(c) as tail:
        following = asyncio.create_task(follow(tail, events))
        first = await publish_seed(head, 1, scale=2)
        await until(lambda: in_the_middle(c, first.version), "the first one travels")
        later = [await publish_seed(head, seed, scale=2) for seed in (2, 3, 4)]
        assert await held(c) == ()
        await identical([a, b, c], later[-1].version, 4, scale=2)
        await until(lambda: has_heard(events, later[-1].version), "the watcher has heard of the newest")
        for version in events[-2:]:
            lease = await tail.acquire(MODEL, version, holder="test")
            assert (lease.path / "model.safetensors").read_bytes() == contents(version, scale=2)
            await tail.release(lease)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    if f"version {first.version} makes way" not in c.log():  # for want of bytes: the whole machine stood still
        assert events[0] == first.version, "it had begun, so it arrived"
    assert events == sorted(set(events))


async def were_refused(refused: list[str], times: int) -> bool:
    return len(refused) >= times


async def has_heard(events: list[int], version: int) -> bool:
    return version in events


async def follow(relay: RelayClient, events: list[int]) -> None:
    async for event in relay.watch(MODEL):
        if event.kind == "available":
            events.extend([event.version.version])


async def test_two_publishers_at_once_never_mix_and_the_one_refused_hears_it(relays: Relays) -> None:
    """Through different relays, of different runs, again and again."""
    a, b, c = [await start(relays, name) for name in "abc"]
    seeds: dict[int, int] = {}
    refused: list[str] = []

    async def trainer(daemon: Daemon, run: str, mine: range) -> None:
        for seed in mine:
            ticket = await until(lambda seed=seed: attempt(daemon, run, seed), f"{run} publishes {seed}")  # type: ignore[misc]
            assert ticket.version not in seeds, "one number, one version"
            seeds[ticket.version] = seed

    async def attempt(daemon: Daemon, run: str, seed: int) -> Ticket | None:
        async with client(daemon) as relay:  # the run ends with it
            try:
                ticket = await publish_seed(relay, seed, run=run)
            except Conflict as error:
                refused.append(error.message)
                return None
            await ticket.wait_sealed(60.0)
            return ticket

    async with client(a) as other, asyncio.TaskGroup() as group:
        await (await other.master_of(MODEL)).hold_run(MODEL, "before them", "test")
        group.create_task(trainer(b, "one", range(1, 5)))
        group.create_task(trainer(c, "two", range(11, 15)))
        await until(lambda: were_refused(refused, 2), "somebody is refused")
        await other.close()  # ends the run
    newest = max(seeds)
    assert sorted(seeds.values()) == [1, 2, 3, 4, 11, 12, 13, 14]
    assert all("has a publisher already" in message for message in refused)
    await identical([a, b, c], newest, seeds[newest])
    for daemon in (a, b, c):
        async with client(daemon) as relay:
            for version in await relay.versions(MODEL):
                with contextlib.suppress(Conflict):
                    lease = await relay.acquire(MODEL, version.version, holder="test")
                    assert (lease.path / "model.safetensors").read_bytes() == contents(seeds[version.version])
                    await relay.release(lease)
