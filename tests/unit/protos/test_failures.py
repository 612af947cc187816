"""Log lines that strangers can cause."""

from __future__ import annotations

import logging

import pytest

from protos.failures import RareLines


def test_few_lines_are_logged_and_the_next_period_says_how_many_were_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("protos.failures.time.monotonic", lambda: now)
    lines = RareLines(logging.getLogger("port"), 2)
    for number in range(5):
        lines.say(logging.WARNING, f"refused {number}")
    assert caplog.messages == ["refused 0", "refused 1"]
    now += RareLines.PERIOD_S
    lines.say(logging.WARNING, "refused 5")
    lines.say(logging.WARNING, "refused 6")
    assert caplog.messages[2:] == ["refused 5 (3 such lines were left out before it)", "refused 6"]
