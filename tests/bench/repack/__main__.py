"""`make bench-repack`: what packing the long tail is worth, through the real gateway over HTTP.

Parts, of which `ARGS="shipped sweep"` runs some:

- `paper`: the committed point, where engines wait for their last trajectory, as in the paper;
- `shipped`: `drain` and `repack` there, with the gateway's own relief from stragglers;
- `barrier`: the synchronous mode there, for the table;
- `sweep`: batch and publish period, for `drain` and `repack`.

Over HTTP the last two run only when they are named: 8 and 49 minutes.

Each mode has one life of fleet and gateway, warmed up once and then measured in `--stretches` stretches of
`--stretch-s` (in the sweep over HTTP one, of two publish periods). A figure is the ratio between two modes over all
that was measured; its spread, the ratios between their stretches: stretch n begins at the same time and sees the same
publishes in every mode. Not the median of stretches: engines that began together drain together, so that drain swings
from one stretch to the next.
With `--apart` each stretch has a life of its own, over its own part of the trace; then figures are medians of lives.

Writes bench-results/repack.json; a part is added to what is there if that was measured at the same committed point,
scale and stretches. `--sim` runs the same in virtual time instead, through `gateway.sim`: repack-sim.json.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import gc
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench import results
from tests.bench.repack.run import REPEATS_MAX, Life, Point, run
from tests.bench.repack.simulated import simulate
from tests.bench.repack.trace import COMMITTED

Run = Mapping[str, Any]
"""Figures of one stretch, or of all of a life."""
Runs = Mapping[str, Sequence[Run]]
"""By mode, with `_shipped` behind it where the gateway has its relief from stragglers."""

PARTS: Mapping[str, Sequence[str]] = {
    "paper": ("drain", "repack", "inflight"),
    "shipped": ("drain_shipped", "repack_shipped"),
    "barrier": ("barrier",),
    "sweep": (),
}
DEFAULT = ("paper", "shipped")
"""Over HTTP."""
SIMULATED_AS_FAST = 100.0
"""Seconds that a simulation passes in one of ours, about."""
BARS: Mapping[str, tuple[str, float]] = {
    "repack_gain": ("at least", 1.26),
    "kv_util_gain": ("at least", 1.14),
    "tail_latency_ratio": ("at most", 1.03),
    "repack_gain_shipped": ("at least", 1.26),
    "kv_util_gain_shipped": ("at least", 1.14),
    "tail_latency_ratio_shipped": ("at most", 1.03),
    "repack_overhead_s": ("at most", 0.69),
    "wrong_answers": ("at most", 0),
    "repack_over_inflight": ("at least", 0.95),
}
RATIOS: Mapping[str, tuple[str, str, str]] = {
    "repack_gain": ("repack", "drain", "tokens_per_s"),
    "kv_util_gain": ("repack", "drain", "kv_util"),
    "tail_latency_ratio": ("repack", "drain", "answer_p99_s"),
    "tail_decode_ratio": ("repack", "drain", "latency_p99_s"),
    "repack_gain_shipped": ("repack_shipped", "drain_shipped", "tokens_per_s"),
    "kv_util_gain_shipped": ("repack_shipped", "drain_shipped", "kv_util"),
    "tail_latency_ratio_shipped": ("repack_shipped", "drain_shipped", "answer_p99_s"),
    "tail_decode_ratio_shipped": ("repack_shipped", "drain_shipped", "latency_p99_s"),
    "repack_over_inflight": ("repack", "inflight", "tokens_per_s"),
}
"""Figure: of which mode, over which, what.

