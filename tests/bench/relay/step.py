"""The trainer's next step: how much longer it takes because a version was published just before it.

Method. One relay; a trainer of one thread, so that of two cores one is free. Each round publishes the tensors of a real
model through the SDK, takes a step at once, waits until the version is sealed, and takes the same step again: the
figure is the first over the second. Whatever still runs beside the first step counts with it: the commit, the SDK's
thread, the relay that seals, and what publishing has put out of the processor's caches. A step is products of matrices,
bound by arithmetic, and a pass over all published tensors in place, bound by memory, as an optimizer's is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tests.bench.figures import ROUNDS, Figure, median
from tests.bench.relay.publish import MODEL_BYTES
from tests.bench.relay.scene import WAIT_S, scene
from trainer_client import Publisher

NUM_PAIRS = 5 * ROUNDS  # a bar of 2 % wants more of them than one of 15 %
WARM_UP = 5
WIDTH = 1024
NUM_PRODUCTS = 12


def run() -> Iterator[Figure]:
    num_bytes = sum(MODEL_BYTES.values())
    weights = {name: torch.zeros(size // 4, dtype=torch.float32) for name, size in MODEL_BYTES.items()}
    with _threads(1), scene() as stage, Publisher(stage.relay("master", num_bytes).ready["grpc"]) as publisher:
        beside, alone = [], []
        for step in range(WARM_UP + NUM_PAIRS):
            ticket = publisher.publish(weights, step=step)
            first = _step(weights)
            ticket.wait_sealed(WAIT_S)
            second = _step(weights)
            if step >= WARM_UP:
                beside.append(first)
                alone.append(second)
    yield median(
        "publish_next_step",
        f"a step of one thread right behind a publish, over the same step later, {NUM_PAIRS} pairs",
        [one / other for one, other in zip(beside, alone, strict=True)],
        bar=1.02,
        details={"bytes": num_bytes, "beside_s": _rounded(beside), "alone_s": _rounded(alone)},
    )


def _step(weights: dict[str, torch.Tensor]) -> float:
    """Seconds."""
    started = time.perf_counter()
    activations = torch.full((WIDTH, WIDTH), 1 / WIDTH)
    for _ in range(NUM_PRODUCTS):
        activations = activations @ activations
    for tensor in weights.values():
        tensor.add_(0.5)
    return time.perf_counter() - started


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _rounded(seconds: list[float]) -> list[float]:
    return [round(one, 4) for one in seconds]
