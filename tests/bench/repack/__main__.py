"""`make bench-repack`: what packing the long tail is worth, through the real gateway over HTTP.

Parts, of which `ARGS="shipped sweep"` runs some:

- `paper`: every mode at the committed point, where engines wait for their last trajectory, as in the paper;
- `shipped`: `drain` and `repack` there, with the gateway's own relief from stragglers;
- `sweep`: batch and publish period, one run each.

The first two run `--repeats` times, each over its own stretch of the trace, mode after mode; figures are medians of
ratios within one repeat, with their spread. Writes bench-results/repack.json; a part is added to what is there if that
was measured at the same committed point, scale, time and repeats. `--sim` runs the same in virtual time instead,
through `gateway.sim`.
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
from tests.bench.repack.run import REPEATS_MAX, Point, run
from tests.bench.repack.simulated import simulate
from tests.bench.repack.trace import COMMITTED

Run = Mapping[str, Any]
"""Figures of one run."""

PARTS: Mapping[str, Sequence[str]] = {
    "paper": ("barrier", "drain", "repack", "inflight"),
    "shipped": ("drain_shipped", "repack_shipped"),
    "sweep": (),
}
ONCE = "barrier"
"""It has no figure of its own: one run, for the table."""
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


def headline(runs: Mapping[str, Sequence[Run]]) -> dict[str, list[float]]:
    """Each figure's value in every repeat; those of modes that were not run are left out."""
    found: dict[str, list[float]] = {
        name: [round(ours[what] / theirs[what], 3) for ours, theirs in pairs(runs, of, over)]
        for name, (of, over, what) in RATIOS.items()
    }
    found["repack_overhead_s"] = [f["pause_mean_s"] for f in runs.get("repack", ()) if f["pause_mean_s"] is not None]
    found["wrong_answers"] = [sum(f["wrong_answers"] for of_mode in runs.values() for f in of_mode)]
    return {name: values for name, values in found.items() if values}


def pairs(runs: Mapping[str, Sequence[Run]], of: str, over: str) -> list[tuple[Run, Run]]:
    """Runs of two modes over the same stretch of the trace."""
    others = {f["repeat"]: f for f in runs.get(over, ())}
    return [(f, others[f["repeat"]]) for f in runs.get(of, ()) if f["repeat"] in others]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """What a figure is, and between which values its repeats lie."""
    median, least, most = round(statistics.median(values), 3), min(values), max(values)
    return {"median": median, "min": least, "max": most, "repeats": list(values)}


def medians(runs: Sequence[Run]) -> dict[str, Any]:
    """Each figure of a mode by itself; what is no number is left to the runs."""
    found: dict[str, Any] = {}
    for name in runs[0]:
        values = [f[name] for f in runs if f[name] is not None]
        if name != "repeat" and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values):
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
    """Runs in which the machine was the bottleneck, so that their figures say little."""
    return [
        f"{f['mode']} (batch {f['batch']}, period {f['publish_period_s']:g} s, repeat {f['repeat']}): "
        f"gateway {f['cores_gateway']:.2f} cores, engines {f['engines_late_share']:.1%} of the time late"
        for f in runs
        if max(f["cores_gateway"], f["cores_engines"], f["cores_clients"]) > CORES_MAX or f["engines_late_share"] > 0.03
    ]


def point_of(base: Point, name: str, repeat: int) -> Point:
    """`name`: a mode, with `_shipped` behind it where the gateway has its relief from stragglers."""
    mode = name.removesuffix("_shipped")
    return dataclasses.replace(base, mode=mode, shipped=mode != name, repeat=repeat)


def mode_points(base: Point, names: Sequence[str], repeats: int) -> list[tuple[str, Point]]:
    """Mode after mode within a repeat, so that what changes with time touches all of them."""
    return [
        (name, point_of(base, name, repeat))
        for repeat in range(repeats)
        for name in names
        if name != ONCE or repeat == 0
    ]


def sweep_points(base: Point) -> list[Point]:
    return [
        dataclasses.replace(base, mode=mode, batch=batch, publish_period_s=period)
        for batch in COMMITTED["sweep_batch"]
        for period in COMMITTED["sweep_publish_period_s"]
        for mode in ("drain", "repack")
    ]


def measure(point: Point, simulated: bool) -> dict[str, Any]:
    found = simulate(point) if simulated else asyncio.run(run(point))
    gc.collect()
    what = f"{point.mode}{' as it ships' if point.shipped else ''}, repeat {point.repeat}"
    where = f"batch {point.batch}, every {point.publish_period_s:g} s"
    print(f"{what}, {where}: {found['tokens_per_s']:.0f} tokens/s", flush=True)
    return found


