"""What the parts share: an etcd, relays with warm pools, and a version's worth of random tensors to publish."""

from __future__ import annotations

import contextlib
import getpass
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paramserver.client import RelayClient, TensorSource, Ticket, publish
from paramserver.memory.pool import NUM_BLANKS
from tests.support.etcd import start_etcd
from tests.support.links import Host, Net
from tests.support.processes import Daemon
from tests.support.relays import Relays

MIB = 1 << 20
NUM_TENSORS = 32
HEAD_BYTES = 1 << 20  # room for the safetensors header in each of the pool's files
WAIT_S = 120.0

Array = npt.NDArray[np.uint8]


@dataclass
class Scene:
    """`relays` starts more; `etcd` is the registry they all use."""

    etcd: Daemon
    relays: Relays
    directory: Path

    def relay(self, name: str, version_bytes: int, *flags: str, on: Host | None = None) -> Daemon:
        """A relay whose pool holds four versions, every page touched."""
        return self.relays.start(name, *flags, pool_bytes=str(NUM_BLANKS * (version_bytes + HEAD_BYTES)), on=on)


@contextlib.contextmanager
def scene(net: Net | None = None, pools: Path | None = None) -> Iterator[Scene]:
    """On loopback, or on the hosts of `net`. Every relay and etcd is ended on any way out, its memory given back."""
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as name:
        directory = Path(name)
        etcd = net.start_etcd(directory) if net is not None else start_etcd(directory)
        relays = Relays(etcd.ready["etcd"], directory, flags=())  # what is measured are the defaults
        if pools is not None:
            relays.pools.rmdir()
            relays.pools = pools / "pools"
            relays.pools.mkdir()
        try:
            yield Scene(etcd, relays, directory)
        finally:
            for daemon in relays.daemons:
                if daemon.process.poll() is None:
                    daemon.process.send_signal(18)  # SIGCONT, for those that a fault had stopped
                    daemon.process.terminate()
            for daemon in relays.daemons:
                with contextlib.suppress(AssertionError):
                    daemon.stop()
            shutil.rmtree(relays.pools, ignore_errors=True)
            if etcd.process.poll() is None:
                etcd.kill()


@contextlib.contextmanager
def huge_tmpfs(num_bytes: int) -> Iterator[Path | None]:
    """A tmpfs of one's own with huge pages; None where the host gives none."""
    directory = Path(tempfile.mkdtemp(prefix=f"laminar-bench-huge-{getpass.getuser()}-"))
    options = f"huge=always,size={num_bytes}"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)], capture_output=True, check=False
    )
    try:
        yield directory if done.returncode == 0 else None
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "--lazy", str(directory)], check=True)
        directory.rmdir()


def content(num_bytes: int, seed: int = 0) -> Array:
    """Random bytes."""
    block = np.random.default_rng(seed).integers(0, 256, 16 * MIB, np.uint8)
    found = np.empty(num_bytes, np.uint8)
    for at in range(0, num_bytes, len(block)):
        found[at : at + len(block)] = block[: min(len(block), num_bytes - at)] + np.uint8(at >> 24 & 255)
    return found


def tensors(of: Array) -> list[TensorSource]:
    """The bytes as equal tensors, like a model's layers; read in place."""
    each = len(of) // NUM_TENSORS
    return [_tensor(f"layers.{n}.weight", of[n * each : (n + 1) * each]) for n in range(NUM_TENSORS)]


def _tensor(name: str, part: Array) -> TensorSource:
    return TensorSource(name, "U8", part.shape, lambda: memoryview(part), resident=True)


async def timed_publish(
    relay: RelayClient, model: str, sources: Sequence[TensorSource], step: int, *, run: str = "bench"
) -> tuple[Ticket, float]:
    """The ticket, and the seconds until *copied*."""
    started = time.perf_counter()
    ticket = await publish(relay, model, sources, step=step, run=run)
    return ticket, time.perf_counter() - started
