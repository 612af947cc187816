"""The two releases that meet; the one before is built once for all tests."""

from __future__ import annotations

import pytest

from tests.support.releases import CHECKOUT, PREVIOUS, Release, previous_release


@pytest.fixture(scope="session", autouse=True)
def old(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """Made before the first test, so that no test's deadline pays for it."""
    found = previous_release(tmp_path_factory.mktemp(PREVIOUS))
    print(f"old is {PREVIOUS}, new is this checkout")
    return found


@pytest.fixture
def new() -> Release:
    return CHECKOUT


@pytest.fixture(params=["old first", "new first"])
def order(request: pytest.FixtureRequest, old: Release, new: Release) -> tuple[Release, Release]:
    """Both orders: an upgrade, and the way back."""
    return (old, new) if request.param == "old first" else (new, old)
