"""Figures against their bars, and how parts that are run alone gather in one file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.figures import Figure, keep, median
from tests.bench.kinds import processor


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


def kept_on(tmp_path: Path) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads((tmp_path / "bench-results" / "relay.json").read_text())["figures"]
    return found


def test_the_worse_of_two_kinds_of_processor_stands_for_a_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keep("relay", [Figure("hop", "what", 1.2, 1.0, "more"), Figure("stall", "what", 1.1, 1.15)], processor="a")
    keep("relay", [Figure("hop", "what", 0.9, 1.0, "more")], processor="b")
    keep("relay", [Figure("stall", "what", 1.2, 1.15)], processor="b")
    found = kept_on(tmp_path)
    assert [(found[key]["value"], found[key]["verdict"], found[key]["processor"]) for key in ("hop", "stall")] == [
        (0.9, "MISSED", "b"),
        (1.2, "MISSED", "b"),
    ]
    assert found["hop"]["by_processor"]["a"]["value"] == 1.2  # type: ignore[index]


def test_a_bar_is_open_where_a_kind_was_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure that was kept before there were kinds counts for the machine that the file named."""
    monkeypatch.chdir(tmp_path)
    keep("relay", [Figure("hop", "what", 1.2, 1.0, "more"), Figure("stall", "what", 1.3, 1.15)])
    path = tmp_path / "bench-results" / "relay.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "machine": "AMD EPYC, 2 cores, 24 GiB"}))
    keep("relay", [Figure("new", "what", 1.0, 1.0)], processor="Intel (avx2)")
    found = kept_on(tmp_path)
    assert {key: (f["verdict"], f["not_run_there"]) for key, f in found.items()} == {
        "hop": ("open", ["Intel (avx2)"]),
        "stall": ("MISSED", ["Intel (avx2)"]),
        "new": ("open", ["AMD EPYC (flags not recorded)"]),
    }
    keep("relay", [Figure("hop", "what", 1.1, 1.0, "more")], processor="Intel (avx2)")
    assert kept_on(tmp_path)["hop"]["verdict"] == "met"


def test_a_processor_is_its_model_name_and_what_tells_it_from_others_of_that_name() -> None:
    text = "processor : 0\nmodel name\t: Intel(R) Xeon(R) Processor\nflags\t\t: fpu avx2 avx512f avx512_bf16 sse2\n"
    assert processor(text) == "Intel(R) Xeon(R) Processor (avx2 avx512f avx512_bf16)"
    assert processor("") == "unknown (flags not recorded)"
