"""`make bench-repack`: what packing the long tail is worth, through the real gateway over HTTP.

Runs the committed point in every mode, then a sweep of batch and publish period in `drain` and `repack`; prints tables
and writes bench-results/repack.json. `--sim` runs the same in virtual time instead, through `gateway.sim`. With `--add`
what was measured before of the same committed point, at the same scale, stays: so the hour can be taken in parts.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench import results
from tests.bench.repack.run import Point, run
from tests.bench.repack.simulated import simulate
from tests.bench.repack.trace import COMMITTED

MODES = ("barrier", "drain", "repack", "inflight")
BARS: Mapping[str, tuple[str, float]] = {
    "repack_gain": ("at least", 1.26),
    "kv_util_gain": ("at least", 1.14),
    "tail_latency_ratio": ("at most", 1.03),
    "repack_overhead_s": ("at most", 0.69),
    "wrong_answers": ("at most", 0),
    "repack_over_inflight": ("at least", 0.95),
}
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
    "refreshes",
    "moves",
    "prefilled_again_share",
    "pause_mean_s",
    "pause_p99_s",
    "cores_gateway",
    "engines_late_share",
)


def headline(by_mode: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The figures that have bars; those of modes that were not run are left out.

    Trajectory latency is the client's, from its request to its answer: waiting for an engine is part of it, as it is in
    the paper, whose replicas get whole batches at once. `tail_decode_ratio` counts from the first place on and has
    no bar: full engines take longer for a step than those that drain, by the very curve.
    """
    found: dict[str, float] = {"wrong_answers": sum(f["wrong_answers"] for f in by_mode.values())}
    if "repack" in by_mode:
        repack = by_mode["repack"]
        if repack["pause_mean_s"] is not None:
            found["repack_overhead_s"] = repack["pause_mean_s"]
        if "drain" in by_mode:
            drain = by_mode["drain"]
            found["repack_gain"] = round(repack["tokens_per_s"] / drain["tokens_per_s"], 3)
            found["kv_util_gain"] = round(repack["kv_util"] / drain["kv_util"], 3)
            found["tail_latency_ratio"] = round(repack["answer_p99_s"] / drain["answer_p99_s"], 3)
            found["tail_decode_ratio"] = round(repack["latency_p99_s"] / drain["latency_p99_s"], 3)
        if "inflight" in by_mode:
            found["repack_over_inflight"] = round(repack["tokens_per_s"] / by_mode["inflight"]["tokens_per_s"], 3)
    return found


def missed(found: Mapping[str, float]) -> list[str]:
    """The bars that were missed, in words."""
    words = []
    for name, (how, bar) in BARS.items():
        value = found.get(name)
        if value is not None and not (value >= bar if how == "at least" else value <= bar):
            words.append(f"{name} is {value:g}, {how} {bar:g} was wanted")
    return words


def purity(by_mode: Mapping[str, Mapping[str, Any]]) -> list[str]:
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


def _crossings(figures: Mapping[str, Any]) -> int:
    return int(figures["mixed"] if "mixed" in figures else figures["versions_mixed"])


