"""`python -m tests.soak`: runs the whole system for minutes or hours, and breaks it by seed (docs/soak.md)."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from protos.access.credentials import CREDENTIALS_VARIABLE
from tests.bench.results import RESULTS
from tests.soak import chaos, disks
from tests.soak.faults import Faults
from tests.soak.fleet import NUM_GATEWAYS, Fleet, Options
from tests.soak.judge import Judge
from tests.soak.report import Report, commit, line, reasons
from tests.soak.watching import Watchers

REPORT_S = 60.0
SETTLE_S = 240.0
"""For which the healed system may take to finish and use all that was begun: beyond, it is lost."""
SETTLE_POLL_S = 0.5


def say(text: str) -> None:
    print(f"soak: {text}", flush=True)


class Soak:
    """One run. `stop` is set by Ctrl-C, or when its time is over."""

    def __init__(self, fleet: Fleet, duration_s: float, out: Path) -> None:
        self._fleet, self._duration_s = fleet, duration_s
        self.stop = asyncio.Event()
        self.at_once = asyncio.Event()
        self._judge = Judge(NUM_GATEWAYS)
        self._began_s = time.monotonic()
        self._faults = Faults(fleet)
        self._out = out
        self._findings_taken = 0
        self._report: Report

    async def run(self) -> int:
        """The exit status."""
        if not await self._started():
            say("stopped before it had begun")
            return 1
        self._began_s = time.monotonic()
        watchers = Watchers(self._fleet, self._judge, self._began_s)
        self._report = Report(self._fleet, self._judge, self._faults, watchers, self._out, commit())
        for reason in self._report.not_possible:
            say(f"left out: {reason}")
        work: list[Coroutine[Any, Any, None]] = [watchers.follow(), watchers.measure(), self._report_often()]
        tasks = [asyncio.create_task(one) for one in work] + [*watchers.readers(), watchers.strangers()]
        failure: asyncio.Future[Any] = asyncio.gather(*tasks)
        ending = asyncio.create_task(self._live(watchers))
        try:
            waited: set[asyncio.Future[Any]] = {failure, ending}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if failure.done():
                failure.result()
            state = ending.result()
        except BaseException:
            self._write("failed")
            raise
        finally:
            for task in (*tasks, ending):
                task.cancel()
            await asyncio.gather(*tasks, ending, failure, return_exceptions=True)
        if state == "finished":
            watchers.close()
            self._judge.close()
        return self._conclude(state)

    async def _started(self) -> bool:
        """Starts the fleet, unless it is stopped meanwhile."""
        starting, stopping = asyncio.create_task(self._fleet.start()), asyncio.create_task(self.stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if starting.done():
            starting.result()
            return True
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return False

    async def _live(self, watchers: Watchers) -> str:
        """Load under faults; then load without, until everything that was begun is used."""
        await self._break_things()
        say("faults have ended; what was begun is finished and used now (Ctrl-C: without waiting)")
        self._fleet.until.touch()
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline and not self.at_once.is_set():
            if not self._judge.outstanding and not watchers.unjudged and self._runners_ended():
                break
            await asyncio.sleep(SETTLE_POLL_S)
        return "interrupted" if self.at_once.is_set() else "finished"

    def _runners_ended(self) -> bool:
        return all(process.done for process in self._fleet.processes.values() if process.program.ends)

    async def _break_things(self) -> None:
        async with asyncio.TaskGroup() as doing:
            for fault in chaos.faults(self._fleet.parts, self._fleet.options.seed, self._duration_s):
                if await self._wait_until(fault.at_s):
                    break
                print(f"  {fault.at_s:7.1f} s  {fault}", flush=True)
                doing.create_task(self._faults.carry_out(fault))
            else:
                await self._wait_until(self._duration_s)

    async def _wait_until(self, at_s: float) -> bool:
        """Whether the run was stopped before."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stop.wait(), max(0.0, self._began_s + at_s - time.monotonic()))
        return self.stop.is_set()

    async def _report_often(self) -> None:
        """From the start on, so that whatever ends this run leaves its own figures, not those of the one before."""
        while True:
            self._write("running")
            await asyncio.sleep(REPORT_S)

    def _write(self, state: str) -> dict[str, Any]:
        for name, what in self._fleet.findings[self._findings_taken :]:
            self._judge.find("process ended", f"{name} {what}")
        self._findings_taken = len(self._fleet.findings)
        figures = self._report.figures(time.monotonic() - self._began_s, state)
        self._report.write(figures)
        say(line(figures))
        return figures

    def _conclude(self, state: str) -> int:
        figures = self._write(state)
        for finding in self._judge.findings:
            say(finding)
        failed = reasons(figures)
        say(f"FAILED: {'; '.join(failed)}" if failed else f"passed; {self._out}")
        return 1 if failed else 0


async def soak(options: argparse.Namespace, directory: Path, *, can_mount: bool) -> int:
    load = Options(options.seed, options.agents, options.pause_s, options.publish_s)
    fleet = Fleet(directory, load, can_mount)
    run = Soak(fleet, options.minutes * 60.0, options.out)

    def interrupt() -> None:
        (run.at_once if run.stop.is_set() else run.stop).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupt)
    try:
        return await run.run()
    finally:
        await fleet.close()


def parsed() -> argparse.Namespace:
    usual = Options(seed=1)
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Runs the whole system, and breaks it.")
    parser.add_argument("--minutes", type=float, default=20.0, help="how long faults last; default 20")
    parser.add_argument("--hours", type=float, default=0.0, help="instead of --minutes")
    parser.add_argument("--seed", type=int, default=usual.seed, help="of faults and sessions")
    parser.add_argument("--out", type=Path, default=RESULTS / "soak.json", help="the figures, written every minute")
    parser.add_argument("--agents", type=int, default=usual.agents, help="sessions at once of each of two runners")
    parser.add_argument("--pause-s", type=float, default=usual.pause_s, help="of an agent between two sessions")
    parser.add_argument("--publish-s", type=float, default=usual.publish_s, help="from one version to the next")
    parser.add_argument(
        "--keep", type=Path, help="directory for logs and journals; default: kept only of a run that failed"
    )
    options = parser.parse_args()
    if options.hours:
        options.minutes = options.hours * 60
    if options.minutes <= 0 or options.seed < 0 or options.agents < 1:
        parser.error("--minutes and --agents have to be above 0, and --seed at least 0")
    return options


def main() -> int:
    options = parsed()
    cannot_mount = disks.enter_namespace()
    os.environ.pop(CREDENTIALS_VARIABLE, None)  # another fleet's: strangers have none
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        directory = Path(scratch) / "fleet"
        say(f"seed {options.seed}, {options.minutes:g} minutes; logs in {directory}")
        status = asyncio.run(soak(options, directory, can_mount=not cannot_mount))
        if options.keep is not None or status:
            kept = options.keep or Path(tempfile.mkdtemp(prefix="soak-failed-"))
            left_out = shutil.ignore_patterns("disks", "etcd", "credentials*")
            shutil.copytree(directory, kept, dirs_exist_ok=True, ignore=left_out)
            say(f"logs and journals are kept in {kept}")
    return status


if __name__ == "__main__":
    sys.exit(main())
