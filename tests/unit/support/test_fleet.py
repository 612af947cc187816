"""The fleet of real processes that tests use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fleet import Fleet


@pytest.mark.slow
def test_a_start_that_fails_leaves_no_process_behind(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, num_engines=1, gateway_flags=("--no-such-flag",))
    with pytest.raises(AssertionError, match="no-such-flag"), fleet:
        pass
    assert [engine.process.poll() for engine in fleet.engines.values()] == [-9]
