"""What a trainer needs, as real processes: etcd, a relay, embedded engines on a tiny random model, the gateway.

The trainer itself is a program of a test folder, and runs in an environment of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from deploy.setup_env import ROOT
from tests.support import processes
from tests.support.etcd import start_etcd
from tests.support.relays import Relays
from tests.support.tiny_model import tiny_model
from trainer_client import Publisher

ENGINES = 2
TRAINING_TIMEOUT_S = 900.0
"""Alone a program takes a minute at most, much of it imports."""


class TrainingScene:
    """`python`: the interpreter of the trainer's environment. Every process has ended when `stack` has."""

    def __init__(self, python: Path, directory: Path, stack: ExitStack) -> None:
        self._python = python
        self.directory = directory
        self.model = tiny_model("qwen2")
        etcd = start_etcd(directory)
        stack.callback(etcd.stop)
        relays = Relays(etcd.ready["etcd"], directory)
        stack.callback(relays.close)
        self.relay = str(relays.start("relay").ready["grpc"])
        command = ["gateway", "serve", "--port=0", "--model=policy", f"--tokenizer={self.model}"]
        for number in range(ENGINES):
            engine = processes.start(f"e{number}", self._engine(), directory)
            stack.callback(engine.stop)
            command.append(f"--engine=e{number}=vllm={engine.ready['url']}")
        flags = [f"--relay={self.relay}", "--poll-interval-s=0.2", "--queue-timeout-s=120"]
        gateway = processes.start("gateway", [*command, *flags], directory)
        stack.callback(gateway.stop)
        self.gateway = str(gateway.ready["url"])

    def _engine(self) -> list[str]:
        flags = ["--port=0", "--dtype=float32", "--served-model-name=policy", "--weight-version=0"]
        return ["gateway", "engine", f"--model={self.model}", *flags]

    def publish_earlier_run(self) -> None:
        """A version from before the trainer: its first one is another number than its first sync."""
        with Publisher(self.relay) as publisher:
            publisher.publish(load_file(self.model / "model.safetensors"), step=7, wait="sealed")

    def train(self, *program: str) -> list[dict[str, Any]]:
        """Runs `python -m PROGRAM` to its end, with the fleet's addresses, and returns the JSON objects it printed."""
        addresses = [f"--relay={self.relay}", f"--gateway={self.gateway}", f"--model={self.model}"]
        lines = self.run(["-m", *program, *addresses, f"--directory={self.directory}"])
        return [json.loads(line) for line in lines if line.startswith('{"')]

    def run(self, command: Sequence[str]) -> list[str]:
        """Runs `python COMMAND` in the trainer's environment to its end, and returns the lines that it printed."""
        offline = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        # Ray starts its workers with a nice value of 15: beside a busy loop they hardly run.
        offline["RAY_worker_niceness"] = "0"
        log_path = self.directory / "trainer.log"
        with log_path.open("wb") as log:
            done = subprocess.run(
                [str(self._python), *command],
                stdout=subprocess.PIPE,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **offline},
                cwd=ROOT,
                timeout=TRAINING_TIMEOUT_S,
                check=False,
            )
        assert done.returncode == 0, f"{command}: {done.returncode}\n{log_path.read_text()[-6000:]}"
        return done.stdout.decode().splitlines()
