"""Slurm's `srun` for tests, which have no Slurm: a task for each node of --nodelist, all on this machine.

Each task is in a process group of its own, to which signals are passed on; its output goes to --output, %N being the
node. Only options that it knows are taken: a wrong one would be noticed on a cluster alone. Each call is a JSON line in
$SRUN_CALLS.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag in ("--overlap", "--no-kill"):
        parser.add_argument(flag, action="store_true")
    for option in ("--kill-on-bad-exit", "--wait", "--nodes", "--ntasks", "--ntasks-per-node"):
        parser.add_argument(option, type=int)
    for option in ("--mem", "--job-name", "--nodelist", "--output"):
        parser.add_argument(option)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser.parse_args()


def main() -> int:
    """The highest status of the tasks."""
    asked = parsed()
    with open(os.environ["SRUN_CALLS"], "a") as calls:
        calls.write(json.dumps(vars(asked)) + "\n")
    nodes = asked.nodelist.split(",")
    assert asked.nodes == asked.ntasks == len(nodes), "as many tasks as nodes"
    tasks: list[subprocess.Popen[bytes]] = []
    asked_to_end = False

    def end(task: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(task.pid, signal.SIGTERM)

    def pass_on(*_: object) -> None:
        nonlocal asked_to_end
        asked_to_end = True
        for task in tasks:
            end(task)

    signal.signal(signal.SIGTERM, pass_on)
    for rank, node in enumerate(nodes):
        environment = {**os.environ, "SLURMD_NODENAME": node, "SLURM_PROCID": str(rank)}
        with open(asked.output.replace("%N", node), "ab") as log:
            tasks.append(
                subprocess.Popen(asked.command, env=environment, stdout=log, stderr=log, start_new_session=True)
            )
        if asked_to_end:  # perhaps when the task ran, before it was in the list
            end(tasks[-1])
    statuses = [task.wait() for task in tasks]
    return max(128 - status if status < 0 else status for status in statuses)


if __name__ == "__main__":
    sys.exit(main())
