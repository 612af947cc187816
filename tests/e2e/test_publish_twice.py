"""A publish whose outcome was not known, called again: the step becomes one version."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
import torch

from paramserver.client import Doubt, RelayClient, commits
from protos.errors import InDoubt, Unavailable
from protos.laminar.v1 import relay_pb2 as pb
from tests.support.relays import Relays, until
from trainer_client import AsyncPublisher, Publisher, TensorMeta

pytestmark = pytest.mark.slow

W = {"w": torch.arange(8)}
T = TypeVar("T")


class AfterCommit(RelayClient):
    """Once a commit has arrived, `then` happens instead of its reply."""

    def __init__(self, address: str, then: Callable[[], Awaitable[None]]) -> None:
        super().__init__(address)
        self.then: Callable[[], Awaitable[None]] | None = then

    async def call(self, reply: Awaitable[T]) -> T:
        found = await super().call(reply)
        if isinstance(found, pb.CommitReply) and self.then is not None:
            then, self.then = self.then, None
            await then()
        return found


async def interrupt() -> None:
    raise asyncio.CancelledError


async def steps(address: str) -> list[tuple[int, int]]:
    async with RelayClient(address) as relay:
        return [(one.version, one.step) for one in await relay.versions("policy")]


async def test_an_interrupted_commit_is_found_by_the_next_publish_of_the_step_and_by_a_resumed_trainer(
    relays: Relays,
) -> None:
    address = relays.start("a").ready["grpc"]
    async with AsyncPublisher(address) as publisher:
        publisher._relay = AfterCommit(address, interrupt)
        with pytest.raises(asyncio.CancelledError):
            await publisher.publish(W, step=1)
        state = publisher.state_dict()
        assert state["in_doubt"]["step"] == 1
        ticket = await publisher.publish(W, step=1, wait="sealed")
        assert (ticket.version, ticket.step) == (1, 1)
        assert publisher.state_dict()["in_doubt"] is None
    async with AsyncPublisher(address) as resumed:
        resumed.load_state_dict(state)
        assert (await resumed.publish(W, step=1)).version == 1
        assert resumed.state.steps == {1: 1}
        assert (await resumed.publish(W, step=1, wait="sealed")).version == 2, "now it is meant"
    assert await steps(address) == [(1, 1), (2, 1)]


async def test_a_doubt_about_a_version_that_does_not_exist_is_published_again(relays: Relays) -> None:
    address = relays.start("a").ready["grpc"]
    async with AsyncPublisher(address) as publisher:
        unknown = {
            "model": "policy",
            "version": 7,
            "run": "r",
            "step": 1,
            "store_id": "s",
            "revision": 3,
            "warnings": [],
        }
        publisher.load_state_dict({**publisher.state_dict(), "in_doubt": unknown})
        assert (await publisher.publish(W, step=1, wait="sealed")).version == 1
        publisher._relay.doubts.add(Doubt((await publisher.publish(W, step=1)).data))
        assert (await publisher.publish(W, step=3, wait="sealed")).version == 3, "another step is another version"


async def test_a_master_killed_with_the_reply_and_nobody_to_ask_leaves_a_doubt_that_the_next_call_settles(
    relays: Relays, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "MASTER_WAIT_S", 1.0)
    a, b = relays.start("a"), relays.start("b")

    async def shown_at_b() -> bool:
        return "policy version 1 (step 1) available" in b.log()

    async def seal_and_die() -> None:
        await until(shown_at_b, "b holds version 1")
        a.kill()
        os.kill(b.process.pid, signal.SIGSTOP)
        raise Unavailable("the reply was lost")

    async with RelayClient(a.ready["grpc"]) as first, AsyncPublisher(b.ready["grpc"]) as publisher:
        await first.master_of("policy")
        publisher._relay._peers[a.ready["grpc"]] = AfterCommit(a.ready["grpc"], seal_and_die)
        try:
            with pytest.raises(InDoubt, match=r"version 1 of policy was committed is not known .*publish step 1 again"):
                await publisher.publish(W, step=1)
        finally:
            os.kill(b.process.pid, signal.SIGCONT)
        monkeypatch.undo()
        ticket = await publisher.publish(W, step=1, wait="sealed")
        assert (ticket.version, ticket.step) == (1, 1)
    assert await steps(b.ready["grpc"]) == [(1, 1)]


def test_a_step_published_once_is_found_after_a_resume_whatever_its_form(relays: Relays) -> None:
    address = relays.start("a").ready["grpc"]
    with Publisher(address) as publisher:
        state = publisher.state_dict()  # the checkpoint is saved, then the trainer publishes, and dies
        publisher.publish(W, step=5, wait="sealed", once=True)
    taken: list[str] = []

    def items() -> Any:
        for name, tensor in W.items():
            taken.append(name)
            yield name, tensor

    metas = [TensorMeta("w", torch.int64, (8,))]
    with Publisher(address) as resumed:
        resumed.load_state_dict(state)
        assert resumed.publish(W, step=5, once=True).version == 1
        assert resumed.publish_stream(metas, items, step=5, once=True, wait="all").version == 1
        assert taken == []
        assert resumed.publish_stream(metas, items(), step=5, once=True).version == 1
        assert taken == ["w"], "other ranks may wait for this one in an iterator"
        assert resumed.publish(W, step=6, once=True, wait="sealed").version == 2
    with Publisher(address) as other:
        assert other.publish(W, step=5, once=True).version == 3, "another run's steps are its own"
