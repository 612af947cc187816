"""The learning benchmark in small, so that it cannot rot: real relays, gateway, engines and trainer, three steps."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.bench.learning import figures, plot
from tests.bench.learning.model import write_model
from tests.bench.learning.run import run
from tests.bench.learning.settings import Settings

pytestmark = pytest.mark.slow


def test_a_run_trains_versions_and_has_its_figures_and_plot(tmp_path: Path) -> None:
    """In a barrier, where agents, trainer and engines wait for each other most."""
    model = write_model(tmp_path / "model", steps=60)  # fewer earn no rewards: nothing to learn from
    settings = Settings("barrier", steps=3, groups=2, group_size=4, engines=2, slots=4, step_ms=0, eval_every=1)
    found = asyncio.run(run(settings, model, print))
    assert len(found["t"]) == 3
    assert found["t"] == sorted(found["t"])
    assert [step for step, _ in found["evaluated"]] == [0, 1, 2, 3]
    assert len({reward for _, reward in found["evaluated"]}) > 1, "no version differs from the first"
    assert found["counters"]["refreshes"] >= 2
    assert found["sessions"] >= 3 * settings.batch
    assert set(figures.staleness(found)) == {0}
    assert found["mixed"] == [0, 0, 0]
    assert found["loading_s"] > 0
    lines = figures.table(figures.summary([found]))
    assert any("barrier" in line for line in lines)
    assert all(file.stat().st_size > 1000 for file in plot.write([found], "a test", tmp_path / "curve"))
