"""`make bench-gpu`: a trainer's tensors on a GPU into the relay, and a snapshot from the relay onto a GPU.

Method. One relay on this host, its pool warm; NUM_TENSORS tensors of equal size on the GPU. `gpu_publish_vs_copy` is
the stall of `publish` until *copied*, digests included, over one copy of the same bytes from the GPU into pinned host
memory; `gpu_load_vs_copy` maps the snapshot and copies each tensor onto the GPU, over as much from pinned memory.
Both alternate with the plain copy, after WARM_UP rounds. Without a GPU it says so and ends well.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from paramserver.client import RelayClient
from tests.bench.figures import ROUNDS, Figure, median
from tests.bench.relay.scene import WAIT_S, scene
from tests.bench.results import write
from trainer_client import AsyncPublisher

NUM_TENSORS = 32
WARM_UP = 5  # every file of the pool is written once
NUM_BYTES = 4 << 30


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="make bench-gpu ARGS=...", description=__doc__)
    parser.add_argument("--bytes", type=int, default=NUM_BYTES, help="Size of a version (default: 4 GiB).")
    parser.add_argument("--device", default="cuda", help="cpu only tries the benchmark itself: nothing is kept.")
    chosen = parser.parse_args(arguments)
    if chosen.device != "cpu" and not torch.cuda.is_available():
        print("no CUDA GPU here (torch sees none): nothing measured, earlier figures stay as they are")
        return
    device = torch.device(chosen.device)
    figures = list(run(device, chosen.bytes))
    for figure in figures:
        print(f"{figure.key}: {figure.value:.3f} {figure.unit} ({figure.what})")
    if device.type == "cuda":
        found = {f.key: {"value": round(f.value or 0, 4), "rounds": f.rounds, "what": f.what} for f in figures}
        write("gpu", {"gpu": torch.cuda.get_device_name(device), "bytes": chosen.bytes, "figures": found})


def run(device: torch.device, num_bytes: int) -> Iterator[Figure]:
    with scene() as stage:
        relay = stage.relay("master", num_bytes)
        yield from asyncio.run(_measure(relay.ready["grpc"], Copies(device, num_bytes)))


class Copies:
    """The tensors on the device, and plain copies of as many bytes through pinned memory."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        size = num_bytes // NUM_TENSORS // 2
        make = torch.Generator(device).manual_seed(0)
        self.device, self.num_bytes = device, size * 2 * NUM_TENSORS
        self.tensors = {
            f"layers.{n}.weight": torch.randn(size, generator=make, device=device).to(torch.bfloat16)
            for n in range(NUM_TENSORS)
        }
        self._pinned = [
            torch.empty(size, dtype=torch.bfloat16, pin_memory=device.type == "cuda") for _ in range(NUM_TENSORS)
        ]

    def to_host(self) -> float:
        """Seconds."""
        return self._timed(lambda: self._each(self._pinned, self.tensors.values()))

    def to_device(self) -> float:
        """Seconds."""
        return self._timed(lambda: self._each(self.tensors.values(), self._pinned))

    def load(self, directory: Path) -> float:
        """Seconds until every tensor of the snapshot is on the device; the bytes are compared outside the timing."""
        loaded: dict[str, torch.Tensor] = {}
        took = self._timed(lambda: loaded.update(_loaded(directory, self.device)))
        for name, tensor in self.tensors.items():
            assert torch.equal(loaded[name], tensor), f"{name} differs"
        return took

    def _each(self, targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)

    def _timed(self, work: Callable[[], None]) -> float:
        self._wait()
        started = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _loaded(directory: Path, device: torch.device) -> Mapping[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors.update(load_file(path, device=str(device)))
    return tensors


async def _measure(relay: str, copies: Copies) -> list[Figure]:
    publishes, loads, rates = [], [], []
    async with AsyncPublisher(relay, "policy") as publisher, RelayClient(relay) as reader:
        for step in range(WARM_UP + ROUNDS):
            plain = copies.to_host()
            started = time.perf_counter()
            ticket = await publisher.publish(copies.tensors, step=step)
            stall = time.perf_counter() - started
            await ticket.wait_sealed(WAIT_S)
            lease = await reader.acquire("policy", ticket.version, holder="bench")
            load = copies.load(lease.path)
            await reader.release(lease)
            if step >= WARM_UP:
                publishes.append(stall / plain)
                loads.append(load / copies.to_device())
                rates.append(copies.num_bytes / plain / 1e9)
    return [
        median("gpu_copy_gb_s", "plain copy from the device into pinned memory", rates, better="reported", unit="GB/s"),
        median(
            "gpu_publish_vs_copy", "stall of publish until copied, over the plain copy", publishes, better="reported"
        ),
        median("gpu_load_vs_copy", "snapshot onto the device, over the plain copy", loads, better="reported"),
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
