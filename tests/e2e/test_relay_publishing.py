"""Publishers that die or hurry, tickets while acknowledgements are slow, readers in a race with retirement."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from safetensors.numpy import save

from paramserver.client import RelayClient, TensorSource, TensorSpec, open_stream, publish
from paramserver.client.relay import RunHold
from paramserver.membership import LocalEtcd
from protos.errors import Conflict, InDoubt, InvalidRequest, NotFound, Unavailable, UnknownModel
from protos.laminar.v1 import relay_pb2 as pb
from tests.support.relays import Relays, until
from tests.support.survivors import SLOW
from tests.support.weights import source_of, weights

pytestmark = pytest.mark.slow

MODEL = "policy"
T = TypeVar("T")
W = TensorSource("w", "U8", (8,), lambda: memoryview(b"12345678"))

STUCK_PUBLISHER = """
import asyncio, sys, time
from paramserver.client import RelayClient, TensorSource, publish

def read_second():
    open(sys.argv[2], "w").close()
    time.sleep(120)

async def main():
    size = 3 << 20
    tensors = [TensorSource("a", "U8", (size,), lambda: memoryview(bytes(size))),
               TensorSource("b", "U8", (size,), read_second)]
    async with RelayClient(sys.argv[1]) as relay:
        await publish(relay, "policy", tensors, step=1, run="stuck", force_tcp=sys.argv[3] == "tcp")

