"""The table of what fired and what resolved it, at the end of a run."""

from __future__ import annotations

import pytest

TABLE = pytest.StashKey[list[str]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(TABLE, []):
        terminalreporter.write_line(line)
