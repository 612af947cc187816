"""A pytest plugin: runs start cheaper, `make quick` most of all, as each of its workers collects every test."""

from __future__ import annotations

import gc
import re
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

ALL_SLOW = re.compile(r"^pytestmark = (\[[^\]]*)?pytest\.mark\.slow\b", re.MULTILINE)


def examples(number: int) -> settings:
    """A property with another number of examples than 100; a profile that has fewer has the same share of these."""
    return settings(max_examples=max(1, number * settings.default.max_examples // 100))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file whose tests are all slow is not imported where none of them runs: many bring torch and transformers."""
    if config.option.markexpr != "not slow" or not collection_path.name.startswith("test_"):
        return None
    return True if ALL_SLOW.search(collection_path.read_text("utf-8")) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests live as long as the run: the collector need not look at them, then or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
