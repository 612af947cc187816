"""A daemon under a fuzzer: what it must not do, whatever it is sent."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator

import psutil

from tests.support.processes import Daemon

GROWTH_BYTES_MAX = 48 << 20
"""Of resident memory: allocators keep some of what a request took, and no more than that."""
LEFT_MAX = 3
"""Threads and descriptors more than before, once all clients are gone."""
SETTLE_S = 60.0


_OF_GRPC = re.compile(r"^\d\S+ ERROR   grpc\..*\n(?:  .*\n)*", re.MULTILINE)
"""What the library logs of a message that does not parse: one traceback a minute (`protos.process.Seldom`)."""


@contextlib.contextmanager
def unharmed(daemon: Daemon, *, growth_bytes_max: int = GROWTH_BYTES_MAX, left_max: int = LEFT_MAX) -> Iterator[None]:
    """Fails where the daemon ended, logged an error or a traceback, or keeps memory, threads or descriptors."""
    process = psutil.Process(daemon.process.pid)
    logged = len(daemon.log())
    memory, threads, files = process.memory_info().rss, process.num_threads(), process.num_fds()
    yield
    assert daemon.process.poll() is None, f"{daemon.name} ended: {daemon.log()[-3000:]}"
    more = _OF_GRPC.sub("", daemon.log()[logged:])
    assert "Traceback" not in more, _around(more, "Traceback")
    assert " ERROR " not in more, _around(more, " ERROR ")
    deadline = time.monotonic() + SETTLE_S
    while max(left := (process.num_threads() - threads, process.num_fds() - files)) > left_max:
        assert time.monotonic() < deadline, f"{daemon.name} keeps {left[0]} threads and {left[1]} descriptors"
        time.sleep(0.05)
    grown = process.memory_info().rss - memory
    print(f"{daemon.name}: {grown >> 10} KiB more memory, {left[0]} threads, {left[1]} descriptors")
    assert grown < growth_bytes_max, f"{daemon.name} has grown by {grown >> 20} MiB"
    assert len(more) < 1_000_000, "the log is bounded"


def _around(log: str, word: str) -> str:
    at = log.index(word)
    return log[max(0, at - 500) : at + 3000]
