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
from paramserver.pull import JOURNAL
from tests.support.relays import Relays
from tests.support.weights import source_of, weights


def pull_command(relay: str, out: Path) -> list[str]:
    return [sys.executable, "-m", "paramserver", "pull", "--relay", relay, "--model", "policy", "--out", str(out)]


def interrupt_in_the_middle(relay: str, out: Path) -> None:
    """Kills a pull once its journal holds a few chunks."""
    process = subprocess.Popen(pull_command(relay, out), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 20.0
    while not (out / JOURNAL).exists() or (out / JOURNAL).stat().st_size < 33 + 3 * 20:
        assert process.poll() is None, "it was faster than the rate allows"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.slow
async def test_an_interrupted_pull_resumes_and_rejects_what_was_damaged(relays: Relays, tmp_path: Path) -> None:
    daemon = relays.start("a", "--max-rate", "6MiB", "--chunk-bytes", "1MiB")
    tensors, out = weights(0, scale=2), tmp_path / "out"
    async with RelayClient(daemon.ready["grpc"]) as relay:
        await (await publish(relay, "policy", source_of(tensors), step=1, run="r")).wait_sealed(10.0)
    await asyncio.to_thread(interrupt_in_the_middle, daemon.ready["grpc"], out)
    partial = out / "model.safetensors.partial"
    with partial.open("r+b") as file:  # a torn write of a chunk that the journal calls verified
        file.seek(5)
        file.write(b"\xff\xff")
    done = await asyncio.to_thread(
        subprocess.run, pull_command(daemon.ready["grpc"], out), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "resuming: 2" in done.stderr or "resuming: 3" in done.stderr or "resuming: 4" in done.stderr
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    assert (out / "model.safetensors").read_bytes() == save(tensors)
