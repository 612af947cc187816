"""Conventions that all daemons share: log lines, the ready file, and the number of usable cores.

Ready file: JSON written atomically once the process serves, so that a supervisor that passed `--port 0`
learns the addresses without guessing ports or sleeping.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from protos.errors import Conflict, Unavailable
from protos.foreign_text import LINE_CHARS_MAX, OneLine
from protos.telemetry.logs import JsonLines

LOG_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"


TIED = str(Path(__file__).with_name("tied.py"))
"""`[sys.executable, TIED, PROGRAM, ...]` starts a program that the kernel kills when its starter ends."""

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMS = ("text", "json")


REPEATS_AFTER_S = 60.0
"""A library that retries every second logs every second; one line a minute shows it as well."""


class Seldom(logging.Filter):
    """A filter that passes at most one record in `REPEATS_AFTER_S` from each line of code of the `noisy` libraries."""

    def __init__(self, *noisy: str) -> None:
        super().__init__()
        self._noisy = noisy
        self._passed: dict[tuple[str, int], float] = {}  # one entry for each line of code that logs

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.partition(".")[0] not in self._noisy:
            return True
        place = (record.pathname, record.lineno)
        if record.created - self._passed.get(place, -REPEATS_AFTER_S) < REPEATS_AFTER_S:
            return False
        self._passed[place] = record.created
        return True


def setup_logging(level: str = "info", form: str = "text", **names: str) -> None:
    """Sends log lines to stderr in a format that all daemons have: one of `LOG_FORMS`. `names`: by glossary, what the
    process is of; each JSON line has them."""
    logging.basicConfig(stream=sys.stderr, level=level.upper(), force=True)
    formatter: logging.Formatter = OneLine(LOG_FORMAT, datefmt="%Y-%m-%dT%H:%M:%S")
    if form == "json":
        formatter = JsonLines(names, LINE_CHARS_MAX)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(formatter)
        # grpc has a traceback for each malformed message
        handler.addFilter(Seldom("etcd3aio", "grpc", "opentelemetry", "urllib3"))


def write_ready_file(path: Path | None, addresses: Mapping[str, str]) -> None:
    """Writes `{"pid": ..., **addresses}` to `path` (nothing when None); readers never see half a file.

    Raises Unavailable.
    """
    if path is None:
        return
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(json.dumps({"pid": os.getpid(), **addresses}))
        os.replace(scratch, path)
    except OSError as error:
        raise Unavailable(f"cannot write {path}: {error.strerror}", hint="choose another --ready-file") from error


def cannot_listen(host: str, port: int, error: OSError) -> Conflict:
    """The error for an address that a server could not bind."""
    taken = error.errno == errno.EADDRINUSE
    number = error.errno or 0
    why = os.strerror(number) if number in errno.errorcode else error.strerror  # the resolver has numbers of its own
    return Conflict(
        f"cannot listen on {host}:{port}: {why}",
        hint="choose another --port, or 0 for any free one" if taken else "choose another --host or --port",
    )


CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""A container's quota: microseconds of processor time (or "max") for each so many microseconds of wall time."""


def usable_cores(quota: Path = CPU_QUOTA) -> int:
    """The number of cores that this process may use at once: its CPU affinity, bounded by its container's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        share, _, period = quota.read_text().partition(" ")
        return cores if share == "max" else max(1, min(cores, round(int(share) / int(period))))
    except (OSError, ValueError):  # no container, or one with cgroups of version 1
        return cores
