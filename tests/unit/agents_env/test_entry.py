"""`agents-env` of an installation without the extra `envs`."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

WITHOUT = "import sys; sys.modules[{name!r}] = None; from agents_env.entry import main; main()"


def started_without(name: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT.format(name=name), "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_what_is_not_installed_is_named_with_the_extra_that_brings_it() -> None:
    done = started_without("openai")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"Error: not installed: openai; \S+ -m pip install '.*\[envs\]'\n", done.stderr), done.stderr


def test_a_module_of_its_own_that_is_missing_is_no_matter_of_extras() -> None:
    assert "Traceback" in started_without("agents_env.options").stderr
