"""A figure: what was measured in rounds, the bar beside it, and whether it was met. Figures gather in one JSON."""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from tests.bench import kinds
from tests.bench.results import RESULTS, write

ROUNDS = 5  # at least: every figure is the median of so many

Better = Literal["more", "less", "reported"]


@dataclass(frozen=True, slots=True)
class Figure:
    """`value` is the median of `rounds`, unless `of` says otherwise; None: not measured, `note` says why."""

    key: str
    what: str
    value: float | None
    bar: float | None = None
    better: Better = "less"
    unit: str = ""
    rounds: Sequence[float] = ()
    of: str = "median"
    note: str = ""
    details: Mapping[str, object] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """None: nothing to meet, or nothing measured."""
        if self.value is None or self.bar is None:
            return None
        return self.value >= self.bar if self.better == "more" else self.value <= self.bar

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        return {True: "met", False: "MISSED", None: "reported"}[self.met]


def median(key: str, what: str, rounds: Sequence[float], **more: object) -> Figure:
    """The figure that is the median of its rounds."""
    return Figure(key, what, statistics.median(rounds), rounds=[round(r, 4) for r in rounds], **more)  # type: ignore[arg-type]


def show(of: str, figures: Sequence[Figure]) -> None:
    table = Table(title=f"{of}: ratios within one run, medians", title_justify="left")
    for name, justify in (("figure", "left"), ("is", "right"), ("bar", "right"), ("", "left"), ("spread", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("what, and how", overflow="fold")
    for figure in figures:
        value = "-" if figure.value is None else f"{figure.value:.3g}{figure.unit and ' ' + figure.unit}"
        sign = {"more": "at least ", "less": "at most ", "reported": ""}[figure.better]
        bar = "" if figure.bar is None else f"{sign}{figure.bar:g}"
        spread = f"{min(figure.rounds):.3g} .. {max(figure.rounds):.3g}" if figure.rounds else ""
        style = "bold red" if figure.met is False else ""
        about = figure.what + (f" ({figure.note})" if figure.note else "")
        table.add_row(figure.key, value, bar, figure.verdict, spread, about, style=style)
    Console(width=None if Console().is_terminal else 160).print(table)


def keep(name: str, figures: Sequence[Figure], *, processor: str = "") -> None:
    """Adds the figures to `bench-results/NAME.json`, in the place of earlier ones of the same key.

    With `processor`, in the place of those of the same key and that kind: see `kinds`.
    """
    path = RESULTS / f"{name}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    kept: dict[str, Any] = dict(found.get("figures", {}))
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    for figure in figures:
        as_kept = asdict(figure)
        del as_kept["key"]
        value = None if figure.value is None else round(figure.value, 4)
        kept[figure.key] = row = {**as_kept, "value": value, "verdict": figure.verdict, "measured": today}
        if processor:
            rows = kinds.rows_of(found.get("figures", {}).get(figure.key, {}), found.get("machine", ""))
            kept[figure.key] = {kinds.ROWS: {**rows, processor: row}}
    if processor:
        kept = _by_kind(kept, found.get("machine", ""))
    write(name, {"figures": kept})


def _by_kind(kept: Mapping[str, Mapping[str, object]], machine: str) -> dict[str, object]:
    """Every figure with a row for each kind that it was run on; the kinds are all that any figure was run on."""
    rows = {key: kinds.rows_of(figure, machine) for key, figure in kept.items()}
    known = {kind for of in rows.values() for kind in of}
    return {key: kinds.headline(of, known) for key, of in rows.items()}
