"""`make test-integrations` knows every suite that has an environment of its own, and reports each one's outcome."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.setup_env import ROOT
from deploy.side_envs import SIDE_ENVIRONMENTS
from tests.integrations import INTEGRATIONS, Integration, Result, counted, parsed, run, table

MAKEFILE = (ROOT / "Makefile").read_text()
OWN = [integration for integration in INTEGRATIONS if integration.environment]


def test_every_suite_that_make_test_leaves_out_is_an_integration() -> None:
    [line] = [line for line in MAKEFILE.splitlines() if '"not long' in line]
    assert set(re.findall(r"--ignore=tests/([\w-]+)", line)) == {integration.name for integration in OWN}


@pytest.mark.parametrize("integration", INTEGRATIONS, ids=lambda one: one.name)
def test_what_an_integration_names_is_there(integration: Integration) -> None:
    assert re.search(rf"^{integration.target}: env", MAKEFILE, re.M)
    assert all((ROOT / path).exists() for path in integration.tests if path.startswith("tests/"))
    if integration.environment:
        assert SIDE_ENVIRONMENTS[integration.environment].lock.exists()


def test_some_are_run_by_name_and_a_wrong_name_is_answered_with_the_right_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert [one.name for one in parsed(["verl", "trl"])] == ["verl", "trl"]
    assert parsed([]) == list(INTEGRATIONS)
    with pytest.raises(SystemExit):
        parsed(["tlr"])
    assert "there are: openai" in capsys.readouterr().err


def test_the_table_says_what_passed_what_failed_and_how_long_it_took() -> None:
    done = Result(INTEGRATIONS[0], passed=True, num_tests=7, num_skipped=1, setup_s=0.2, run_s=65.0)
    broken = Result(OWN[-1], passed=False, num_tests=None, num_skipped=0, setup_s=125.0, run_s=0.0)
    head, first, second = table([done, broken]).splitlines()
    assert head.split()[:3] == ["integration", "environment", "outcome"]
    assert first.split() == ["openai", ".venv", "passed", "7", "1", "0:00", "1:05", "yes"]
    assert second.split() == ["vllm", "vllm", "FAILED", "none", "0", "2:05", "0:00", "yes"]


@pytest.mark.slow
def test_an_integration_that_fails_is_counted_and_reported(tmp_path: Path) -> None:
    suite = tmp_path / "test_one.py"
    suite.write_text(
        "import pytest\n"
        "def test_right(): pass\n"
        "def test_wrong(): assert False\n"
        "@pytest.mark.skip(reason='no')\n"
        "def test_left_out(): pass\n"
    )
    result = run(Integration("one", "", (str(suite), "-c", "/dev/null", "-p", "no:cacheprovider"), "", "test"))
    assert (result.passed, result.num_tests, result.num_skipped) == (False, 2, 1)


def test_a_pytest_that_does_not_start_has_no_count(tmp_path: Path) -> None:
    assert counted(tmp_path / "none.xml") == (None, 0)


def test_help_names_them_all() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations", "--help"], capture_output=True, text=True, cwd=ROOT
    )
    assert all(f"  {integration.name} " in done.stdout for integration in INTEGRATIONS)
