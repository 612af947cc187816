"""Real vLLM servers for tests: vLLM's CPU build on the tiny model, our plugin beside it, every process ended again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from deploy.side_envs import VLLM
from tests.support.processes import Daemon
from tests.support.tiny_model import CONTEXT, VLLM_HEAD_DIM, tiny_model

START_TIMEOUT_S = 420.0
"""Alone it takes some 25 s, most of them imports; two at once on two busy cores take minutes."""
KV_BYTES = 64 << 20
MODEL = "policy"


@dataclass
class VllmServer(Daemon):
    """The API server leads a session of its own, with its engine core and one worker for each rank."""

    def kill(self) -> None:
        """kill -9 of all of its processes at once, as when a host dies."""
        self._end_all()
        self.process.wait()

    def stop(self, timeout_s: float = 60.0) -> int:
        try:
            return super().stop(timeout_s)
        finally:
            self._end_all()

    def workers(self) -> list[psutil.Process]:
        """The processes that hold weights."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in family if "Worker" in process.name()]

    def _end_all(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def start(name: str, directory: Path, **options: Any) -> VllmServer:
    """A server of the tiny model with seed 0 (see `launch`), once it answers and has compiled what it needs."""
    return ready(launch(name, directory, **options))


def launch(
    name: str, directory: Path, *, port: int = 0, cores: str = "0", tensor_parallel: int = 1, context: int = CONTEXT
) -> VllmServer:
    """`cores`: one set of cores for each rank, such as "0|1". Returns at once; `ready` waits."""
    port = port or _free_port()
    command = [str(VLLM.python), "-m", "vllm.entrypoints.cli.main", "serve"]  # as `vllm serve`
    command += [str(tiny_model(head_dim=VLLM_HEAD_DIM)), f"--served-model-name={MODEL}", "--dtype=float32"]
    command += [
        "--enforce-eager",
        f"--max-model-len={context}",
        "--max-num-seqs=16",
        f"--kv-cache-memory-bytes={KV_BYTES}",
    ]
    command += [f"--tensor-parallel-size={tensor_parallel}", "--logprobs-mode=processed_logprobs"]
    command += [f'--hf-overrides={{"max_position_embeddings": {context}}}']
    command += ["--host=127.0.0.1", f"--port={port}", '--weight-transfer-config={"backend": "laminar"}']
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_NO_USAGE_STATS": "1"}
    log_path = directory / f"{name}.log"
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **env},
            start_new_session=True,
        )
    return VllmServer(name, process, log_path, {"url": f"http://127.0.0.1:{port}"})


def ready(server: VllmServer) -> VllmServer:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _healthy(server):
        if server.process.poll() is not None or time.monotonic() > deadline:
            server.kill()
            raise AssertionError(f"{server.name} did not start:\n{server.log()[-4000:]}")
        time.sleep(0.2)
    _warm_up(server)
    return server


def _healthy(server: VllmServer) -> bool:
    try:
        return httpx.get(f"{server.ready['url']}/health", timeout=5.0).status_code == 200
    except httpx.TransportError:
        return False


def _warm_up(server: VllmServer) -> None:
    """The first request with logprobs compiles for seconds, longer than a test may take for a stall."""
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4, "logprobs": 2, "ignore_eos": True}
    httpx.post(f"{server.ready['url']}/v1/completions", json=body, timeout=START_TIMEOUT_S).raise_for_status()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
