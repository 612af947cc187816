"""Figures against their bars, and how parts that are run alone gather in one file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.figures import Figure, keep, median


@pytest.mark.parametrize(
    ("value", "bar", "better", "verdict"),
    [
        (1.8, 1.8, "more", "met"),
        (1.7, 1.8, "more", "MISSED"),
        (1.06, 1.06, "less", "met"),
        (1.07, 1.06, "less", "MISSED"),
        (3.0, None, "reported", "reported"),
        (None, 1.2, "more", "not measured"),
    ],
)
def test_a_missed_bar_is_said(value: float | None, bar: float | None, better: str, verdict: str) -> None:
    assert Figure("key", "what", value, bar, better).verdict == verdict  # type: ignore[arg-type]


def test_a_figure_is_the_median_of_all_its_rounds() -> None:
    figure = median("key", "what", [3.0, 1.0, 2.0, 9.0, 2.5], bar=2.4)
    assert figure.value == 2.5
    assert len(figure.rounds) == 5
    assert figure.verdict == "MISSED"


def test_parts_run_alone_add_to_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keep("relay", [Figure("one", "what", 1.0, 2.0), Figure("two", "what", 1.0)])
    keep("relay", [Figure("one", "what", 3.0, 2.0)])
    kept = json.loads((tmp_path / "bench-results" / "relay.json").read_text())["figures"]
    assert {key: figure["verdict"] for key, figure in kept.items()} == {"one": "MISSED", "two": "reported"}