def show(
    by_mode: Mapping[str, Run], sweep: Sequence[Run], found: Mapping[str, Sequence[float]], width: int = 160
) -> None:
    console = Console(width=width)
    table = Table(title="the committed point, at the paper's scale; medians of the repeats")
    for column in ("", *by_mode):
        table.add_column(column)
    for name in SHOWN:
        if any(name in f for f in by_mode.values()):
            table.add_row(name, *("" if (v := f.get(name)) is None else f"{v:g}" for f in by_mode.values()))
    console.print(table)
    if sweep:
        console.print(_sweep_table(sweep))
    bars = Table(title="figures: medians of the repeats")
    for column in ("figure", "value", "spread", "bar"):
        bars.add_column(column)
    for name in [*BARS, *(n for n in found if n not in BARS)]:
        how, bar = BARS.get(name, ("none", None))
        values = found.get(name)
        value = f"{statistics.median(values):.3g}" if values else "not run"
        between = f"{min(values):.3g} .. {max(values):.3g}" if values else ""
        bars.add_row(name, value, between, how if bar is None else f"{how} {bar:g}")
    console.print(bars)


def _sweep_table(sweep: Sequence[Run]) -> Table:
    gains = Table(title="repack over drain: throughput, KV use, p99 latency; one run each")
    for column in ("batch", *(f"every {p:g} s" for p in COMMITTED["sweep_publish_period_s"])):
        gains.add_column(column)
    at = {(f["batch"], f["publish_period_s"], f["mode"]): f for f in sweep}
    for batch in COMMITTED["sweep_batch"]:
        cells = [_gains(at, batch, period) for period in COMMITTED["sweep_publish_period_s"]]
        gains.add_row(str(batch), *cells)
    return gains


def _gains(at: Mapping[tuple[int, float, str], Run], batch: int, period: float) -> str:
    drain, repack = at[batch, period, "drain"], at[batch, period, "repack"]
    names = ("tokens_per_s", "kv_util", "answer_p99_s")
    return "  ".join(f"{repack[n] / drain[n]:.2f}" for n in names)


def earlier(kept: Run, shape: Run) -> Run:
    """What the file has, if it was measured at this shape; else nothing of it can stand beside what is measured now."""
    return kept if all(kept.get(name) == value for name, value in shape.items()) else {}


def report(runs: Mapping[str, Sequence[Run]], sweep: Sequence[Run], simulated: bool) -> dict[str, Any]:
    """All that is said of runs, beside the runs themselves."""
    spreads = {name: spread(values) for name, values in headline(runs).items()}
    values = {name: s["median"] for name, s in spreads.items()}
    by_mode = {name: medians(of_mode) for name, of_mode in runs.items()}
    slow = [] if simulated else too_slow([f for of_mode in [*runs.values(), sweep] for f in of_mode])
    bars = {k: f"{h} {v:g}" for k, (h, v) in BARS.items()}
    told = {"figures": values, "spread": spreads, "bars": bars, "missed": missed(values), "purity": purity(by_mode)}
    return {**told, "too_slow": slow, "by_mode": by_mode}


def say(told: Mapping[str, Any], sweep: Sequence[Run]) -> None:
    """The report as tables and lines."""
    show(told["by_mode"], sweep, {name: s["repeats"] for name, s in told["spread"].items()})
    for line in told["purity"]:
        print(line)
    for line in told["missed"]:
        print(f"missed: {line}")
    for line in told["too_slow"]:
        print(f"the machine was the bottleneck: {line}")


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="make bench-repack ARGS=...", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help=f"any of: {', '.join(PARTS)} (default: all)")
    parser.add_argument("--scale", type=float, default=6.0, help="seconds of the paper in one of ours")
    parser.add_argument("--measured-s", type=float, default=1000.0, help="of the paper's, for each run")
    parser.add_argument("--repeats", type=int, choices=range(1, REPEATS_MAX + 1), default=REPEATS_MAX)
    parser.add_argument("--sim", action="store_true", help="in virtual time: minutes, on any machine")
    given = parser.parse_args(arguments)
    parts: list[str] = given.parts or list(PARTS)
    name = "repack-sim" if given.sim else "repack"
    shape = {"committed": COMMITTED, "repeats": given.repeats, "measured_s": given.measured_s}
    shape |= {} if given.sim else {"scale": given.scale}
    path = results.RESULTS / f"{name}.json"
    kept = earlier(json.loads(path.read_text()) if path.exists() else {}, shape)
    base = Point("drain", scale=given.scale, measured_s=given.measured_s)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    measured = dict(kept.get("parts", {}))
    runs: dict[str, list[Run]] = {mode: list(of_mode) for mode, of_mode in kept.get("runs", {}).items()}
    sweep: list[Run] = list(kept.get("sweep", []))
    told: dict[str, Any] = {}
    for part in parts:
        print(f"== {part}", flush=True)
        if part == "sweep":
            short = dataclasses.replace(base, measured_s=given.measured_s / 2)
            sweep = [measure(point, given.sim) for point in sweep_points(short)]
        else:
            runs |= {mode: [] for mode in PARTS[part]}
            for mode, point in mode_points(base, PARTS[part], given.repeats):
                runs[mode].append(measure(point, given.sim))
        measured[part] = today
        told = report(runs, sweep, given.sim)  # what a later part breaks does not take this one away
        results.write(name, {**shape, "parts": measured, **told, "runs": runs, "sweep": sweep})
    say(told, sweep)


if __name__ == "__main__":
    main(sys.argv[1:])
