"""The figures of a soak: its JSON, the line of each minute, and whether it passed."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.setup_env import ROOT
from tests.bench.kinds import processor
from tests.bench.results import machine
from tests.soak import clocks
from tests.soak.faults import Faults
from tests.soak.fleet import Fleet
from tests.soak.growth import largest
from tests.soak.judge import Judge
from tests.soak.watching import Watchers

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bound:
    """Of the growth over the last half: `start` for whatever goes up and down, and `an_hour` on top of it."""

    start: float
    an_hour: float
    why: str

    def allowed(self, hours: float) -> float:
        return self.start + self.an_hour * hours / 2


FIGURES: Mapping[str, str] = {"rss_growth_mb": "rss_mb", "fd_growth": "fds", "shm_growth_mb": "shm_mb"}
"""Names of the JSON's, by which `growth` has them."""
BOUNDS: Mapping[str, Bound] = {
    "rss_mb": Bound(16.0, 8.0, "allocators keep what a burst took; with more a process would not last for weeks"),
    "fds": Bound(12.0, 4.0, "connections come and go with the faults; one lost at each fault is 100 an hour"),
    "shm_mb": Bound(8.0, 2.0, "a pool is allocated at the start, and has a fixed size"),
}
OF_KINDS: Mapping[tuple[str, str], Bound] = {
    ("engine", "rss_mb"): Bound(48.0, 8.0, "torch's allocator fills for ten minutes, as prompts of new lengths come"),
    ("trainer", "fds"): Bound(24.0, 4.0, "a publisher keeps open the 20 files of a pool that it may write again"),
    ("trainer", "shm_mb"): Bound(32.0, 2.0, "and keeps them mapped: 32 MB, of the relay that is master"),
}
"""Instead of `BOUNDS`, by kind of process and figure."""


def commit() -> str:
    """The commit of this checkout, with `+` where files differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench-results")
    return (git("rev-parse", "HEAD") or "unknown") + ("+" if changed else "")


@dataclass
class Report:
    fleet: Fleet
    judge: Judge
    faults: Faults
    watchers: Watchers
    path: Path
    commit: str

    def figures(self, elapsed_s: float, state: str) -> Figures:
        judge, growth = self.judge, self.watchers.growth.figures(elapsed_s)
        counts = dict(judge.counts)
        return {
            "measured": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "commit": self.commit,
            "processor": processor(),
            "cores": len(os.sched_getaffinity(0)),
            "seed": self.fleet.options.seed,
            "state": state,
            "hours": round(elapsed_s / 3600, 4),
            "sessions": counts.pop("sessions", 0),
            "turns": counts.pop("turns", 0),
            "tokens": counts.pop("tokens", 0),
            "versions": counts.pop("versions", 0),
            "kills": sum(process.ends["killed"] for process in self.fleet.processes.values()),
            "turns_lost": judge.failures["turn lost"],
            "turns_duplicated": judge.failures["turn doubled"],
            **{name: largest(growth, figure) for name, figure in FIGURES.items()},
            "failures": dict(judge.failures),
            "outstanding": judge.outstanding,
            "unjudged": self.watchers.unjudged,
            "counts": counts,
            "faults": dict(sorted(self.faults.done.items())),
            "faults_left_out": self.faults.left_out,
            "faults_not_possible_here": self.not_possible,
            "ends": {name: dict(process.ends) for name, process in self.fleet.processes.items() if process.ends},
            "growth": growth,
            "longest_lives": self.watchers.growth.longest_lives(elapsed_s),
            "findings": judge.findings,
        }

    @property
    def not_possible(self) -> list[str]:
        found = [f"clock steps: {reason}"] if (reason := clocks.missing()) else []
        return found if self.fleet.can_mount else [*found, "full disks and full shared memory: nothing can be mounted"]

    def write(self, figures: Figures) -> None:
        """In one step: who reads it while it is written reads the one before."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(".partial")
        scratch.write_text(json.dumps(figures, indent=1) + "\n")
        scratch.replace(self.path)


def line(figures: Figures) -> str:
    """What a person wants to read each minute."""
    failed = ", ".join(f"{count} {kind}" for kind, count in figures["failures"].items()) or "nothing lost or doubled"
    grown = " ".join(f"{name}={figures[name]}" for name in FIGURES)
    return (
        f"{figures['hours'] * 60:6.1f} min  {figures['sessions']} sessions, {figures['turns']} turns, "
        f"{figures['tokens']} tokens, {figures['versions']} versions, {sum(figures['faults'].values())} faults "
        f"({figures['kills']} kills), {figures['outstanding']} under way; {failed}; {grown}"
    )


def reasons(figures: Figures) -> list[str]:
    """Why the run failed; empty when it passed."""
    found = [f"{count} x {kind}" for kind, count in figures["failures"].items() if count]
    for kind, growth in figures["growth"].items():
        for name, usual in BOUNDS.items():
            bound = OF_KINDS.get((kind, name), usual)
            allowed = bound.allowed(figures["hours"])
            if growth[name] is not None and growth[name] > allowed:
                found.append(f"{name} of {kind} grew by {growth[name]}, and {allowed:.1f} is allowed: {bound.why}")
    if not figures["sessions"]:
        found.append("no session was finished")
    return found
