"""Runs contenders (see `peers/common.py`) and interleaves their rounds."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np

from paramserver.data.frames import CONGESTION_CONTROL

ROOT = Path(__file__).resolve().parents[3]
PEERS = Path(__file__).parent / "peers"
SETTLE_S = 0.2


class ContenderFailed(Exception):
    """It ended, or gave bytes other than the source's; the message says which."""


@dataclass(frozen=True, slots=True)
class Files:
    """Source and target in shared memory, the same size, all pages present."""

    source: Path
    target: Path

    def compare(self) -> bool:
        source, target = np.memmap(self.source, np.uint8, "r"), np.memmap(self.target, np.uint8, "r")
        return bool(np.array_equal(source, target))


@contextlib.contextmanager
def files(num_bytes: int) -> Iterator[Files]:
    """A source of random bytes, and a target of zeros that is written once, so that it is warm."""
    directory = Path(tempfile.mkdtemp(prefix="laminar-bench-", dir="/dev/shm"))
    try:
        found = Files(directory / "source", directory / "target")
        block = np.random.default_rng(0).integers(0, 256, 1 << 24, np.uint8)
        with found.source.open("wb") as source, found.target.open("wb") as target:
            for at in range(0, num_bytes, len(block)):
                part = block[: min(len(block), num_bytes - at)] + np.uint8(at >> 24 & 255)
                source.write(part.tobytes())
                target.write(bytes(len(part)))
        yield found
    finally:
        shutil.rmtree(directory)


class Contender:
    """One contender with its settings, running. `round()` gives the seconds of one transfer.

    Between its rounds it is stopped: some spin while they have nothing to do, and would take a core from the other.
    """

    def __init__(self, command: Sequence[str], settings: Mapping[str, Any], where: Files) -> None:
        self.command, self.settings = list(command), dict(settings)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with the process)
        paths = ["--source", str(where.source), "--target", str(where.target)]
        self._process = subprocess.Popen(
            [*self.command, *paths, "--settings", json.dumps(self.settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **same_sockets()},
            start_new_session=True,
        )
        try:
            self._hear()
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def round(self) -> float:
        self._signal(signal.SIGCONT)
        time.sleep(SETTLE_S)  # heartbeats and threads catch up outside the timing
        stdin = _pipe(self._process.stdin)
        stdin.write("go\n")
        stdin.flush()
        took = float(self._hear()["seconds"])
        self._signal(signal.SIGSTOP)
        return took

    def _signal(self, number: signal.Signals) -> None:
        """To all of its processes: its session holds nobody else."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            _pipe(self._process.stdin).close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        _pipe(self._process.stdout).close()
        self._log.close()

    def _hear(self) -> dict[str, Any]:
        for line in _pipe(self._process.stdout):
            if line.startswith("{"):
                return dict(json.loads(line))
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        raise ContenderFailed(f"{self.command[-1]} ended: {lines[-1] if lines else 'without a word'}")


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


@functools.cache
def same_sockets() -> dict[str, str]:
    """The environment in which a process's TCP sockets begin as this project's do: see `peers/congestion.c`."""
    directory = Path(tempfile.mkdtemp(prefix="laminar-bench-"))
    atexit.register(shutil.rmtree, directory)
    library = directory / "congestion.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(PEERS / "congestion.c"), "-ldl"], check=True
    )
    return {"LD_PRELOAD": str(library), "BENCH_CONGESTION": CONGESTION_CONTROL}


def project(name: str) -> list[str]:
    """A contender that runs in this project's environment."""
    return [sys.executable, "-m", f"tests.bench.relay.peers.{name}"]


def best_settings(
    command: Sequence[str], candidates: Sequence[Mapping[str, Any]], where: Files, rounds: int = 3
) -> tuple[Mapping[str, Any], dict[str, float]]:
    """The settings with the least best time, and every candidate's best time. One warm-up round each."""
    tried: dict[str, float] = {}
    for settings in candidates:
        with Contender(command, settings, where) as contender:
            contender.round()
            tried[json.dumps(settings)] = min(contender.round() for _ in range(rounds))
    return json.loads(min(tried, key=tried.__getitem__)), tried


def interleave(ours: Contender, theirs: Contender, rounds: int) -> list[tuple[float, float]]:
    """(our seconds, their seconds) of each round, after a warm-up of both."""
    ours.round(), theirs.round()
    return [(ours.round(), theirs.round()) for _ in range(rounds)]
