"""The examples of the trainer's SDK, each as its docstring starts it, against a real relay."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paramserver.client import RelayClient
from tests.support.processes import Daemon
from tests.support.relays import Relays
from tests.support.tiny_model import tiny_model

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "trainer_client" / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(*arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


async def _copied(address: str, version: int, to: Path) -> None:
    async with RelayClient(address) as relay:
        lease = await relay.acquire("policy", version, holder="test")
        shutil.copytree(lease.path, to)
        await relay.release(lease)


def opened(daemon: Daemon, version: int, directory: Path) -> torch.nn.Module:
    """The model as whoever gets the snapshot opens it."""
    asyncio.run(_copied(daemon.ready["grpc"], version, directory))
    AutoTokenizer.from_pretrained(directory)
    return AutoModelForCausalLM.from_pretrained(directory)


@pytest.mark.parametrize(("name", "launch"), [("plain_torch", ("-m",)), ("fsdp2", (*TORCHRUN, "-m"))])
def test_the_example_publishes_what_it_trains(
    relays: Relays, tmp_path: Path, name: str, launch: tuple[str, ...]
) -> None:
    daemon = relays.start("a")
    model = tiny_model()
    shown = run(
        *launch,
        f"trainer_client.examples.{name}",
        *("--relay", daemon.ready["grpc"], "--model", str(model), "--steps", "2"),
    )
    assert [line.split(":")[0] for line in shown if line.startswith("step")] == ["step 1", "step 2"]
    assert shown[-1] == "version 2 is sealed"
    first, second = (opened(daemon, version, tmp_path / f"v{version}") for version in (1, 2))
    start = AutoModelForCausalLM.from_pretrained(model)
    for before, after in ((start, first), (first, second)):
        old, new = before.state_dict(), after.state_dict()
        assert old.keys() == new.keys()
        assert not all(torch.equal(old[key], new[key]) for key in old), "a step changes the weights"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_enough_to_be_read(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 100
