"""The embedded engine as a process that a test can hold in the middle of a turn.

    python -m tests.support.held_engine HOLD_FILE [options of `gateway engine`]

While HOLD_FILE exists the engine computes no more than `TOKENS` further tokens; it goes on to take requests and orders.
Without that, a test that acts in mid-stream would race an engine that is through in a second.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from gateway.cli import cli
from gateway.engines.embedded.batching.sequence import Delta
from gateway.engines.embedded.engine import Engine

TOKENS = 300
LOOK_S = 0.005


def hold(file: Path) -> None:
    """Every engine of this process, from now on."""
    step = Engine.step
    before: int | None = None  # tokens when the file was first seen

    def held(engine: Engine) -> list[Delta]:
        nonlocal before
        generated = engine.statistics().generation_tokens
        if not file.exists():
            before = None
        elif before is None:
            before = generated
        elif generated - before >= TOKENS:
            time.sleep(LOOK_S)
            return []
        return step(engine)

    Engine.step = held  # type: ignore[method-assign]


if __name__ == "__main__":
    hold(Path(sys.argv[1]))
    cli(["engine", *sys.argv[2:]])
