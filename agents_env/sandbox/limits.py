"""The bounds of a run, its result, and the refusal to run without a bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["sandlock", "bubblewrap"]
Ending = Literal["exited", "killed", "timeout"]
Bound = Literal["sandbox", "files", "disk", "processes"]


class SandboxRefused(Exception):
    """A bound cannot be had on this machine, so nothing was run. `bound` names it; "sandbox": there is none at all."""

    def __init__(self, bound: Bound, why: str) -> None:
        super().__init__(f"{bound}: {why}")
        self.bound = bound
        self.why = why


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run may use. Never any of: the network, files other than the interpreter's, signals to others."""

    time_s: float = 5.0
    memory_bytes: int = 256 << 20
    """Of the whole run with sandlock; of each process with bubblewrap, so `processes_max` times that in all."""
    processes_max: int = 8
    disk_bytes: int = 16 << 20
    """The size of the run's own `/tmp`, which is its only writable folder. 0: there is none."""
    output_bytes_max: int = 64 << 10
    """Bytes kept of stdout, and of stderr; what comes after them is read and dropped."""
    open_files_max: int = 64

    @property
    def files_max(self) -> int:
        """Files and folders of `/tmp`: each costs the kernel about a KiB, whatever its size."""
        return max(64, self.disk_bytes >> 12)


@dataclass(frozen=True, slots=True)
class Result:
    """The end of one run. "killed": by a signal, or because it reached the bound of memory; `exit_code` is None.
    `cut`: it wrote more than `output_bytes_max`, and the rest was dropped."""

    ending: Ending
    exit_code: int | None
    stdout: bytes
    stderr: bytes
    seconds: float
    cut: bool
