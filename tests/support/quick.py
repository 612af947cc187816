"""A pytest plugin: runs start cheaper, `make quick` most of all, as each of its workers collects every test."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

QUICK = "not slow"
HEAVY = {"torch", "transformers"}
"""Packages that take seconds to import, in each worker."""
BEFORE = pytest.StashKey[set[str]]()
ALL_SLOW = re.compile(r"^pytestmark = (\[[^\]]*)?pytest\.mark\.slow\b", re.MULTILINE)


def examples(number: int) -> settings:
    """A property with another number of examples than 100; a profile that has fewer has the same share of these."""
    return settings(max_examples=max(1, number * settings.default.max_examples // 100))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file whose tests are all slow is not imported where none of them runs: many bring torch and transformers."""
    if config.option.markexpr != QUICK or not collection_path.name.startswith("test_"):
        return None
    return True if ALL_SLOW.search(collection_path.read_text("utf-8")) else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Notes what is imported before a test and its fixtures, for `pytest_runtest_teardown`."""
    item.stash[BEFORE] = HEAVY & sys.modules.keys()
    return (yield)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """In the quick part a test that has imported one of the heavy packages fails."""
    brought = (HEAVY & sys.modules.keys()) - item.stash[BEFORE]
    assert item.config.option.markexpr != QUICK or not brought, f"it imports {sorted(brought)}: mark it slow"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests live as long as the run: the collector need not look at them, then or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