asyncio.run(main())
"""


@pytest.mark.parametrize("way", ["mapped", "tcp"])
async def test_a_publisher_killed_in_mid_write_leaves_nothing_and_the_next_goes_on(
    relays: Relays, tmp_path: Path, way: str
) -> None:
    head, tail = [relays.start(name) for name in "ab"]
    reached = tmp_path / "half"
    command = [sys.executable, "-c", STUCK_PUBLISHER, head.ready["grpc"], str(reached), way]
    publisher = spawn(command)
    async with RelayClient(head.ready["grpc"]) as first, RelayClient(tail.ready["grpc"]) as second:

        async def half_written() -> bool:
            assert publisher.poll() is None
            used = [(await relay.status()).used_bytes for relay in (first, second)] if reached.exists() else [0]
            return min(used) > 6 << 20

        await until(half_written, "both relays hold a part of it")
        publisher.send_signal(signal.SIGKILL)
        publisher.wait()

        async def nothing_left() -> bool:
            found = [await relay.status() for relay in (first, second)]
            return all(s.used_bytes == s.quarantined_bytes == 0 and not s.transfers for s in found)

        await until(nothing_left, "the memory of both is back")
        for relay in (first, second):
            assert await relay.versions(MODEL) == []
        tensors = weights(1)
        ticket = await publish(first, MODEL, source_of(tensors), step=1, run="next")
        await ticket.wait_all(60.0)
        assert ticket.version == 2, "the number of the dead one is not used again"
        assert await bytes_at(second, 2) == save(tensors)
    assert "left before it was committed" in head.log()


async def test_a_relay_that_distrusts_publishers_maps_nothing_into_them(relays: Relays, tmp_path: Path) -> None:
    """Their bytes come by the data port, where the relay copies and hashes them itself."""
    head, tail = relays.start("a", "--distrust-publisher"), relays.start("b")
    async with RelayClient(head.ready["grpc"]) as first, RelayClient(tail.ready["grpc"]) as second:
        for step, count in ((1, 1), (2, 2)):
            tensors = weights(step)
            ticket = await publish(first, MODEL, source_of(tensors), step=step, run="r")
            await ticket.wait_all(60.0)
            assert await bytes_at(second, count) == save(tensors)
        assert first.mappings.num_kept == 0
        assert str(relays.pools) not in mapped_here()


async def test_a_publisher_holds_no_memory_of_a_relay_that_died(relays: Relays) -> None:
    """The next life of the relay needs that memory for its pool, and may not start without it."""
    daemon = relays.start("a")
    async with RelayClient(daemon.ready["grpc"]) as relay:
        await (await publish(relay, MODEL, source_of(weights(1)), step=1, run="r")).wait_sealed(60.0)
        assert relay.mappings.num_kept == 1
        daemon.kill()

        async def let_go() -> bool:
            return relay.mappings.num_kept == 0 and str(relays.pools) not in mapped_here()

        await until(let_go, "nothing of it is mapped")


async def test_a_publish_that_failed_maps_nothing_once_its_publisher_is_closed(relays: Relays) -> None:
    """Not only when the collector of cycles next runs: the relay needs that memory, and a trainer may switch it off."""
    daemon = relays.start("a")
    short = TensorSource("short", "U8", (100,), lambda: memoryview(b"short"))
    gc.collect()
    gc.disable()
    try:
        async with RelayClient(daemon.ready["grpc"]) as relay:
            with pytest.raises(InvalidRequest, match="'short' gave 5 bytes"):
                await publish(relay, MODEL, [*source_of(weights(1)), short], step=1, run="r")
            assert relay.mappings.num_kept > 0

        async def let_go() -> bool:
            return str(relays.pools) not in mapped_here()

        await until(let_go, "nothing is mapped")  # the copy's thread may be about to let go of its last work
    finally:
        gc.enable()


async def test_an_error_that_is_kept_keeps_no_memory_of_the_relay(relays: Relays) -> None:
    """Its traceback has the frames that copied, and these have views of the mapped files."""
    daemon = relays.start("a")
    short = TensorSource("short", "U8", (100,), lambda: memoryview(b"short"))
    async with RelayClient(daemon.ready["grpc"]) as relay:
        with pytest.raises(InvalidRequest, match="'short' gave 5 bytes") as kept:
            await publish(relay, MODEL, [*source_of(weights(1)), short], step=1, run="r")
        streamed = await open_stream(relay, MODEL, [TensorSpec("w", "U8", (100,))], step=2, run="r")
        with pytest.raises(InvalidRequest, match="'w' came with more than its 100 bytes") as second:
            streamed.write("w", memoryview(bytes(101)))
        await streamed.give_up(second.value)
    assert str(relays.pools) not in mapped_here()
    assert kept.tb is not None, "else it would hold nothing anyway"


async def test_a_publish_whose_relay_dies_on_the_way_maps_nothing_once_its_publisher_is_closed(relays: Relays) -> None:
    """An error that names itself as its cause is a cycle, and holds the frames that hold the memory."""
    head, tail = relays.start("a"), relays.start("b")
    first, *others = source_of(weights(1))

    def dying() -> memoryview:
        if head.process.poll() is None:
            head.kill()
        return first.read()

    gc.collect()
    gc.disable()
    try:
        async with RelayClient(head.ready["grpc"]) as relay:
            await relay.master_of(MODEL)
        async with RelayClient(tail.ready["grpc"]) as relay:
            sources = [dataclasses.replace(first, read=dying), *others]
            await (await publish(relay, MODEL, sources, step=1, run="r")).wait_sealed(60.0)

        async def let_go() -> bool:
            return str(relays.pools) not in mapped_here()

        await until(let_go, "nothing is mapped")
    finally:
        gc.enable()


def mapped_here() -> str:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return "\n".join(line for line in lines if "laminar-test" in line)


def spawn(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(Path.cwd())})


async def bytes_at(relay: RelayClient, version: int | None = None) -> bytes:
    lease = await relay.acquire(MODEL, version, holder="test")
    found = (lease.path / "model.safetensors").read_bytes()
    await relay.release(lease)
    return found


class LosesCommitReplies(RelayClient):
    """The commit arrives, its reply does not; `then` happens in between."""

    def __init__(self, address: str, then: Callable[[], None] = lambda: None) -> None:
        super().__init__(address)
        self._then: Callable[[], None] | None = then

    async def call(self, reply: Awaitable[T]) -> T:
        found = await super().call(reply)
        if isinstance(found, pb.CommitReply) and self._then is not None:
            then, self._then = self._then, None
            await asyncio.to_thread(then)
            raise Unavailable("the reply was lost")
        return found


async def test_a_commit_whose_reply_was_lost_makes_no_second_version(relays: Relays) -> None:
    relay = relays.start("a")
    async with LosesCommitReplies(relay.ready["grpc"]) as head:
        ticket = await publish(head, MODEL, [W], step=1, run="r")
        await ticket.wait_sealed(60.0)
        assert [(one.version, one.step) for one in await head.versions(MODEL)] == [(ticket.version, 1)]
        assert ticket.version == 1


async def test_a_commit_is_settled_though_its_master_died_with_the_reply(relays: Relays) -> None:
    a, b = relays.start("a"), relays.start("b")
    loop = asyncio.get_running_loop()

    async def shown_at_b() -> bool:
        return "policy version 1 (step 1) available" in b.log()

    def seal_and_die() -> None:
        asyncio.run_coroutine_threadsafe(until(shown_at_b, "b holds version 1"), loop).result()
        a.kill()

    async with RelayClient(a.ready["grpc"]) as first, RelayClient(b.ready["grpc"]) as second:
        await first.master_of(MODEL)
        second._peers[a.ready["grpc"]] = LosesCommitReplies(a.ready["grpc"], seal_and_die)
        ticket = await publish(second, MODEL, [W], step=1, run="r")
        await ticket.wait_sealed(60.0)
        assert [(one.version, one.step) for one in await second.versions(MODEL)] == [(ticket.version, 1)]


async def test_a_claim_that_ended_at_the_master_unheard_is_opened_again(relays: Relays) -> None:
    """The master lost its lease and won the next election while its word about the claim was on the way."""
    relay = relays.start("a")
    async with RelayClient(relay.ready["grpc"]) as head:
        head._claims[MODEL, "r"] = RunHold(asyncio.create_task(asyncio.sleep(600)))
        ticket = await publish(head, MODEL, [W], step=1, run="r")
        await ticket.wait_sealed(60.0)


async def test_a_ticket_goes_through_its_stages_in_order(tmp_path: Path) -> None:
    """etcd hangs (not dies), so that `copied` lasts; a slow middle hop keeps `k_relays` apart from `all`."""
    async with LocalEtcd() as etcd, contextlib.AsyncExitStack() as stack:
        relays = Relays(etcd.endpoint, tmp_path)
        stack.push_async_callback(asyncio.to_thread, relays.close)
        rates = {"a": "2MiB", "b": SLOW, "c": "64MiB"}
        daemons = [
            await asyncio.to_thread(relays.start, name, "--max-rate", rate, "--lease-ttl-s", "20")
            for name, rate in rates.items()
        ]
        seen: list[str] = []
        async with RelayClient(daemons[0].ready["grpc"]) as head, RelayClient(daemons[2].ready["grpc"]) as tail:
            await head.master_of(MODEL)
            await head.hold_run(MODEL, "r", "test")
            os.kill(etcd.pid, signal.SIGSTOP)
            tensors = weights(1)
            try:
                ticket = await publish(head, MODEL, source_of(tensors), step=1, run="r")
                seen.append(await ticket.stage())
                with pytest.raises(InDoubt, match=r"had not reached 'sealed' after 0\.5 s; it is copied"):
                    await ticket.wait_sealed(0.5)
                assert await head.versions(MODEL) == []
            finally:
                os.kill(etcd.pid, signal.SIGCONT)

            async def on_all() -> bool:
                stage = await ticket.stage()
                if stage != seen[-1]:
                    seen.append(stage)
                return stage == "all"

            await until(on_all, "every relay holds it")
            assert await ticket.holders() == ("a", "b", "c")
            assert await bytes_at(tail) == save(tensors)
    assert seen == ["copied", "sealed", "k_relays", "all"]


async def test_with_nobody_following_one_holder_is_all_there_is(relays: Relays) -> None:
    daemon = relays.start("a")
    async with RelayClient(daemon.ready["grpc"]) as relay:
        ticket = await publish(relay, MODEL, [W], step=1, run="r", metadata={})
        await ticket.wait_all(60.0)
        assert (await ticket.stage(), await ticket.holders()) == ("all", ("a",))
        with pytest.raises(
            InDoubt, match=r"is sealed, but had not reached 2 relays after 0\.3 s: it is on a \(it needs no second"
        ):
            await ticket.wait_copies(2, 0.3)
        assert b"__metadata__" not in await bytes_at(relay)
        for use in (relay.acquire("other", holder="x"), relay.versions("other")):
            with pytest.raises(UnknownModel, match=f"known: {MODEL}"):
                await use
        with pytest.raises(Conflict, match="nothing may be written to version 1"):
            await relay.call(relay.stub.Abort(pb.AbortRequest(model=MODEL, version=1, token="guess")))


async def test_readers_in_a_race_with_fast_publishes_see_whole_versions_that_never_go_back(relays: Relays) -> None:
    head, tail = [relays.start(name, "--retain", "1", pool_bytes="40MiB") for name in "ab"]
    num = 12
    expected = {seed: save(weights(seed)) for seed in range(1, num + 1)}
    stop = time.monotonic() + 180.0
    found: dict[str, list[int]] = {}

    async def all_have_begun() -> bool:
        return len(found) == 2 and all(found.values())

    async def read(address: str) -> list[int]:
        versions = found[address] = []
        async with RelayClient(address) as relay:
            while (not versions or versions[-1] < num) and time.monotonic() < stop:
                with contextlib.suppress(NotFound, UnknownModel):  # nothing is there yet
                    lease = await relay.acquire(MODEL, holder="racer")
                    content = await asyncio.to_thread((lease.path / "model.safetensors").read_bytes)
                    assert content == expected[lease.version]
                    await relay.release(lease)
                    versions.append(lease.version)
                if len(versions) > 1:  # that one is about to retire, or has
                    with contextlib.suppress(NotFound):
                        lease = await relay.acquire(MODEL, versions[-2], holder="late")
                        content = await asyncio.to_thread((lease.path / "model.safetensors").read_bytes)
                        assert content == expected[lease.version]
                        await relay.release(lease)
                await asyncio.sleep(0)
        return versions

    async with RelayClient(head.ready["grpc"]) as relay:
        tickets = [await publish(relay, MODEL, source_of(weights(1)), step=1, run="r")]
        await tickets[0].wait_all(60.0)
        readers = [asyncio.create_task(read(daemon.ready["grpc"])) for daemon in (head, tail)]
        await until(all_have_begun, "both read the first")
        tickets += [
            await publish(relay, MODEL, source_of(weights(seed)), step=seed, run="r") for seed in range(2, num + 1)
        ]
        for ticket in tickets:
            await ticket.wait_sealed(60.0)
        for versions in await asyncio.gather(*readers):
            assert versions == sorted(versions)
            assert versions[-1] == num
            assert len(set(versions)) > 1
        await tickets[-1].wait_all(60.0)


async def test_the_number_of_calls_does_not_grow_with_the_number_of_tensors(relays: Relays) -> None:
    class Counting(RelayClient):
        num_calls = 0

        async def call(self, reply: Awaitable[T]) -> T:
            self.num_calls += 1
            return await super().call(reply)

    relay = relays.start("a")
    async with Counting(relay.ready["grpc"]) as client:

        async def calls(num_tensors: int) -> int:
            tensors = [TensorSource(f"w{n}", "U8", (8,), lambda: memoryview(b"12345678")) for n in range(num_tensors)]
            before = client.num_calls
            ticket = await publish(client, MODEL, tensors, step=1, run="r")
            num_calls = client.num_calls - before
            await ticket.wait_sealed(60.0)
            return num_calls

        await calls(1)  # finds the master and claims the run
        # The least of three: while a busy machine keeps an answer back for a second, it is asked for the master again.
        few, many = [min([await calls(num_tensors) for _ in range(3)]) for num_tensors in (1, 500)]
    assert few == many <= 3
