"""The batch script of `deploy/slurm` without Slurm: a job's steps run on this machine (`tests/support/srun.py`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.setup_env import ROOT

FOLDER = ROOT / "deploy/slurm"
JOB_ID = "7"
STAND_INS = {
    "srun": f'exec {sys.executable} -IS {ROOT}/tests/support/srun.py "$@"',
    "scontrol": 'test "$1 $2" = "show hostnames" && echo "$3" | tr , "\\n"',
}


@dataclass(frozen=True, slots=True)
class Job:
    """A job's directory, with the three files in it."""

    directory: Path
    commands: Path

    @classmethod
    def make(cls, directory: Path, settings: Mapping[str, str], commands: Path) -> Job:
        """`settings` replace those of job.env; `commands`: where `gateway`, `paramserver` and `etcd` are."""
        for name in ("laminar.sbatch", "on-node.sh", "job.env"):
            shutil.copy(FOLDER / name, directory)
        with (directory / "job.env").open("a") as file:
            file.writelines(f"{name}={value}\n" for name, value in settings.items())
        for name, body in STAND_INS.items():
            (directory / name).write_text(f"#!/bin/sh\n{body}\n")
            (directory / name).chmod(0o755)
        return cls(directory, commands)

    def start(self, nodes: Sequence[str], *command: str) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "PATH": f"{self.directory}:{self.commands}:{os.environ['PATH']}",
            "TMPDIR": str(self.directory),
            "SRUN_CALLS": str(self.directory / "calls"),
            "SLURM_SUBMIT_DIR": str(self.directory),
            "SLURM_JOB_ID": JOB_ID,
            "SLURM_JOB_NODELIST": ",".join(nodes),
        }
        with (self.directory / "job.log").open("ab") as log:
            return subprocess.Popen(
                [self.directory / "laminar.sbatch", *command], env=environment, stdout=log, stderr=log
            )

    @property
    def results(self) -> Path:
        return self.directory / f"laminar-{JOB_ID}"

    def calls(self) -> list[dict[str, Any]]:
        """Of `srun`, in their order."""
        return [json.loads(line) for line in (self.directory / "calls").read_text().splitlines()]

    def log(self) -> str:
        return "".join(path.read_text(errors="replace") for path in self.directory.rglob("*.log"))
