"""The table of engine kinds."""

from __future__ import annotations

from gateway.engines.kinds import ADAPTERS
from protos.engines import ENGINE_KINDS


def test_every_kind_that_may_be_named_has_an_adapter() -> None:
    assert list(ADAPTERS) == list(ENGINE_KINDS)
