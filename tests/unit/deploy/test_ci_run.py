"""`.ci/run` with a `make` that only tells how it was called: nothing of the caller's is left, each failure counts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from deploy.setup_env import ROOT

MAKE = """#!/bin/bash
{ echo "make $*"; env; cat "$XDG_CONFIG_HOME/pip/pip.conf"; } >> "$(dirname "$0")/calls"
mkdir -p "$LAMINAR_CACHE" .venv && head -c 3000000 /dev/zero > "$LAMINAR_CACHE/left"
echo "made $*"
[[ $1 != demo && $1 != test-fleet ]]
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A clone's outline, a HOME with pip's file in it, and a `make` in front of the real one."""
    for name in ("bin", "clone/.ci", "clone/.venv", "home/.config/pip"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", tmp_path / "clone" / ".ci" / "run")
    subprocess.run(["git", "init", "--quiet", str(tmp_path / "clone")], check=True)
    (tmp_path / "home/.config/pip/pip.conf").write_text("[global]\nextra-index-url = https://index.example/simple\n")
    (tmp_path / "bin" / "make").write_text(MAKE)
    (tmp_path / "bin" / "make").chmod(0o755)
    return tmp_path


def run(checkout: Path, *stages: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": f"{checkout}/bin:{os.environ['PATH']}",
        "HOME": str(checkout / "home"),
        "LAMINAR_CACHE": str(checkout / "home"),
        "PYTHONPATH": "/somewhere",
        "PIP_INDEX_URL": "https://index.example/simple",
        "UV_INDEX": "https://index.example/simple",
    }
    command = [str(checkout / "clone" / ".ci" / "run"), *stages]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=180)


def test_a_stage_sees_nothing_of_the_caller_but_what_names_the_index(checkout: Path) -> None:
    done = run(checkout, "check")
    assert done.returncode == 0, done.stderr
    call, *rest = (checkout / "bin" / "calls").read_text().splitlines()
    assert call == "make check"
    told = dict(line.split("=", 1) for line in rest if "=" in line)
    assert told["CI"] == "true"
    assert told["PIP_INDEX_URL"] == told["UV_INDEX"] == "https://index.example/simple"
    assert "extra-index-url = https://index.example/simple" in rest
    assert "PYTHONPATH" not in told
    room = Path(told["HOME"]).parent
    places = ("HOME", "TMPDIR", "LAMINAR_CACHE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")
    assert all(Path(told[name]).parent == room for name in places)
    assert len(told["TMPDIR"]) <= 16, "Unix sockets' paths are limited"
    assert not room.exists()
    assert not (checkout / "clone" / ".venv").exists(), "it would lead into the room"


@pytest.mark.slow
def test_a_stage_that_fails_fails_the_run_and_stops_no_other(checkout: Path) -> None:
    done = run(checkout)
    assert done.returncode == 1
    calls = [line for line in (checkout / "bin" / "calls").read_text().splitlines() if line.startswith("make ")]
    assert calls[:3] == ["make system-packages", "make demo", "make test"], "as README has it"
    stages = re.findall(r'^  \[\S+\]="(make .*)"$', (checkout / "clone" / ".ci" / "run").read_text(), re.MULTILINE)
    in_room = [stage.replace("${LAMINAR_CI_ROOM:-.}", "ROOM") for stage in stages]
    assert sorted(re.sub(r"/tmp/ci\.\w+", "ROOM", call) for call in calls) == sorted(in_room), "each once"
    assert "make test-faults" in calls, "`make test` leaves these out"
    assert all(f"\nmade {call.removeprefix('make ')}\n" in done.stdout for call in calls), "what each printed"
    assert "the end of what failed: make test-fleet\nmade test-fleet\n" in done.stdout
    summary = done.stdout.splitlines()[-1]
    assert re.search(r" \| test-fleet \d+:\d\d FAILED \|", summary)
    assert re.match(r"ci: FAILED in \d+:\d\d \| system-packages \d+:\d\d \| demo \d+:\d\d FAILED \| test \d", summary)
    assert re.search(r"download.*, 3 MiB on disk$", summary)


def test_the_last_line_is_there_when_nothing_could_be_made(checkout: Path) -> None:
    (checkout / "bin" / "make").write_text("#!/bin/bash\nexit 2\n")
    done = run(checkout, "check")
    assert done.returncode == 1
    summary = done.stdout.splitlines()[-1]
    assert re.match(r"ci: FAILED in \d+:\d\d \| check \d+:\d\d FAILED \| .*, 0 MiB on disk$", summary)


def test_an_unknown_stage_is_refused_before_anything_runs(checkout: Path) -> None:
    done = run(checkout, "check", "nonsense")
    assert done.returncode == 2
    assert "no stage nonsense; there are: " in done.stderr
    assert not (checkout / "bin" / "calls").exists()
