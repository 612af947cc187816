"""The plot: reward against time and tokens, staleness, and where the time went. PNG and SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from tests.bench.learning.figures import SHARES, Against, Run, curve, median_curve, spent, staleness
from tests.bench.learning.settings import MODES

mpl.use("Agg")
mpl.rcParams["svg.hashsalt"] = "laminar"  # the same runs give the same file

from matplotlib import pyplot as plt  # noqa: E402  (the backend is chosen first)

STYLES: Mapping[str, tuple[str, str]] = {
    "barrier": ("#0072B2", "-"),
    "repack": ("#D55E00", "--"),
    "inflight": ("#009E73", "-."),
}
"""Colours of Okabe and Ito's palette, which colour-blind people tell apart; lines differ in their dashes, too."""
PARTS = ("#56B4E9", "#F0E442", "#CC79A7", "#000000", "#BBBBBB")
HATCHES = ("", "//", "..", "", "xx")


def write(runs: Sequence[Run], title: str, target: Path) -> list[Path]:
    """Writes `target` with the suffixes .png and .svg."""
    figure, ((by_time, by_tokens), (behind, shares)) = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    figure.suptitle(title, fontsize=11)
    _curves(by_time, runs, "s", 1.0, "wall-clock time (s)")
    _curves(by_tokens, runs, "tokens", 1000.0, "tokens trained on (thousands)")
    _staleness(behind, runs)
    _shares(shares, runs)
    files = [target.with_suffix(suffix) for suffix in (".png", ".svg")]
    for file in files:
        figure.savefig(file, dpi=110, metadata={"Date": None} if file.suffix == ".svg" else None)
    plt.close(figure)
    return files


def _by_mode(runs: Sequence[Run]) -> dict[str, list[Run]]:
    found = {mode: [run for run in runs if run["mode"] == mode] for mode in MODES}
    return {mode: of_mode for mode, of_mode in found.items() if of_mode}


def _curves(axes: Any, runs: Sequence[Run], against: Against, unit: float, label: str) -> None:
    for mode, of_mode in _by_mode(runs).items():
        colour, dashes = STYLES[mode]
        curves = [curve(run, against) for run in of_mode]
        for points in curves:
            axes.plot([x / unit for x, _ in points], [y for _, y in points], color=colour, linewidth=0.7, alpha=0.55)
        name = f"{mode} (median of {len(curves)} seeds)" if len(curves) > 1 else f"{mode} (one seed)"
        middle = median_curve(curves)
        xs, ys = [x / unit for x, _ in middle], [y for _, y in middle]
        axes.plot(xs, ys, color=colour, linestyle=dashes, linewidth=2.4, label=name)
    axes.set(xlabel=label, ylabel="expected reward of a version (0 to 1)", xlim=(0, None), ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=9)
    axes.set_title("thin: each seed; thick: their median", fontsize=9)


def _staleness(axes: Any, runs: Sequence[Run]) -> None:
    modes = _by_mode(runs)
    width = 0.8 / len(modes)
    for place, (mode, of_mode) in enumerate(modes.items()):
        counts: dict[int, int] = {}
        for run in of_mode:
            for value, count in staleness(run).items():
                counts[value] = counts.get(value, 0) + count
        total = sum(counts.values())
        xs = [value + (place - (len(modes) - 1) / 2) * width for value in counts]
        shares = [100 * count / total for count in counts.values()]
        axes.bar(xs, shares, width, color=STYLES[mode][0], label=mode)
    most = max(max(staleness(run)) for run in runs)
    axes.set(xlabel="staleness at use (versions)", ylabel="tokens trained on (%)", xticks=range(most + 1))
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize=9)


def _shares(axes: Any, runs: Sequence[Run]) -> None:
    modes = _by_mode(runs)
    bottoms = [0.0] * len(modes)
    for name, colour, hatch in zip(SHARES, PARTS, HATCHES, strict=True):
        steps = [
            sum(spent(run)[name] * run["wall_s"] / len(run["t"]) for run in of_mode) / len(of_mode)
            for of_mode in modes.values()
        ]
        axes.bar(list(modes), steps, 0.6, bottoms, color=colour, hatch=hatch, edgecolor="#444444", label=name)
        bottoms = [bottom + step for bottom, step in zip(bottoms, steps, strict=True)]
    axes.set(ylabel="wall-clock time of a step (s)", ylim=(0, 1.3 * max(bottoms)), title="")
    axes.set_title("where the trainer's time went (mean of seeds)", fontsize=9)
    axes.legend(fontsize=8, ncols=2, loc="upper right")
