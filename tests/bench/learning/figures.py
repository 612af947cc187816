"""What is made of runs: curves, medians over seeds, the table, and where the time went. Pure.

A run's curve is the expected reward of its versions (`model.expected_reward`), against the seconds until a version was
published, or against the tokens that it was trained on. Between two versions it is read off the straight line.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal

Run = Mapping[str, Any]
Against = Literal["s", "tokens"]
Curve = Sequence[tuple[float, float]]
LEVELS = (0.5, 0.6, 0.7)
"""Rewards whose time is reported; the model begins at some 0.35."""
GRID = 120


def curve(run: Run, against: Against) -> Curve:
    """(seconds or tokens, expected reward), ascending."""
    spent = [0.0, *(run["t"] if against == "s" else accumulate(run["tokens"]))]
    return [(float(spent[step]), reward) for step, reward in run["evaluated"]]


def reward_at(points: Curve, x: float) -> float | None:
    """None beyond the curve's end."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x1 > x0 else y1
    return None


def first_at(points: Curve, reward: float) -> float | None:
    """Where the curve first comes to `reward`; None: it does not."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if y1 >= reward > y0:
            return x0 + (x1 - x0) * (reward - y0) / (y1 - y0)
    return None


def median_curve(curves: Sequence[Curve]) -> Curve:
    """As far as all of them go."""
    end = min(points[-1][0] for points in curves)
    grid = [end * n / GRID for n in range(GRID + 1)]
    found = [(x, [reward_at(points, x) for points in curves]) for x in grid]
    return [(x, statistics.median(y for y in ys if y is not None)) for x, ys in found if None not in ys]


def staleness(run: Run) -> dict[int, int]:
    """Trained tokens by versions behind, at use."""
    found: dict[int, int] = {}
    for step in run["staleness"]:
        for behind, count in step.items():
            found[int(behind)] = found.get(int(behind), 0) + count
    return dict(sorted(found.items()))


def quantile(counts: Mapping[int, int], q: float) -> int:
    total, seen = sum(counts.values()), 0
    for value, count in sorted(counts.items()):
        seen += count
        if seen >= q * total:
            return value
    return max(counts)


def spent(run: Run) -> dict[str, float]:
    """Shares of the wall-clock by what the trainer did. A barrier's wait is split: while the fleet loads nothing is
    generated; in the other modes engines load one by one, beside generation."""
    wall_s, loading_s = run["wall_s"], run.get("loading_s") or 0.0
    sums = {name: sum(run[f"{name}_s"]) for name in ("wait", "train", "publish")}
    parts = {"waiting for generation": sums["wait"] - loading_s, "waiting for loads": loading_s}
    parts |= {"training": sums["train"], "publishing": sums["publish"]}
    parts["other"] = max(0.0, wall_s - sum(parts.values()))
    return {name: seconds / wall_s for name, seconds in parts.items()}


def of_run(run: Run, tokens: float, seconds: float) -> dict[str, float | None]:
    """Figures of one run. `tokens`, `seconds`: the points at which rewards are compared."""
    by_s, by_tokens, behind = curve(run, "s"), curve(run, "tokens"), staleness(run)
    trained = sum(behind.values())
    found: dict[str, float | None] = {
        "reward_first": by_s[0][1],
        "reward_last": by_s[-1][1],
        "reward_after_tokens": reward_at(by_tokens, tokens),
        "reward_after_seconds": reward_at(by_s, seconds),
    }
    for level in LEVELS:
        found |= {f"s_to_{level}": first_at(by_s, level), f"tokens_to_{level}": first_at(by_tokens, level)}
    return found | {
        "staleness_mean": sum(value * count for value, count in behind.items()) / trained,
        "staleness_p99": quantile(behind, 0.99),
        "generated_tokens_per_s": run["generated_tokens"] / run["wall_s"],
        "trained_tokens_per_s": trained / run["wall_s"],
        "step_s": run["wall_s"] / len(run["t"]),
        "mixed_share": sum(run["mixed"]) / (len(run["t"]) * run["settings"]["groups"] * run["settings"]["group_size"]),
        "clip_fraction": statistics.fmean(run["clip_fraction"]),
        "slots_used": run["slots_used"],
        "token_ms": run["token_ms"],
        "length_p50": run["lengths"]["p50"],
        "length_p99": run["lengths"]["p99"],
        "cores": sum(run["cpu_s"].values()) / run["wall_s"],
        **{f"share: {name}": share for name, share in spent(run).items()},
        **{f"cores: {name}": used / run["wall_s"] for name, used in run["cpu_s"].items()},
    }


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """By mode and figure: the median over seeds, the least and the most. A figure that a seed lacks is None: a reward
    that one of them does not come to has no median time."""
    tokens = min(curve(run, "tokens")[-1][0] for run in runs)
    seconds = min(curve(run, "s")[-1][0] for run in runs)
    modes: dict[str, Any] = {}
    for mode in dict.fromkeys(run["mode"] for run in runs):
        found = [of_run(run, tokens, seconds) for run in runs if run["mode"] == mode]
        modes[mode] = {name: _spread([one[name] for one in found]) for name in found[0]}
        modes[mode]["seeds"] = [run["seed"] for run in runs if run["mode"] == mode]
    return {"tokens": tokens, "seconds": seconds, "modes": modes, "verdicts": verdicts(modes)}


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    there = [value for value in values if value is not None]
    if len(there) < len(values):
        return None
    return {"median": statistics.median(there), "min": min(there), "max": max(there)}


def verdicts(modes: Mapping[str, Any]) -> list[str]:
    """In words, for each mode beside `barrier`: whether it came sooner to a reward, and whether by fewer tokens. Only
    spreads that do not overlap count as a difference."""
    if "barrier" not in modes:
        return []
    found = []
    for mode, figures in modes.items():
        level = _highest_level(modes["barrier"], figures)
        if mode == "barrier":
            continue
        if min(len(figures["seeds"]), len(modes["barrier"]["seeds"])) < 2:
            found.append(f"`{mode}`: one seed shows no difference.")
            continue
        if level is None:
            found.append(f"`{mode}`: not all seeds of both came to a reward of {LEVELS[0]}.")
            continue
        time = _compared(figures[f"s_to_{level}"], modes["barrier"][f"s_to_{level}"], "time")
        tokens = _compared(figures[f"tokens_to_{level}"], modes["barrier"][f"tokens_to_{level}"], "tokens")
        found.append(f"`{mode}`, to a reward of {level}: {time}; {tokens}.")
    return found


def _highest_level(*modes: Mapping[str, Any]) -> float | None:
    return next((v for v in reversed(LEVELS) if all(m[f"s_to_{v}"] is not None for m in modes)), None)


def _compared(one: Mapping[str, float], barrier: Mapping[str, float], what: str) -> str:
    ratio = f"{one['median'] / barrier['median']:.2f} times the {what} of `barrier`"
    if one["max"] < barrier["min"] or one["min"] > barrier["max"]:
        return ratio
    return f"{ratio} (the seeds overlap: no clear difference)"


Format = Callable[[float], str]
ROWS: Sequence[tuple[str, str, Format]] = (
    ("expected reward, first version", "reward_first", "{:.3f}".format),
    ("after {tokens:,.0f} tokens trained on", "reward_after_tokens", "{:.3f}".format),
    ("after {seconds:.0f} s", "reward_after_seconds", "{:.3f}".format),
    ("after the last step", "reward_last", "{:.3f}".format),
    *((f"seconds to a reward of {level}", f"s_to_{level}", "{:.0f}".format) for level in LEVELS),
    *((f"tokens to a reward of {level}", f"tokens_to_{level}", "{:,.0f}".format) for level in LEVELS),
    ("staleness at use: mean of tokens, in versions", "staleness_mean", "{:.2f}".format),
    ("the same: 99th percentile", "staleness_p99", "{:.0f}".format),
    ("trajectories of more than one version", "mixed_share", "{:.1%}".format),
    ("tokens whose ratio was clipped", "clip_fraction", "{:.2%}".format),
    ("tokens generated per second", "generated_tokens_per_s", "{:,.0f}".format),
    ("tokens trained on per second", "trained_tokens_per_s", "{:,.0f}".format),
    ("seconds per step", "step_s", "{:.2f}".format),
    ("engines' slots in use", "slots_used", "{:.0%}".format),
    ("time per token of a trajectory, ms", "token_ms", "{:.1f}".format),
    ("answer's tokens: median", "length_p50", "{:.0f}".format),
    ("the same: 99th percentile", "length_p99", "{:.0f}".format),
    ("processor cores in use", "cores", "{:.2f}".format),
)
SHARES = ("waiting for generation", "waiting for loads", "training", "publishing", "other")


def table(found: Mapping[str, Any]) -> list[str]:
    """Lines of Markdown: medians, with the least and the most of the seeds where they differ."""
    modes = found["modes"]
    seeds = ", ".join(f"{mode}: {len(figures['seeds'])}" for mode, figures in modes.items())
    lines = [f"| median [least, most] of seeds ({seeds}) | {' | '.join(modes)} |", "|---|" + "---|" * len(modes)]
    for label, name, form in ROWS:
        cells = [_cell(figures[name], form) for figures in modes.values()]
        lines.append(f"| {label.format(**found)} | {' | '.join(cells)} |")
    lines += ["", f"| share of the wall-clock, as the trainer saw it | {' | '.join(modes)} |"]
    lines.append("|---|" + "---|" * len(modes))
    for name in SHARES:
        cells = [_cell(figures[f"share: {name}"], "{:.0%}".format) for figures in modes.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", f"| processor cores in use, by process | {' | '.join(modes)} |", "|---|" + "---|" * len(modes)]
    for name in ("engines", "gateway", "trainer", "relays and etcd", "agents"):
        cells = [_cell(figures[f"cores: {name}"], "{:.2f}".format) for figures in modes.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _cell(value: Mapping[str, float] | None, form: Format) -> str:
    if value is None:
        return "not reached"
    median, least, most = (form(value[name]) for name in ("median", "min", "max"))
    return median if least == most else f"{median} [{least}, {most}]"
