"""`make bench-learning`: reward against time and tokens, in the modes `barrier`, `repack` and `inflight`.

A small model learns to count down (`task`) by GRPO, through real relays, a real gateway, engines and a trainer, each a
process. Each mode has the same task, trainer and seeds; docs/learning-curve.md explains what is compared.

Each run is written when it ends, to bench-results/learning/MODE-SEED.json, and not run again: an interrupted command
goes on where it was, and loses the run that was under way. --again runs what is named once more.

Writes bench-results/learning.json, docs/reference/learning-curve.png and .svg, and the tables of the page beside them.
With --out DIR all of it goes there: for settings of your own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

from deploy.demo.model import cache_dir
from tests.bench import results
from tests.bench.learning import figures, plot
from tests.bench.learning.model import kept_model
from tests.bench.learning.run import run
from tests.bench.learning.settings import MODES, Mode, Settings

PAGE = Path("docs/reference/learning-curve.md")
BEGIN, END = "<!-- measured by make bench-learning: begin -->", "<!-- end -->"
CHANGEABLE = {"steps": int, "step_ms": float, "lr": float, "staleness_max": int, "groups": int, "group_size": int}
CHANGEABLE |= {"engines": int, "slots": int}
MINUTES_A_RUN = 4
"""A guess for the first line; later ones go by the runs that were done."""


def main(arguments: Sequence[str] = ()) -> None:
    given = _parsed(arguments)
    settings = Settings(
        "barrier", **{name: value for name in CHANGEABLE if (value := getattr(given, name)) is not None}
    )
    changed = settings != Settings("barrier")
    if changed and given.out is None:
        sys.exit("make bench-learning: other settings than the page's need --out DIR, which gets their figures")
    kept_in = given.out or results.RESULTS / "learning"
    kept_in.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the processes of the run are ended
    print("model: a small Llama that stumbles as it counts (made once)", flush=True)
    model = kept_model(cache_dir() / "models")
    wanted = [replace(settings, mode=mode, seed=seed) for seed in given.seeds for mode in given.modes]
    missing = [one for one in wanted if given.again or _kept(kept_in, one) is None]
    try:
        for number, one in enumerate(missing):
            _run(one, model, kept_in, f"{number + 1} of {len(missing)}")
    except KeyboardInterrupt:
        sys.exit("make bench-learning: interrupted; the runs that had ended are kept, and the same command goes on")
    _report(kept_in, settings, given.out)


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make bench-learning ARGS=...", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", nargs="+", choices=get_args(Mode), default=list(MODES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--again", action="store_true", help="run what is named once more, though it was run")
    parser.add_argument("--out", type=Path, help="where runs, plot and tables go; default: bench-results/ and docs/")
    defaults = {field.name: field.default for field in fields(Settings)}
    for name, kind in CHANGEABLE.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=f"default: {defaults[name]}")
    return parser.parse_args(arguments)


def _run(settings: Settings, model: Path, kept_in: Path, which: str) -> None:
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{which}] {settings.mode}, seed {settings.seed}, {time.monotonic() - began:4.0f} s: {text}", flush=True)

    say(f"begins; some {MINUTES_A_RUN} minutes on two quiet cores")
    found = asyncio.run(run(settings, model, say))
    scratch = kept_in / f".{settings.name}.json"
    scratch.write_text(json.dumps({"machine": results.machine(), **found}) + "\n")
    scratch.replace(kept_in / f"{settings.name}.json")
    first, last = found["evaluated"][0][1], found["evaluated"][-1][1]
    say(f"{len(found['t'])} steps in {found['wall_s']:.0f} s, expected reward from {first:.3f} to {last:.3f}")


def _kept(kept_in: Path, settings: Settings) -> dict[str, Any] | None:
    """The run as it was written, if it was one of these settings."""
    path = kept_in / f"{settings.name}.json"
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    return found if Settings(**found["settings"]) == settings else None


def _report(kept_in: Path, settings: Settings, out: Path | None) -> None:
    """Of all runs that were kept, also by earlier commands."""
    stems = [path.stem.rpartition("-") for path in sorted(kept_in.glob("*-*.json"))]
    every = [_kept(kept_in, replace(settings, mode=mode, seed=int(seed))) for mode, _, seed in stems if mode in MODES]
    runs = sorted((r for r in every if r is not None), key=lambda r: (MODES.index(r["mode"]), r["seed"]))
    found = figures.summary(runs)
    machines = sorted({str(r["machine"]) for r in runs})
    lines = [*figures.table(found), "", *(f"- {verdict}" for verdict in found["verdicts"])]
    print("\n".join(lines))
    title = f"Counting down: {settings.steps} steps, {settings.engines} engines with steps of {settings.step_ms:g} ms"
    if out is not None:
        (out / "table.md").write_text("\n".join(lines) + "\n")
        files = plot.write(runs, title, out / "learning-curve")
    else:
        results.write("learning", {"machines": machines, "settings": settings.shared, **found})
        files = plot.write(runs, title, PAGE.with_suffix(""))
        shown = (
            f"![Reward against time and tokens, staleness, and where the time went]({PAGE.with_suffix('.png').name})"
        )
        files.append(_fill_in(PAGE, [shown, "", f"Measured on {'; '.join(machines)}.", "", *lines]))
    print(f"written: {', '.join(map(str, files))}")


def _fill_in(page: Path, lines: Sequence[str]) -> Path:
    """Replaces what stands between the page's marks."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}")
    return page


if __name__ == "__main__":
    main(sys.argv[1:])