A trajectory's p99 is told twice. `tail_latency_ratio` counts as the client does, from its request to its answer:
waiting for an engine is part of it, as it is in the paper, whose replicas get whole batches at once.
`tail_decode_ratio` counts from the first place on an engine, and has no bar: full engines take longer for a step than
those that drain, by the very curve.
"""
CORES_MAX = 0.7
"""Of one process: above it the machine, not the script, would set the pace."""
SHOWN = (
    "tokens_per_s",
    "kv_util",
    "running_mean",
    "latency_mean_s",
    "latency_p99_s",
    "latency_max_s",
    "answer_mean_s",
    "answer_p99_s",
    "staleness_mean",
    "versions_mixed",
    "mixed",
    "refreshes",
    "moves",
    "prefilled_again_share",
    "pause_mean_s",
    "pause_p99_s",
    "cores_gateway",
    "engines_late_share",
)


def headline(runs: Runs) -> dict[str, list[float]]:
    """Each figure's value in every stretch, or life; left out are those of modes that were not run, or stood still."""
    found: dict[str, list[float]] = {
        name: [round(ours[what] / theirs[what], 3) for ours, theirs in pairs(runs, of, over) if theirs[what]]
        for name, (of, over, what) in RATIOS.items()
    }
    found["repack_overhead_s"] = [f["pause_mean_s"] for f in runs.get("repack", ()) if f["pause_mean_s"] is not None]
    found["wrong_answers"] = [sum(f["wrong_answers"] for of_mode in runs.values() for f in of_mode)]
    return {name: values for name, values in found.items() if values}


