"""The embedded engine with decode steps as long as an accelerator's.

    python -m tests.bench.learning.engine STEP_MS [options of `gateway engine`]

A step of a large model lasts as long as reading its weights takes, nearly the same for 1 sequence as for 16 (arXiv
2510.12633, figure 4), and takes no processor time of the host. The small model's step takes some 2 ms of it. So that
engines do not compete with each other and with the trainer for two cores, each step is filled up to STEP_MS by
sleeping. All else is real: weights, tokens, logprobs, loads, HTTP. With STEP_MS 0 it is `gateway engine` as it ships.
"""

from __future__ import annotations

import sys
import time

from gateway.cli import cli
from gateway.engines.embedded.batching.sequence import Delta
from gateway.engines.embedded.engine import Engine


def fill_up(step_s: float) -> None:
    """Every engine of this process, from now on. A late step delays the next one no further."""
    step = Engine.step

    def filled(engine: Engine) -> list[Delta]:
        began = time.monotonic()
        deltas = step(engine)
        time.sleep(max(0.0, began + step_s - time.monotonic()))
        return deltas

    if step_s > 0:
        Engine.step = filled  # type: ignore[method-assign]


if __name__ == "__main__":
    fill_up(float(sys.argv[1]) / 1000)
    cli(["engine", *sys.argv[2:]])
