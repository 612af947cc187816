"""A program: the rollout worker without a trainer, where agents fail and where TRL takes only some rows."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import httpx

from protos.errors import LaminarError
from tests.trl.task import ROWS, two_turns
from trainer_client.integrations.trl import LaminarRolloutWorker, LaminarWeightTransfer, Session

GROUP_SIZE = 4
PATIENCE_S = 300.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def error_of(worker: LaminarRolloutWorker) -> str:
    """The error that `check_health` raises, once it does."""
    found: list[str] = []

    def raises() -> bool:
        try:
            worker.check_health(PATIENCE_S)
        except LaminarError as error:
            found.append(f"{type(error).__name__}: {error}")
        return bool(found)

    worker.start()
    until(raises)
    worker.stop()
    return found[0]


def fails(session: Session, task: Mapping[str, Any]) -> float:
    raise ValueError("the tool is away")


def half_fail(session: Session, task: Mapping[str, Any]) -> float:
    """Half of the sessions, whatever is tried."""
    index = int(session.session_id[-1], 16)
    if index % 2:
        raise ValueError("the tool is away")
    return two_turns(session, task)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("relay", "gateway", "model", "directory"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--ends-by", type=int)
    flags = parser.parse_args()
    transfer = LaminarWeightTransfer(flags.relay)

    def worker(agent: Any, tasks: Iterable[Any] = ROWS, **options: Any) -> LaminarRolloutWorker:
        return LaminarRolloutWorker(
            flags.gateway,
            transfer,
            tasks,
            agent,
            group_size=GROUP_SIZE,
            groups_ahead=2,
            sampling={"max_tokens": 8},
            **options,
        )

    if flags.ends_by:
        full = worker(two_turns)
        full.start()
        until(lambda: full.rollout_buffer.qsize() == 2 * GROUP_SIZE)
        os.kill(os.getpid(), flags.ends_by)
        threading.Event().wait(PATIENCE_S)

    report: dict[str, Any] = {"agents_fail": error_of(worker(fails, attempts=1))}
    report["no_tasks"] = error_of(worker(two_turns, []))

    ahead = worker(two_turns)
    ahead.start()
    until(lambda: ahead.rollout_buffer.qsize() == 2 * GROUP_SIZE)
    taken = [ahead.rollout_buffer.get(timeout=PATIENCE_S) for _ in range(GROUP_SIZE)]
    until(lambda: ahead.rollout_buffer.qsize() == 2 * GROUP_SIZE)
    report["taken_groups"] = len({row.group_id for row in taken})
    report["advantages_sum"] = abs(sum(row.advantage for row in taken))
    report["before_first_sync"] = sorted({row.model_version for row in taken})
    ahead.stop()

    short = worker(half_fail, attempts=1, group_min=1)
    short.start()
    row = short.rollout_buffer.get(timeout=PATIENCE_S)
    report["short_group_rows"] = 1 + sum(row.group_id == other.group_id for other in list(short.rollout_buffer.queue))
    short.stop()

    report["terminated"] = ends_by(signal.SIGTERM)
    report["leased_after_sigterm"] = leased(flags.gateway)
    report["killed"] = ends_by(signal.SIGKILL)
    report["leased_after_sigkill"] = leased(flags.gateway)
    following = worker(fails, attempts=1)
    following.start()
    until(lambda: leased(flags.gateway) == 0)
    following.stop()
    print(json.dumps(report))


def ends_by(number: signal.Signals) -> int:
    """The status of another process of this program, which ends itself while rows wait in its queue."""
    program = [sys.executable, "-m", "tests.trl.worker_alone", *sys.argv[1:], f"--ends-by={int(number)}"]
    return subprocess.run(program, check=False, timeout=2 * PATIENCE_S).returncode  # it imports TRL, too


def leased(gateway: str) -> int:
    found: int = httpx.get(f"{gateway}/status").raise_for_status().json()["buffer"]["leased"]
    return found


if __name__ == "__main__":
    main()
