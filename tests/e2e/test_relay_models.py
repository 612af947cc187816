"""Several models at once: each has its own versions and master, and none starves another."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from safetensors.numpy import save

from paramserver.client import RelayClient, publish
from tests.support.relays import Relays
from tests.support.weights import Arrays, source_of

pytestmark = pytest.mark.slow

MIB = 1 << 20


def tensors(size: int, seed: int) -> Arrays:
    return {"w": np.random.default_rng(seed).integers(0, 255, size, np.uint8)}


async def test_each_model_counts_its_own_versions(relays: Relays) -> None:
    daemon = relays.start("a")
    async with RelayClient(daemon.ready["grpc"]) as relay:
        for model, seeds in (("policy", (1, 2)), ("critic", (3,))):
            for seed in seeds:
                ticket = await publish(relay, model, source_of(tensors(5000, seed)), step=seed, run="r")
                await ticket.wait_sealed(60.0)
        assert {model.model: model.newest_sealed for model in (await relay.status()).models} == {
            "critic": 1,
            "policy": 2,
        }
        lease = await relay.acquire("critic", holder="test")
        assert (lease.path / "model.safetensors").read_bytes() == save(tensors(5000, 3))
        await relay.release(lease)


async def test_a_small_model_overtakes_a_large_one_on_a_slow_link(relays: Relays) -> None:
    head = relays.start("a", "--max-rate", "4MiB")
    tail = relays.start("b", "--no-publish-host")
    async with RelayClient(head.ready["grpc"]) as publisher, RelayClient(tail.ready["grpc"]) as reader:
        large = await publish(publisher, "policy", source_of(tensors(32 * MIB, 1)), step=1, run="r")
        small = await publish(publisher, "critic", source_of(tensors(1 * MIB, 2)), step=1, run="r")
        await small.wait_copies(2, 60.0)
        assert await large.stage() == "sealed", "the large one is still on its way: 8 s of the link"
        assert [transfer.model for transfer in (await reader.status()).transfers] == ["policy"]
        await large.wait_copies(2, 60.0)
        assert set(await large.holders()) == {"a", "b"}


async def test_publishers_of_two_models_write_at_the_same_time(relays: Relays) -> None:
    daemon = relays.start("a")
    async with RelayClient(daemon.ready["grpc"]) as one, RelayClient(daemon.ready["grpc"]) as other:
        for step in (1, 2, 3):
            tickets = await asyncio.gather(
                publish(one, "policy", source_of(tensors(3 * MIB, step)), step=step, run="r"),
                publish(other, "critic", source_of(tensors(2 * MIB, step)), step=step, run="r"),
            )
            assert [ticket.version for ticket in tickets] == [step, step]
            await asyncio.gather(*(ticket.wait_sealed(60.0) for ticket in tickets))
