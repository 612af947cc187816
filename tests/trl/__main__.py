"""`make trl ARGS=grpo`: a TRL trainer on a fleet of this machine, with a tiny random model, and what it printed."""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path

from deploy.side_envs import TRL
from tests.support.training.scene import TrainingScene


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.trl", description=__doc__)
    parser.add_argument("program", choices=("grpo", "async_grpo"), help="which of TRL's trainers")
    parser.add_argument("--steps", type=int, default=None, help="optimiser steps; each publishes a version")
    flags = parser.parse_args()
    TRL.make()
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="laminar-trl-"))
        steps = [] if flags.steps is None else [f"--steps={flags.steps}"]
        scene = TrainingScene(TRL.python, Path(directory), stack)
        for report in scene.train(f"tests.trl.{flags.program}", *steps):
            print(*(f"{name} {value}" for name, value in report.items()), sep=" | ")


if __name__ == "__main__":
    main()