def too_slow(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Runs in which the machine was the bottleneck, so that their figures say little."""
    return [
        f"{f['mode']} (batch {f['batch']}, period {f['publish_period_s']:g} s): "
        f"gateway {f['cores_gateway']:.2f} cores, engines {f['engines_late_share']:.1%} of the time late"
        for f in runs
        if max(f["cores_gateway"], f["cores_engines"], f["cores_clients"]) > CORES_MAX or f["engines_late_share"] > 0.03
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
    print(
        f"{point.mode}, batch {point.batch}, every {point.publish_period_s:g} s: {found['tokens_per_s']:.0f} tokens/s"
    )
    return found


def show(
    by_mode: Mapping[str, Mapping[str, Any]], sweep: Sequence[Mapping[str, Any]], found: Mapping[str, float]
) -> None:
    console = Console(width=150)
    table = Table(title="the committed point, at the paper's scale")
    for column in ("", *by_mode):
        table.add_column(column)
    for name in SHOWN:
        table.add_row(name, *("" if (v := f.get(name)) is None else f"{v:g}" for f in by_mode.values()))
    console.print(table)
    gains = Table(title="repack over drain: throughput, KV use, p99 latency")
    for column in ("batch", *(f"every {p:g} s" for p in COMMITTED["sweep_publish_period_s"])):
        gains.add_column(column)
    at = {(f["batch"], f["publish_period_s"], f["mode"]): f for f in sweep}
    for batch in COMMITTED["sweep_batch"] if sweep else ():
        cells = [_gains(at, batch, period) for period in COMMITTED["sweep_publish_period_s"]]
        gains.add_row(str(batch), *cells)
    if sweep:
        console.print(gains)
    bars = Table(title="bars")
    for column in ("figure", "value", "bar"):
        bars.add_column(column)
    for name, (how, bar) in BARS.items():
        bars.add_row(name, f"{found[name]:g}" if name in found else "not run", f"{how} {bar:g}")
    if "tail_decode_ratio" in found:
        bars.add_row("tail_decode_ratio", f"{found['tail_decode_ratio']:g}", "none")
    console.print(bars)


def _gains(at: Mapping[tuple[int, float, str], Mapping[str, Any]], batch: int, period: float) -> str:
    drain, repack = at[batch, period, "drain"], at[batch, period, "repack"]
    names = ("tokens_per_s", "kv_util", "answer_p99_s")
    return "  ".join(f"{repack[n] / drain[n]:.2f}" for n in names)


def _earlier(name: str, scale: float) -> Mapping[str, Any]:
    """What the file has, if it was measured at this committed point and scale."""
    path = results.RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found if (found.get("committed"), found.get("scale")) == (COMMITTED, scale) else {}


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="make bench-repack ARGS=...", description=__doc__)
    parser.add_argument("--scale", type=float, default=6.0, help="seconds of the paper in one of ours")
    parser.add_argument("--measured-s", type=float, default=1000.0, help="of the paper's, for each mode")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES), help="none: the sweep alone")
    parser.add_argument("--no-sweep", action="store_true")
    parser.add_argument("--sim", action="store_true", help="in virtual time: minutes, on any machine")
    parser.add_argument("--add", action="store_true", help="to the modes, and the sweep, that are in the file already")
    given = parser.parse_args(arguments)
    base = Point("drain", scale=given.scale, measured_s=given.measured_s)
    by_mode = {m: measure(dataclasses.replace(base, mode=m), given.sim) for m in given.modes}
    short = dataclasses.replace(base, measured_s=given.measured_s / 2)
    sweep = [] if given.no_sweep else [measure(point, given.sim) for point in sweep_points(short)]
    name = "repack-sim" if given.sim else "repack"
    if given.add:
        earlier = _earlier(name, given.scale)
        by_mode = {mode: f for mode in MODES if (f := by_mode.get(mode) or earlier.get("by_mode", {}).get(mode))}
        sweep = sweep or earlier.get("sweep", [])
    found = headline(by_mode)
    show(by_mode, sweep, found)
    words, slow = missed(found), [] if given.sim else too_slow([*by_mode.values(), *sweep])
    said = purity(by_mode)
    for line in [*said, *(f"missed: {w}" for w in words), *(f"the machine was the bottleneck: {w}" for w in slow)]:
        print(line)
    told = {
        "figures": found,
        "bars": {k: f"{h} {v:g}" for k, (h, v) in BARS.items()},
        "missed": words,
        "purity": said,
        "too_slow": slow,
    }
    results.write(name, {"committed": COMMITTED, "scale": given.scale, **told, "by_mode": by_mode, "sweep": sweep})


if __name__ == "__main__":
    main(sys.argv[1:])
