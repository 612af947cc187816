"""Skipped tests, named at the end of every run: each reason once, with the command that mends it.

A reason is written with `needs(what is missing, what mends it)`. With `CI=true` a skip that `tests/ci_skips.toml` does
not list fails the run: a machine that lacks something must not look like one that passes. A plugin of its own, as it
runs where the reports of all xdist's workers arrive.
"""

from __future__ import annotations

import functools
import os
import subprocess
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

LIST = Path(__file__).parents[1] / "ci_skips.toml"
NODES_SHOWN = 3
_MENDS = " [mended by: "


def needs(missing: str, mend: str) -> str:
    """A reason to skip: what is missing, and the command or step that mends it."""
    return f"{missing}{_MENDS}{mend}]"


def cannot_mount() -> str:
    """Why a test cannot mount file systems or make network namespaces here; "" when it can."""
    if os.geteuid() != 0:
        return needs("mounting and network namespaces need root", "run the same as root, e.g. `sudo make test`")
    return _denied()


@functools.cache
def _denied() -> str:
    probe = subprocess.run(["unshare", "--mount", "--net", "true"], capture_output=True, text=True, check=False)
    if probe.returncode == 0:
        return ""
    return needs(f"this container may not make namespaces ({probe.stderr.strip()})", "start it with --privileged")


@dataclass(frozen=True, slots=True)
class Skip:
    """One test, or one file, that was skipped."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class Allowed:
    """Tests (a pattern of node ids) that may be skipped with `CI=true`, and why."""

    tests: str
    why: str

    def covers(self, skip: Skip) -> bool:
        return fnmatchcase(skip.node, self.tests)


def allowed(path: Path = LIST) -> list[Allowed]:
    return [Allowed(**row) for row in tomllib.loads(path.read_text()).get("skip", [])]


def unlisted(skips: Iterable[Skip], listed: Sequence[Allowed]) -> list[Skip]:
    return [skip for skip in skips if not any(row.covers(skip) for row in listed)]


def lines(skips: Iterable[Skip]) -> list[str]:
    """What to print: reasons by number of tests, each with its mend and the first of its tests."""
    by_reason: dict[str, list[str]] = {}
    for skip in skips:
        by_reason.setdefault(skip.reason, []).append(skip.node)
    return [line for reason, nodes in _largest_first(by_reason) for line in _group(reason, nodes)]


def _largest_first(by_reason: Mapping[str, list[str]]) -> list[tuple[str, list[str]]]:
    return sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0]))


def _group(reason: str, nodes: Sequence[str]) -> list[str]:
    missing, _, mend = reason.removesuffix("]").partition(_MENDS) if _MENDS in reason else (reason, "", "")
    more = f" and {len(nodes) - NODES_SHOWN} more" if len(nodes) > NODES_SHOWN else ""
    return [
        f"{len(nodes)} skipped: {missing}",
        f"    mend: {mend or 'not known; write its reason with tests.support.skips.needs'}",
        f"    tests: {', '.join(sorted(nodes)[:NODES_SHOWN])}{more}",
    ]


class SkipReport:
    """Collects the skips of a run, prints them at its end, and fails it where they are not allowed."""

    def __init__(self, in_ci: bool) -> None:
        self._in_ci = in_ci
        self._skips: dict[str, Skip] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._take(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._take(report)

    def _take(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        self._skips[report.nodeid] = Skip(report.nodeid, reason.removeprefix("Skipped: "))

    def _refused(self) -> list[Skip]:
        return unlisted(self._skips.values(), allowed()) if self._in_ci else []

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Runs before the closing lines are printed, so that these and the exit status agree."""
        if self._refused() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._skips:
            return
        terminalreporter.section("skipped, and what mends it")
        for line in lines(self._skips.values()):
            terminalreporter.write_line(line)
        if refused := self._refused():
            terminalreporter.section("FAILED: skips that tests/ci_skips.toml does not list (CI=true)", red=True)
            for line in lines(refused):
                terminalreporter.write_line(line, red=True)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # xdist's workers send their reports to the one that prints
        config.pluginmanager.register(SkipReport(os.environ.get("CI") == "true"), "laminar-skips")
