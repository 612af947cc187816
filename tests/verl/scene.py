"""What a verl trainer needs, as real processes: etcd, a relay, embedded engines on a tiny random model, the gateway.

The trainer itself is a program of this folder, and runs in verl's environment, with a Ray of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from deploy.setup_env import ROOT
from deploy.verl_env import PYTHON
from tests.support import processes
from tests.support.etcd import start_etcd
from tests.support.relays import Relays
from tests.support.tiny_model import tiny_model

ENGINES = 2
PROGRAM_TIMEOUT_S = 600.0
"""Alone a program takes a minute: Ray, and imports of verl in each of its processes."""


class Scene:
    """Every process has ended when `stack` has."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
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

    def run(self) -> list[dict[str, Any]]:
        """Runs `tests.verl.program` to its end and returns the JSON objects that it printed."""
        log_path = self.directory / "program.log"
        # Ray's sockets lie below its folder, and their paths are limited to 107 bytes.
        with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as ray_dir, log_path.open("wb") as log:
            addresses = [f"--relay={self.relay}", f"--gateway={self.gateway}", f"--model={self.model}"]
            addresses.append(f"--directory={self.directory}")
            env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_TMPDIR": ray_dir}
            done = subprocess.run(
                [str(PYTHON), "-m", "tests.verl.program", *addresses],
                stdout=subprocess.PIPE,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=env,
                cwd=ROOT,
                timeout=PROGRAM_TIMEOUT_S,
                check=False,
            )
        lines = done.stdout.decode().splitlines()
        assert done.returncode == 0, f"{done.returncode}\n{log_path.read_text()[-6000:]}"
        return [json.loads(line) for line in lines if line.startswith('{"')]
