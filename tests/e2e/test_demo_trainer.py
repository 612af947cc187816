"""The demo's trainer as a process, against a real relay and etcd: versions come out, experience is acknowledged."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paramserver.client import RelayClient
from tests.support.experience_server import ExperienceServer
from tests.support.processes import Daemon, start
from tests.support.tiny_model import VOCAB, tiny_model
from tests.support.trajectories import make_trajectory
from trainer_client import Trajectory

pytestmark = pytest.mark.slow  # each starts a process that imports torch and transformers


@dataclass
class World:
    """One relay, and where the trainer writes."""

    relay: str
    directory: Path

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "events.jsonl").read_text().splitlines()]

    def command(self, gateway: str, *more: str, relay: str | None = None) -> list[str]:
        where = ["--relay", relay or self.relay, "--gateway", gateway, "--out", str(self.directory / "events.jsonl")]
        model = ["--model-dir", str(tiny_model("llama", "bfloat16")), "--groups", "2", "--group-size", "2"]
        return ["deploy.demo.training.trainer", *where, *model, *more]

    async def start(self, gateway: str, *more: str) -> Daemon:
        return await asyncio.to_thread(start, "trainer", self.command(gateway, *more), self.directory)


@pytest.fixture
def world(tmp_path: Path, etcd: str) -> Iterator[World]:
    options = ["--etcd", etcd, "--pool-bytes", "64MiB", "--pool-dir", str(tmp_path / "pool")]
    relay = start("relay", ["paramserver", "serve", "--name", tmp_path.name, *options], tmp_path)
    yield World(relay.ready["grpc"], tmp_path)
    assert relay.stop() == 0


def experience(groups: int, rng: random.Random, *, rewards: tuple[float, float]) -> list[Trajectory]:
    def ids(count: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(count)]

    found = []
    for group in range(groups):
        prompt, name = ids(6), f"g{group}-{rng.random()}"
        for index, reward in enumerate(rewards):
            found.append(
                make_trajectory(name, index, prompt, (ids(3), ids(2)), (ids(4), []), reward=reward, logprob=-6.0)
            )
    return found


async def test_every_step_is_published_and_its_experience_acknowledged(world: World) -> None:
    rng = random.Random(3)
    stock = experience(2, rng, rewards=(0.0, 1.0)) + experience(2, rng, rewards=(0.5, 0.5))
    async with ExperienceServer(stock, groups_max=1).running() as server:
        trainer = await world.start(server.url, "--steps", "2", "--lr", "1e-3")
        assert await asyncio.to_thread(trainer.process.wait, 300) == 0, trainer.log()
    published = {event["version"]: event for event in world.events if event["event"] == "publish"}
    assert {version: event["step"] for version, event in published.items()} == {1: 0, 2: 1, 3: 2}
    for event in published.values():
        assert 0 < event["stall_s"] <= event["sealed_s"] <= event["broadcast_s"]
    first, second = [event for event in world.events if event["event"] == "step"]
    assert (first["step"], first["version"], second["step"], second["version"]) == (1, 2, 2, 3)
    assert first["reward_mean"] == second["reward_mean"] == 0.5
    assert (first["tokens"], first["loss_tokens"], first["live"]) == (4 * 15, 4 * 7, 4)
    assert first["grad_norm"] > 0
    assert (second["loss_tokens"], second["live"], second["loss"]) == (0, 0, 0.0)
    assert (first["staleness_max"], second["staleness_max"]) == (0, 1)
    assert sorted(server.acknowledged) == ["lease-1", "lease-2", "lease-3", "lease-4"]
    assert [(request["trainer_version"], request["groups"]) for request in server.requests] == [
        (1, 2),
        (1, 1),
        (2, 2),
        (2, 1),
    ]

    initial = load_file(tiny_model("llama", "bfloat16") / "model.safetensors")
    async with RelayClient(world.relay) as relay:
        assert [version.version for version in await relay.versions("policy")] == [2, 3]
        for version in (2, 3):
            lease = await relay.acquire("policy", version, holder="test")
            snapshot = load_file(lease.path / "model.safetensors")
            assert snapshot.keys() == initial.keys()
            moved = sum(int((snapshot[name] != initial[name]).sum()) for name in initial)
            assert moved > 100_000, "the step without advantages publishes the weights as they were after the first"
            del snapshot
            await relay.release(lease)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_budget_that_is_over_leaves_one_step_and_it_says_why(world: World, dtype: str) -> None:
    stock = experience(2, random.Random(5), rewards=(0.0, 1.0))
    async with ExperienceServer(stock).running() as server:
        trainer = await world.start(server.url, "--steps", "5", "--budget-s", "0", "--dtype", dtype)
        assert await asyncio.to_thread(trainer.process.wait, 300) == 0, trainer.log()
    kinds = [event["event"] for event in world.events if event["event"] != "publish"]
    assert kinds == ["pace", *["progress"] * (len(kinds) - 3), "step", "pace"]
    shares = [event["share"] for event in world.events if event["event"] == "progress"]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    last = [event for event in world.events if event["event"] == "pace"][-1]
    assert (last["done"], last["groups"], last["steps"]) == (1, 0, 1)
    assert "another step would take" in last["reason"]
    async with RelayClient(world.relay) as relay:
        lease = await relay.acquire("policy", 2, holder="test")
        snapshot = load_file(lease.path / "model.safetensors")
        assert {tensor.dtype for tensor in snapshot.values()} == {torch.bfloat16}, (
            "what travels is as in the checkpoint"
        )
        del snapshot
        await relay.release(lease)


async def test_sigterm_ends_it_cleanly_and_leaves_experience_unacknowledged(world: World) -> None:
    stock = experience(1, random.Random(4), rewards=(0.0, 1.0))
    async with ExperienceServer(stock).running() as server:
        trainer = await world.start(server.url, "--steps", "5")
        assert trainer.ready["version"] == "1"
        async with asyncio.timeout(180):
            await server.asked.acquire()
            await server.asked.acquire()  # it holds one group and waits for the other
        assert await asyncio.to_thread(trainer.stop) == 0
    assert server.acknowledged == []
    assert not [event for event in world.events if event["event"] == "step"]


@pytest.mark.parametrize("away", ["relay", "gateway"])
def test_what_does_not_answer_is_named_and_the_status_is_1(world: World, port: int, away: str) -> None:
    address = f"127.0.0.1:{port}"
    command = world.command(
        f"http://{address}", "--gateway-patience-s", "0", relay=address if away == "relay" else None
    )
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert address in done.stderr
    assert "Traceback" not in done.stderr
