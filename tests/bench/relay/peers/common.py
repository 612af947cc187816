"""What every contender shares. Standard library only: it runs in the peers' own environment.

A contender is a script that gets `--source` and `--target` (two files of the same size in shared memory, both warm),
sets itself up in two processes, prints `{"ready": true}`, and then moves the source's bytes into the target once for
each line it reads, printing `{"seconds": ...}` each time. It ends when its standard input does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 1 << 20


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--settings", type=json.loads, default={})
    parser.add_argument("--role", default="receiver")
    parser.add_argument("--info", default="")
    return parser.parse_args()


def mapped(path: Path) -> mmap.mmap:
    """The whole file, every page present."""
    with path.open("r+b") as file:
        found = mmap.mmap(file.fileno(), 0)
    found.madvise(getattr(mmap, "MADV_POPULATE_WRITE", 23))
    return found


def say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def rounds(transfer: Callable[[], float | None]) -> None:
    """Serves "go" lines. `transfer` may return its own seconds, when a part of it is not the transfer."""
    say({"ready": True})
    for _ in sys.stdin:
        started = time.perf_counter()
        own = transfer()
        say({"seconds": time.perf_counter() - started if own is None else own})


def ranges(total: int, parts: int) -> list[tuple[int, int]]:
    """`parts` contiguous [start, end) that cover `total`."""
    cuts = [total * n // parts for n in range(parts + 1)]
    return list(itertools.pairwise(cuts))


def _main_module() -> str:
    spec = sys.modules["__main__"].__spec__
    assert spec is not None
    return spec.name


class Other:
    """The other process of a contender: this script again with `--role sender`; it talks in lines."""

    def __init__(self, args: argparse.Namespace, info: str = "") -> None:
        self._process = subprocess.Popen(
            [
                *args.settings.get("sender_prefix", []),  # puts it on another host
                sys.executable,
                *([sys.argv[0]] if __package__ in (None, "") else ["-m", _main_module()]),
                *("--source", str(args.source), "--target", str(args.target)),
                *("--settings", json.dumps(args.settings), "--role", "sender", "--info", info),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.said = self.hear()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"the sender ended with {self._process.wait()}")

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


def end_with_stdin(*, exit_now: bool = True) -> None:
    """For a sender that serves from threads: waits until the receiver ends, and ends this process too."""
    for _ in sys.stdin:
        pass
    if exit_now:
        os._exit(0)
