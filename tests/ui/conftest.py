"""A tab of a real browser for each test. What its scripts complained of fails the test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.browser import Page, browser, lacking


@pytest_asyncio.fixture
async def tab() -> AsyncIterator[Page]:
    if reason := lacking():
        pytest.skip(reason)
    async with browser() as chromium:
        page = await chromium.page()
        yield page
        assert page.complaints == []
