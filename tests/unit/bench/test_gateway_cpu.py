"""The rows of the gateway's cost a token and an event: their events' size, and the older definition beside them."""

from __future__ import annotations

import pytest

from tests.bench.gateway import cpu
from tests.bench.gateway.load import Cost

COSTS = {
    "sglang": [Cost(0.2, 10_000, 10_000, 10_000)] * 3,
    "vllm": [Cost(0.4, 10_000, 10_000, 10_000)] * 3,
    "laminar": [Cost(0.05, 10_000, 500, 250), Cost(0.03, 10_000, 400, 400), Cost(0.06, 10_000, 500, 500)],
}
FAILED = dict.fromkeys(COSTS, 0)


def test_an_events_size_is_told_as_sent_and_as_received() -> None:
    assert cpu.events_size(COSTS)["laminar"] == {"sent": 20.0, "received": 25.0}
    assert cpu.events_size(COSTS)["vllm"] == {"sent": 1.0, "received": 1.0}


def test_a_rounds_ratio_is_ours_over_the_better_routers() -> None:
    us = {name: [cost.us for cost in rounds] for name, rounds in COSTS.items()}
    assert cpu.over_better(us, "laminar") == pytest.approx([0.25, 0.15, 0.3])


@pytest.mark.parametrize("rows", [cpu.EVENT_ROWS, cpu.TOKEN_ROWS])
def test_there_is_a_row_for_each_speed(rows: tuple[cpu.Row, ...]) -> None:
    assert [row.tokens_s for row in rows] == [8, 50, 200]


@pytest.mark.parametrize("row", cpu.TOKEN_ROWS)
def test_each_row_of_a_token_has_the_bar_and_the_events_size(row: cpu.Row) -> None:
    figure, *_ = cpu.token_figures(row, COSTS, FAILED)
    assert (figure.key, figure.value, figure.bar) == (f"cpu_per_token_{row.tokens_s:g}_vs_rust", 0.25, 0.25)
    assert figure.note == "tokens per event: 20"


@pytest.mark.parametrize("row", cpu.EVENT_ROWS)
def test_each_row_of_an_event_has_its_bar(row: cpu.Row) -> None:
    figure, *_ = cpu.event_figures(row, COSTS, FAILED)
    assert (figure.key, figure.bar) == (f"cpu_per_event_{row.tokens_s:g}_vs_rust", 2.5)


def test_the_older_definitions_are_told_as_such_beside_the_same_rounds() -> None:
    tokens = [figure for row in cpu.TOKEN_ROWS for figure in cpu.token_figures(row, COSTS, FAILED)[1:]]
    events = [figure for row in cpu.EVENT_ROWS for figure in cpu.event_figures(row, COSTS, FAILED)[1:]]
    assert {figure.key: figure.bar for figure in (*tokens, *events)} == {
        "cpu_per_token_slow_vs_rust": None,
        "cpu_per_token_vs_rust": 0.25,
        "cpu_per_event_vs_rust": 2.5,
    }
    assert all(figure.what.startswith("old definition") for figure in (*tokens, *events))
    assert all(figure.value == 0.25 for figure in (*tokens, *events))