def pairs(runs: Runs, of: str, over: str) -> list[tuple[Run, Run]]:
    """The same stretch of two modes."""
    others = {f["stretch"]: f for f in runs.get(over, ())}
    return [(f, others[f["stretch"]]) for f in runs.get(of, ()) if f["stretch"] in others]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Between which values the stretches of a figure lie."""
    return {"min": min(values), "max": max(values), "stretches": list(values)}


def medians(runs: Sequence[Run]) -> dict[str, Any]:
    """Each figure of a mode by itself; what is no number is left to the runs."""
    found: dict[str, Any] = {}
    for name in runs[0]:
        values = [f[name] for f in runs if f[name] is not None]
        if name != "stretch" and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values):
            found[name] = round(statistics.median(values), 4) if values else None
    return found


def missed(found: Mapping[str, float]) -> list[str]:
    """The bars that were missed, in words."""
    words = []
    for name, (how, bar) in BARS.items():
        value = found.get(name)
        if value is not None and not (value >= bar if how == "at least" else value <= bar):
            words.append(f"{name} is {value:g}, {how} {bar:g} was wanted")
    return words


def purity(by_mode: Mapping[str, Run]) -> list[str]:
    """What keeping every trajectory on one version costs against `inflight`, and what it buys."""
    if not {"repack", "inflight"} <= by_mode.keys():
        return []
    repack, inflight = by_mode["repack"], by_mode["inflight"]
    cost = 1 - repack["tokens_per_s"] / inflight["tokens_per_s"]
    crossed = _crossings(inflight) / inflight["trajectories"]
    tail = repack["latency_p99_s"] / inflight["latency_p99_s"]
    return [
        f"one version for every trajectory costs {cost:.1%} of inflight's throughput; there trajectories went on under "
        f"another version {crossed:.2f} times each on average, here {_crossings(repack) / repack['trajectories']:.2f}; "
        f"the p99 from the first place to the end is {tail:.2f} of inflight's"
    ]


def _crossings(figures: Run) -> int:
    return int(figures["mixed"] if "mixed" in figures else figures["versions_mixed"])


def too_slow(runs: Sequence[Run]) -> list[str]:
    """Stretches in which the machine was the bottleneck, so that their figures say little."""
    return [
        f"{f['mode']} (batch {f['batch']}, period {f['publish_period_s']:g} s, stretch {f['stretch'] + 1}): "
        f"gateway {f['cores_gateway']:.2f} cores, engines {f['engines_late_share']:.1%} of the time late"
        for f in runs
        if max(f["cores_gateway"], f["cores_engines"], f["cores_clients"]) > CORES_MAX or f["engines_late_share"] > 0.03
    ]


def point_of(base: Point, name: str, **changes: Any) -> Point:
    """`name`: a mode, with `_shipped` behind it where the gateway has its relief from stragglers."""
    mode = name.removesuffix("_shipped")
    return dataclasses.replace(base, mode=mode, shipped=mode != name, **changes)


def mode_points(base: Point, names: Sequence[str], apart: bool) -> list[tuple[str, Point]]:
    """A life of each mode; `apart`, one of each for every stretch, so that what changes with time touches all modes."""
    if not apart:
        return [(name, point_of(base, name)) for name in names]
    return [
        (name, point_of(base, name, stretches=1, repeat=repeat)) for repeat in range(base.stretches) for name in names
    ]


def sweep_points(base: Point, simulated: bool) -> list[tuple[str, Point]]:
    """Over HTTP one stretch each, of two publish periods at least: its time is dear."""
    return [
        (mode, dataclasses.replace(base, mode=mode, batch=batch, publish_period_s=period, **shape))
        for batch in COMMITTED["sweep_batch"]
        for period in COMMITTED["sweep_publish_period_s"]
        for mode in ("drain", "repack")
        for shape in [{} if simulated else {"stretches": 1, "stretch_s": max(base.stretch_s, 2 * period)}]
    ]


def wall_s(point: Point, simulated: bool) -> float:
    """What a life takes, about."""
    return point.wall_s * point.scale / SIMULATED_AS_FAST if simulated else point.wall_s


def measure(point: Point, simulated: bool) -> Life:
    if simulated:
        found = simulate(point)
        for of_stretch in found.stretches:
            told(of_stretch)
    else:
        found = asyncio.run(run(point, told))
    gc.collect()
    return found


def told(found: Run) -> None:
    """A line for each stretch, as it ends."""
    print(f"   stretch {found['stretch'] + 1}: {found['tokens_per_s']:.0f} tokens/s", flush=True)


def show(
    by_mode: Mapping[str, Run],
    sweep: Sequence[Run],
    found: Mapping[str, float],
    spreads: Mapping[str, Run],
    width: int = 160,
) -> None:
    console = Console(width=width)
    table = Table(title="the committed point, at the paper's scale")
    for column in ("", *by_mode):
        table.add_column(column)
    for name in SHOWN:
        if any(name in f for f in by_mode.values()):
            table.add_row(name, *("" if (v := f.get(name)) is None else f"{v:g}" for f in by_mode.values()))
    console.print(table)
    if sweep:
        console.print(_sweep_table(sweep))
    bars = Table(title="figures")
    for column in ("figure", "value", "stretches", "bar"):
        bars.add_column(column)
    for name in [*BARS, *(n for n in found if n not in BARS)]:
        how, bar = BARS.get(name, ("none", None))
        value = f"{found[name]:.3g}" if name in found else "not run"
        between = f"{spreads[name]['min']:.3g} .. {spreads[name]['max']:.3g}" if name in spreads else ""
        bars.add_row(name, value, between, how if bar is None else f"{how} {bar:g}")
    console.print(bars)


def _sweep_table(sweep: Sequence[Run]) -> Table:
    gains = Table(title="repack over drain: throughput, KV use, p99 from the request")
    for column in ("batch", *(f"every {p:g} s" for p in COMMITTED["sweep_publish_period_s"])):
        gains.add_column(column)
    for batch in COMMITTED["sweep_batch"]:
        gains.add_row(str(batch), *(_gains(sweep, batch, period) for period in COMMITTED["sweep_publish_period_s"]))
    return gains


def _gains(sweep: Sequence[Run], batch: int, period: float) -> str:
    at = {f["mode"]: f for f in sweep if (f["batch"], f["publish_period_s"]) == (batch, period)}
    if not {"drain", "repack"} <= at.keys():
        return "not run"
    names = ("tokens_per_s", "kv_util", "answer_p99_s")
    return "  ".join(f"{at['repack'][n] / at['drain'][n]:.2f}" for n in names)


def earlier(kept: Run, shape: Run) -> Run:
    """What the file has, if it was measured at this shape; else nothing of it can stand beside what is measured now."""
    return kept if all(kept.get(name) == value for name, value in shape.items()) else {}


def report(lives: Runs, stretches: Runs, sweep: Sequence[Run], simulated: bool) -> dict[str, Any]:
    """All that is said of what was measured, beside that itself."""
    values = {name: round(statistics.median(of_lives), 3) for name, of_lives in headline(lives).items()}
    spreads = {name: spread(of_stretches) for name, of_stretches in headline(stretches).items()}
    by_mode = {name: medians(of_mode) for name, of_mode in lives.items() if of_mode}
    slow = [] if simulated else too_slow([f for of_mode in [*stretches.values(), sweep] for f in of_mode])
    bars = {k: f"{h} {v:g}" for k, (h, v) in BARS.items()}
    found = {"figures": values, "spread": spreads, "bars": bars, "missed": missed(values), "purity": purity(by_mode)}
    return {**found, "too_slow": slow, "by_mode": by_mode}


def say(found: Mapping[str, Any], sweep: Sequence[Run]) -> None:
    """The report as tables and lines."""
    show(found["by_mode"], sweep, found["figures"], found["spread"])
    for line in found["purity"]:
        print(line)
    for line in found["missed"]:
        print(f"missed: {line}")
    for line in found["too_slow"]:
        print(f"the machine was the bottleneck: {line}")


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="make bench-repack ARGS=...", description=__doc__)
    parts_help = f"any of: {', '.join(PARTS)} (default: {' '.join(DEFAULT)}; all with --sim)"
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help=parts_help)
    parser.add_argument("--scale", type=float, default=6.0, help="seconds of the paper in one of ours")
    parser.add_argument("--stretch-s", type=float, default=400.0, help="of the paper's; two publish periods")
    parser.add_argument("--stretches", type=int, choices=range(1, REPEATS_MAX + 1), default=REPEATS_MAX)
    parser.add_argument("--apart", action="store_true", help="a life of its own for each stretch")
    parser.add_argument("--sim", action="store_true", help="in virtual time: minutes, on any machine")
    given = parser.parse_args(arguments)
    parts: list[str] = given.parts or list(PARTS if given.sim else DEFAULT)
    name = "repack-sim" if given.sim else "repack"
    shape = {"committed": COMMITTED, "stretches": given.stretches, "stretch_s": given.stretch_s, "apart": given.apart}
    shape |= {} if given.sim else {"scale": given.scale}
    path = results.RESULTS / f"{name}.json"
    kept = earlier(json.loads(path.read_text()) if path.exists() else {}, shape)
    base = Point("drain", scale=given.scale, stretch_s=given.stretch_s, stretches=given.stretches)
    lives = {
        part: sweep_points(base, given.sim) if part == "sweep" else mode_points(base, PARTS[part], given.apart)
        for part in parts
    }
    left_s = sum(wall_s(point, given.sim) for of_part in lives.values() for _, point in of_part)
    print(f"{sum(map(len, lives.values()))} lives of fleet and gateway: about {left_s / 60:.0f} minutes", flush=True)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    measured = dict(kept.get("parts", {}))
    whole, stretches = (
        {mode: list(of_mode) for mode, of_mode in kept.get(name_of, {}).items()} for name_of in ("lives", "runs")
    )
    sweep: list[Run] = list(kept.get("sweep", []))
    found: dict[str, Any] = {}
    for part in parts:
        whole |= {mode: [] for mode in PARTS[part]}
        stretches |= {mode: [] for mode in PARTS[part]}
        sweep = [] if part == "sweep" else sweep
        for mode, point in lives[part]:
            where = f"{mode}, batch {point.batch}, published every {point.publish_period_s:g} s"
            print(f"== {part}: {where}; about {left_s / 60:.0f} minutes left", flush=True)
            life = measure(point, given.sim)
            if part == "sweep":
                sweep.append(life.whole)
            else:
                whole[mode].append(life.whole)
                stretches[mode] += life.stretches
            left_s -= wall_s(point, given.sim)
            measured |= {part: today}
            found = report(whole, stretches, sweep, given.sim)  # what breaks later does not take this life away
            results.write(
                name, {**shape, "parts": measured, **found, "lives": whole, "runs": stretches, "sweep": sweep}
            )
    say(found, sweep)


if __name__ == "__main__":
    main(sys.argv[1:])
