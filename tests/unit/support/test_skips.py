"""The report of skips: each reason once with its mend, with xdist and without; unlisted ones fail where CI=true."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.setup_env import ROOT
from tests.support.skips import LIST, Allowed, Skip, allowed, lines, needs, unlisted

pytestmark = pytest.mark.slow  # each runs pytest in a process of its own

SUITE = """
import pytest
from tests.support.skips import needs

@pytest.mark.parametrize("n", range(5))
def test_wants_a_tool(n):
    pytest.skip(needs("no such tool", "`make system-packages`"))

@pytest.mark.skipif(True, reason="for no reason")
def test_marked(): pass

def test_passes(): pass
"""
MODULE = """
import pytest
pytest.importorskip("a_module_that_nobody_has")
"""


def run(directory: Path, *arguments: str, ci: str | None) -> subprocess.CompletedProcess[str]:
    """A suite of its own, under this project's plugin."""
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "PYTEST_ADDOPTS")}
    environment |= {"PYTHONPATH": str(ROOT)} | ({"CI": ci} if ci else {})
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.skips", "--rootdir", str(directory), *arguments]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "test_some.py").write_text(SUITE)
    return tmp_path


@pytest.mark.parametrize("workers", ["0", "2"])
def test_every_skip_is_named_with_its_reason_and_its_mend(suite: Path, workers: str) -> None:
    (suite / "test_module.py").write_text(MODULE)
    done = run(suite, "-n", workers, ci=None)
    assert done.returncode == 0
    told = done.stdout
    assert "5 skipped: no such tool\n    mend: `make system-packages`\n" in told
    assert "test_some.py::test_wants_a_tool[0], " in told
    assert "and 2 more" in told
    assert "1 skipped: for no reason\n    mend: not known" in told
    assert re.search(r"1 skipped: could not import 'a_module_that_nobody_has'", told)
    assert re.search(r"=+ 1 passed, 7 skipped in .*=+\n$", told), "pytest's own last line stays the last"


@pytest.mark.parametrize("workers", ["0", "2"])
def test_an_unlisted_skip_fails_where_ci_is_true(suite: Path, workers: str) -> None:
    done = run(suite, "-n", workers, ci="true")
    assert done.returncode == 1
    assert "FAILED: skips that tests/ci_skips.toml does not list" in done.stdout


def test_without_skips_there_is_no_word_and_no_failure(suite: Path) -> None:
    done = run(suite, "-k", "passes", ci="true")
    assert done.returncode == 0
    assert "mend" not in done.stdout


def test_what_is_listed_is_allowed() -> None:
    listed = [Allowed("tests/e2e/test_x.py::*", "why")]
    skips = [Skip("tests/e2e/test_x.py::test_a[1]", "r"), Skip("tests/e2e/test_y.py::test_a", "r")]
    assert unlisted(skips, listed) == skips[1:]


def test_the_list_names_tests_that_there_are_and_why() -> None:
    for row in allowed(LIST):
        assert list(ROOT.glob(row.tests.partition("::")[0])), f"{LIST.name} lists {row.tests}: there is no such file"
        assert len(row.why) > 20


def test_the_most_frequent_reason_comes_first() -> None:
    told = lines([Skip("a", "rare"), Skip("b", needs("often", "x")), Skip("c", needs("often", "x"))])
    assert told[0] == "2 skipped: often"
