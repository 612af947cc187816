"""verl's weights through a real relay, both sides, without verl: what is sent, what is waited for, what fails."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Iterator

import pytest
import torch

from paramserver.client import RelayClient
from protos.errors import Conflict, InvalidRequest, Unavailable
from tests.support.processes import Daemon
from tests.support.relays import Relays
from trainer_client import Publisher
from trainer_client.integrations.verl.receiving import arrived, made_by, tensors
from trainer_client.integrations.verl.sending import WeightSender

pytestmark = pytest.mark.slow

NAMES = [f"layer.{number}" for number in range(6)]


class Generator:
    """As verl's: each tensor is made when it is taken. Counts those taken, and those that are alive at once."""

    def __init__(self, value: float, shape: tuple[int, ...] = (4, 3), breaks_at: int | None = None) -> None:
        self.value, self.shape, self.breaks_at = value, shape, breaks_at
        self.taken = 0
        self.alive_max = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        made: list[weakref.ref[torch.Tensor]] = []
        for number, name in enumerate(NAMES):
            if number == self.breaks_at:
                raise RuntimeError("a collective failed")
            tensor = torch.full(self.shape, self.value + number)
            made.append(weakref.ref(tensor))
            self.taken += 1
            self.alive_max = max(self.alive_max, sum(one() is not None for one in made))
            yield name, tensor
            del tensor


class OneBuffer(Generator):
    """Fills the same memory again and again."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(self.shape)
        for number, name in enumerate(NAMES):
            self.taken += 1
            yield name, buffer.fill_(self.value + number)


@pytest.fixture(scope="module")
def relay(shared_etcd: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One for the module; each test publishes a model of its own."""
    with contextlib.closing(Relays(shared_etcd, tmp_path_factory.mktemp("relay"))) as relays:
        yield relays.start("a")


@contextlib.contextmanager
def sending(relay: Daemon, model: str) -> Iterator[WeightSender]:
    sender = WeightSender(relay.ready["grpc"], model, run=None, timeout_s=60.0)
    try:
        yield sender
    finally:
        sender.close()


async def values(relay: Daemon, model: str, version: int) -> list[float]:
    """The first value of each tensor of a version."""
    async with RelayClient(relay.ready["grpc"]) as client:
        found = {name: float(tensor.flatten()[0]) async for name, tensor in tensors(client, model, version)}
    return [found[name] for name in NAMES]


def expected(value: float) -> list[float]:
    return [value + number for number in range(len(NAMES))]


@pytest.mark.parametrize("kind", [Generator, OneBuffer])
def test_every_pass_is_a_version_and_later_ones_hold_one_tensor_at_a_time(kind: type[Generator], relay: Daemon) -> None:
    model = kind.__name__
    with sending(relay, model) as sender:
        for number in range(1, 4):
            weights = kind(100.0 * number)
            assert sender.send(weights, step=10 * number)["laminar/version"] == number
            assert weights.taken == len(NAMES)
            assert weights.alive_max <= 2, "the one that is made while the last is let go"
            assert asyncio.run(values(relay, model, number)) == expected(100.0 * number)


def test_a_publish_that_is_refused_takes_every_tensor_and_raises(relay: Daemon) -> None:
    with Publisher(relay.ready["grpc"], "taken") as other, sending(relay, "taken") as sender:
        other.publish({"weight": torch.zeros(2)}, step=0)
        weights = Generator(0.0)
        with pytest.raises(Conflict):
            sender.send(weights, step=1)
        assert weights.taken == len(NAMES)


def test_after_a_pass_of_other_tensors_the_next_is_taken_as_a_first_one(relay: Daemon) -> None:
    with sending(relay, "changed") as sender:
        sender.send(Generator(1.0), step=1)
        other = Generator(2.0, shape=(5, 3))
        with pytest.raises(InvalidRequest, match="announced as"):
            sender.send(other, step=2)
        assert other.taken == len(NAMES)
        last = Generator(3.0)
        version = int(sender.send(last, step=3)["laminar/version"])
        assert asyncio.run(values(relay, "changed", version)) == expected(3.0)


def test_an_error_of_the_generator_is_raised_and_publishes_nothing(relay: Daemon) -> None:
    with sending(relay, "broken") as sender:
        sender.send(Generator(1.0), step=1)
        with pytest.raises(RuntimeError, match="a collective failed"):
            sender.send(Generator(2.0, breaks_at=3), step=2)
        version = int(sender.send(Generator(3.0), step=3)["laminar/version"])
        assert asyncio.run(values(relay, "broken", version)) == expected(3.0)


async def test_a_receiver_waits_for_the_version_of_this_update(relay: Daemon) -> None:
    """Not for one of an earlier run under the same step, nor for an earlier one of this run."""
    model = "waited"
    with sending(relay, model) as earlier:
        await asyncio.to_thread(earlier.send, Generator(1.0), 5)
    async with RelayClient(relay.ready["grpc"]) as client:
        with sending(relay, model) as sender:
            for value in (2.0, 3.0):
                waiting = asyncio.create_task(arrived(client, model, made_by(sender.next, 5), 60.0))
                sent = await asyncio.to_thread(sender.send, Generator(value), 5)
                found = await waiting
                assert (found.version, found.step) == (int(sent["laminar/version"]), 5)
                assert await values(relay, model, found.version) == expected(value)


async def test_a_version_that_does_not_come_is_an_error_at_the_deadline(relay: Daemon) -> None:
    with sending(relay, "absent") as sender:
        async with RelayClient(relay.ready["grpc"]) as client:
            with pytest.raises(Unavailable, match="has not got the awaited version of absent within"):
                await arrived(client, "absent", made_by(sender.next, 1), 0.2)
