"""docs/reference/attacks.md: every attempt gets what the page says, and none of them succeeds."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.attacks.attempts import GROUPS
from tests.attacks.table import PAGE, page, scene, table

HARMLESS = {"name another method in a header, where GET needs no key: it counts for nothing"}
"""It is answered as if the header were not there."""


async def test_every_attempt_is_refused_as_the_page_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    answers = await table(tmp_path)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    succeeded = [
        attempt.what for rows in answers.values() for attempt, answer in rows if answer.startswith(("1", "2", "3", "5"))
    ]
    assert set(succeeded) <= HARMLESS, succeeded
    assert page(answers) == PAGE.read_text(), "`python -m tests.attacks` writes the page"


async def test_nothing_has_changed_after_them(tmp_path: Path) -> None:
    async with scene(tmp_path) as found:
        for attempts in GROUPS.values():
            for attempt in attempts:
                if attempt.raw is None:
                    await found.answer(attempt)
        report = found.gateway.status.report()
        assert [engine.name for engine in report.engines] == ["e0"]
        assert report.sessions.live == 3, "mine, theirs, and the group's"
        assert report.counters.turns_started == 1
