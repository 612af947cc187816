"""`make verl`: verl's updates and rollouts on a fleet of this machine, and what they printed."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from deploy.side_envs import VERL
from tests.support.training.scene import TrainingScene


def main() -> None:
    VERL.make()
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="laminar-verl-"))
        for report in TrainingScene(VERL.python, Path(directory), stack).train("tests.verl.program"):
            short = {name: _short(value) for name, value in report.items() if name not in ("replica_calls", "rewards")}
            print(*(f"{name} {value}" for name, value in short.items()), sep=" | ")


def _short(value: object) -> object:
    """Digests by their beginning."""
    if isinstance(value, list):
        return [_short(one) for one in value]
    if isinstance(value, float):
        return f"{value:.2g}"
    return value[:8] if isinstance(value, str) and len(value) == 64 else value


if __name__ == "__main__":
    main()
