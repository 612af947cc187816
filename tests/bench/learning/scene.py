"""The processes of one run: etcd, two relays in a chain, engines, the gateway, the trainer.

Invariants:
- each is started by the thread that calls `start`, and the kernel kills it when that thread ends, however it ends: an
  interrupted or killed benchmark leaves none behind;
- else they are ended by the stack, consumers first.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from protos.process import TIED
from tests.bench.learning.settings import (
    Settings,
    engine_command,
    gateway_command,
    relay_command,
    trainer_command,
)
from tests.support import processes
from tests.support.processes import Daemon


@dataclass(frozen=True, slots=True)
class Scene:
    """`daemons`: by what they do, without the trainer, which ends by itself. `gateway`: its address."""

    directory: Path
    daemons: dict[str, list[Daemon]]
    gateway: str
    trainer: Daemon

    @classmethod
    def start(cls, settings: Settings, model: Path, directory: Path, stack: ExitStack) -> Self:
        """Each process, once what it needs is ready. Returns when the trainer has published its first version."""

        def begin(name: str, command: list[str], *, wait_ready: bool = True) -> Daemon:
            tied = (sys.executable, "-I", "-S", TIED)
            daemon = processes.start(name, command, directory, wait_ready=wait_ready, prefix=tied)
            stack.callback(daemon.stop)
            return daemon

        pools = Path(tempfile.mkdtemp(prefix="laminar-learning-", dir="/dev/shm"))
        stack.callback(shutil.rmtree, pools)
        etcd = begin("etcd", ["paramserver", "etcd", "--log-level", "warning"])
        first, second = (
            begin(name, relay_command(name, etcd.ready["etcd"], pools / name, publishes=publishes))
            for name, publishes in (("relay-trainer", True), ("relay-engines", False))
        )
        names = [f"e{n}" for n in range(settings.engines)]
        engines = [begin(name, engine_command(settings, model), wait_ready=False) for name in names]
        for engine in engines:
            processes.await_ready(engine, directory)
        urls = {engine.name: str(engine.ready["url"]) for engine in engines}
        gateway = begin("gateway", gateway_command(settings, model, urls, second.ready["grpc"]))
        url = str(gateway.ready["url"])
        trainer = begin("trainer", trainer_command(settings, model, first.ready["grpc"], url, directory))
        daemons = {"engines": engines, "gateway": [gateway], "relays and etcd": [etcd, first, second]}
        return cls(directory, daemons, url, trainer)

    def cpu_s(self) -> dict[str, float]:
        """Processor time so far, children included."""
        return {name: sum(map(_cpu_s, daemons)) for name, daemons in self.daemons.items()}

    def failed(self) -> Daemon | None:
        every = [daemon for daemons in self.daemons.values() for daemon in daemons]
        return next((daemon for daemon in every if daemon.process.poll() is not None), None)


def _cpu_s(daemon: Daemon) -> float:
    process = psutil.Process(daemon.process.pid)
    found = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(times.user + times.system for times in found)
