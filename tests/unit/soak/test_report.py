"""What fails a run: anything lost or doubled, growth beyond the bound of its kind, and a run that did nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.soak.report import BOUNDS, FIGURES, OF_KINDS, line, reasons

pytestmark = pytest.mark.slow  # torch, by way of the judge of answers


def figures(**changes: Any) -> dict[str, Any]:
    growth = {kind: dict.fromkeys(BOUNDS, 0.0) for kind in ("engine", "relay", "trainer")}
    usual = {"hours": 2.0, "sessions": 9, "turns": 20, "tokens": 99, "versions": 3, "kills": 4, "outstanding": 0}
    return {
        **usual,
        **dict.fromkeys(FIGURES, 0.0),
        "failures": {},
        "faults": {"kill relay": 4},
        "growth": growth,
        **changes,
    }


def test_a_run_without_a_finding_passes() -> None:
    assert reasons(figures()) == []
    assert "nothing lost or doubled" in line(figures())


def test_anything_lost_fails_it() -> None:
    assert reasons(figures(failures={"turn lost": 2})) == ["2 x turn lost"]
    assert "2 turn lost" in line(figures(failures={"turn lost": 2}))


def test_growth_fails_it_beyond_the_bound_of_its_kind() -> None:
    engine, relay = OF_KINDS["engine", "rss_mb"].allowed(2.0), BOUNDS["rss_mb"].allowed(2.0)
    assert engine > relay
    found = figures()
    found["growth"]["engine"]["rss_mb"] = engine
    found["growth"]["relay"]["rss_mb"] = relay + 1
    found["growth"]["relay"]["fds"] = None
    [reason] = reasons(found)
    assert reason.startswith("rss_mb of relay grew by 25.0, and 24.0 is allowed")


def test_a_run_in_which_no_session_finished_fails() -> None:
    assert reasons(figures(sessions=0)) == ["no session was finished"]
