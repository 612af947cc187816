"""The table of modes."""

from __future__ import annotations

from typing import get_args

from gateway.core.fleet.config import Mode
from gateway.core.fleet.modes import MODES


def test_each_mode_has_its_class() -> None:
    assert set(MODES) == set(get_args(Mode))
    assert len({type(mode) for mode in MODES.values()}) == len(MODES)
    assert [name for name, mode in MODES.items() if mode.packs] == ["repack"]
    assert [name for name, mode in MODES.items() if mode.mixes] == ["inflight"]
