"""Processes on the hosts of a net that do a round for each line they read, all at once."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.bench.relay.contenders import ROOT, same_sockets


class Station:
    """One process; it says `{"ready": true}` and then a JSON line for each line it is told."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        with log.open("ab") as to:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=to,
                text=True,
                cwd=ROOT,
                env={**os.environ, **same_sockets()},
            )
        self._log = log

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise AssertionError(f"a station ended: {self._log.read_text()[-1000:]}")

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


@contextlib.contextmanager
def stations(commands: Sequence[Sequence[str]], directory: Path) -> Iterator[list[Station]]:
    made: list[Station] = []
    try:
        for n, command in enumerate(commands):
            made.append(Station(command, directory / f"station-{n}.log"))
        for station in made:
            station.hear()
        yield made
    finally:
        for station in made:
            station.close()


def together(of: Sequence[Station], line: str = "go") -> float:
    """Seconds until the last of them is done."""
    started = time.perf_counter()
    for station in of:
        station.tell(line)
    for station in of:
        station.hear()
    return time.perf_counter() - started
