"""A pin that is kept: what a renewal that fails costs, and how it ends."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from paramserver.client import RelayClient
from tests.support.fake_relay import MODEL, relay
from tests.support.relays import until


async def test_a_renewal_that_fails_is_tried_again_and_a_pin_that_lapsed_ends_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with relay() as (holder, address), RelayClient(address, timeout_s=0.1) as client:
        holder.publish(1)
        lease = await client.acquire(MODEL, 1, holder="test")
        holder.answering.clear()  # renewals run into their timeout
        keeping = asyncio.create_task(client.keep_pinned(dataclasses.replace(lease, ttl_s=0.03)))

        async def tried_twice() -> bool:
            return holder.asked >= 2

        await until(tried_twice, "a second renewal")
        assert not keeping.done()
        assert "the pin of policy version 1 is not renewed" in caplog.text
        holder.answering.set()
        holder.leases.clear()
        await asyncio.wait_for(keeping, 60)
