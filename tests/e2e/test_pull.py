"""`paramserver pull` that is interrupted, and what it leaves: the next one continues, and trusts nothing unverified."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import save

from paramserver.client import RelayClient, publish
from paramserver.client.pull import JOURNAL
from tests.support.relays import Relays
from tests.support.survivors import SLOW
from tests.support.weights import source_of, weights

pytestmark = pytest.mark.slow


def pull_command(relay: str, out: Path) -> list[str]:
    return [sys.executable, "-m", "paramserver", "pull", "--relay", relay, "--model", "policy", "--out", str(out)]


def interrupt_in_the_middle(relay: str, out: Path) -> int:
    """Kills a pull once its journal holds a few chunks; how many it is in the end."""
    process = subprocess.Popen(pull_command(relay, out), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60.0
    while num_journaled(out) < 3:
        assert process.poll() is None, "it was faster than the rate allows"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return num_journaled(out)


def num_journaled(out: Path) -> int:
    """A head of 33 bytes, then 20 for each chunk."""
    journal = out / JOURNAL
    return (journal.stat().st_size - 33) // 20 if journal.exists() else 0


async def test_an_interrupted_pull_resumes_and_rejects_what_was_damaged(relays: Relays, tmp_path: Path) -> None:
    daemon = relays.start("a", "--max-rate", SLOW, "--chunk-bytes", "1MiB")
    tensors, out = weights(0, scale=2), tmp_path / "out"
    async with RelayClient(daemon.ready["grpc"]) as relay:
        await (await publish(relay, "policy", source_of(tensors), step=1, run="r")).wait_sealed(60.0)
    num_verified = await asyncio.to_thread(interrupt_in_the_middle, daemon.ready["grpc"], out)
    partial = out / "model.safetensors.partial"
    with partial.open("r+b") as file:  # a torn write of a chunk that the journal calls verified
        file.seek(5)
        file.write(b"\xff\xff")
    done = await asyncio.to_thread(
        subprocess.run,
        pull_command(daemon.ready["grpc"], out),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"resuming: {num_verified - 1} MiB are here" in done.stderr, done.stderr
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    assert (out / "model.safetensors").read_bytes() == save(tensors)


async def test_what_a_pull_says_into_a_pipe_is_one_line_to_copy_from(relays: Relays, tmp_path: Path) -> None:
    """From a relay that listens on every address and tells others one."""
    daemon = relays.start("a", "--host", "0.0.0.0", "--advertise", "127.0.0.1", "--insecure")
    out = tmp_path / ("long" * 30)
    async with RelayClient(daemon.ready["grpc"]) as relay:
        await (await publish(relay, "policy", source_of(weights(0)), step=1, run="r")).wait_sealed(60.0)
        root = (await relay.versions("policy"))[0].root_digest
        assert (await relay.status()).data_address.startswith("127.0.0.1:")
    done = await asyncio.to_thread(
        subprocess.run,
        pull_command(daemon.ready["grpc"], out),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"policy version 1 (step 1) is in {out}, root {root}" in done.stderr.splitlines()
