"""Imports without collection: none runs within, afterwards they run as before."""

from __future__ import annotations

import gc

import pytest

from protos.imports import uncollected


def test_nothing_is_collected_within_and_what_is_made_there_is_not_looked_at_later() -> None:
    passes = []
    gc.callbacks.append(lambda phase, info: passes.append(info["generation"]))
    try:
        frozen = gc.get_freeze_count()
        with uncollected():
            passes.clear()  # one may have run until here
            kept = [[] for _ in range(50_000)]  # more than make the collector run
            within = list(passes)
        assert not within
        assert gc.isenabled()
        assert gc.get_freeze_count() - frozen >= len(kept)
    finally:
        gc.callbacks.pop()
        gc.unfreeze()


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), uncollected():
        raise ImportError("no such package")
    assert gc.isenabled()
    gc.unfreeze()
