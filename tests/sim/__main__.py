"""`python -m tests.sim`: many seeds on all cores; progress and each failing seed are printed, and those are kept.

With `--result` the outcome goes to bench-results/sim.json, with the day and the machine.

Runs under PYTHONHASHSEED=0, so that a seed tells the same story everywhere.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench import results
from tests.sim import tier

KEPT = Path(__file__).with_name("seeds.txt")
PROGRESS_S = 10.0


@dataclass(frozen=True)
class Story:
    """What came of one seed; `broken` is empty when all held."""

    seed: int
    broken: str
    num_sealed: int = 0
    num_ended: int = 0
    num_faults: int = 0
    num_lives: int = 0
    virtual_s: float = 0.0


def tell(wanted: tuple[int, float], *, until: float) -> Story | None:
    """None where the time is up before it began: one that was broken off would leave its pools in shared memory."""
    if time.monotonic() > until:
        return None
    seed, faults_s = wanted
    try:
        world = tier.live(seed, faults_s)
    except Exception as error:  # noqa: BLE001 - whatever it was, it is the finding
        return Story(seed, f"{type(error).__name__}: {error}"[:500])
    return Story(
        seed, "", len(world.sealed), len(world.ended), world.num_faults, world.num_lives, round(world.clock.now, 3)
    )


def kept() -> list[tuple[int, float]]:
    """(seed, virtual seconds of faults) of the stories that failed once."""
    lines = [line.partition("#")[0].split() for line in KEPT.read_text().splitlines()]
    return [(int(line[0]), float(line[1])) for line in lines if line]


def keep(story: Story, faults_s: float) -> None:
    if (story.seed, faults_s) not in kept():
        with KEPT.open("a") as file:
            file.write(f"{story.seed} {faults_s:g}  # {story.broken.splitlines()[0]}\n")


def run(wanted: Sequence[tuple[int, float]], num_processes: int, budget_s: float) -> list[Story]:
    """The stories begun within `budget_s`, in no order; those that failed are printed as they come."""
    started = told = time.monotonic()
    stories: list[Story] = []
    with multiprocessing.get_context("fork").Pool(num_processes, initializer=_quiet) as pool:
        for story in pool.imap_unordered(functools.partial(tell, until=started + budget_s), wanted, chunksize=1):
            if story is None:
                continue
            stories.append(story)
            if story.broken:
                print(f"seed {story.seed}: {story.broken}", flush=True)
            if time.monotonic() - told > PROGRESS_S:
                told = time.monotonic()
                failed = sum(bool(one.broken) for one in stories)
                print(f"{len(stories)} of {len(wanted)} seeds in {told - started:.0f} s, {failed} failed", flush=True)
    return stories


def _quiet() -> None:
    logging.basicConfig(handlers=[logging.NullHandler()], level=logging.ERROR)


def outcome(stories: Sequence[Story], took_s: float) -> dict[str, float]:
    """Of all stories together; lives are a relay's starts."""
    return {
        "seeds": len(stories),
        "failed": sum(bool(story.broken) for story in stories),
        "versions_sealed": sum(story.num_sealed for story in stories),
        "versions_ended": sum(story.num_ended for story in stories),
        "faults": sum(story.num_faults for story in stories),
        "relay_lives": sum(story.num_lives for story in stories),
        "virtual_hours": round(sum(story.virtual_s for story in stories) / 3600, 1),
        "seconds": round(took_s),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kept", action="store_true", help="those that failed once, too")
    parser.add_argument("--no-keep", action="store_true", help="do not write down what fails")
    parser.add_argument("--faults-s", type=float, default=tier.FAULTS_S, help="virtual seconds of faults")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="begin no more seeds after this")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--result", action="store_true", help="write bench-results/sim.json")
    parser.add_argument("--one", type=int, help="a single seed, with its log")
    options = parser.parse_args()
    if options.one is not None:
        logging.basicConfig(level=logging.DEBUG, format="%(name)s %(message)s")
        tier.live(options.one, options.faults_s)
        return 0
    started = time.monotonic()
    wanted = [(seed, options.faults_s) for seed in range(options.first, options.first + options.seeds)]
    stories = run([*(kept() if options.kept else ()), *wanted], options.processes, options.budget_s)
    failed = [story for story in stories if story.broken]
    for story in failed if not options.no_keep else ():
        keep(story, options.faults_s)
    found = outcome(stories, time.monotonic() - started)
    print(json.dumps(found), flush=True)
    if options.result:
        results.write("sim", found)
    return 1 if failed else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.sim", *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"}
        )
    sys.exit(main())
