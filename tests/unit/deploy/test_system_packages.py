"""The packages of the host: only those that are lacking, and a clear word where they cannot be installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import system_packages
from deploy.setup_env import ROOT
from deploy.system_packages import SystemPackage, apt_lines, lacking, refusal

THERE = SystemPackage("coreutils", "everything", lambda: True)
ABSENT = SystemPackage("unheard-of", "nothing", lambda: False)


def test_only_what_this_machine_lacks_is_asked_for():
    assert lacking([THERE, ABSENT]) == [ABSENT]
    assert apt_lines(["unheard-of"])[-1] == ["apt-get", "install", "--yes", "--no-install-recommends", "unheard-of"]


@pytest.mark.parametrize("sudo", [True, False])
def test_a_user_without_root_is_given_the_line_with_sudo_where_there_is_one(monkeypatch, sudo):
    monkeypatch.setattr(system_packages, "_has_command", lambda name: sudo)
    told = refusal(["iptables"], True, is_root=False)
    assert "apt-get install --yes --no-install-recommends iptables" in told
    assert ("sudo" in told) is sudo
    assert refusal(["iptables"], True, is_root=True) == ""


def test_a_system_without_apt_is_given_the_names():
    told = refusal(["iptables", "iproute2"], has_apt=False, is_root=True)
    assert "iptables, iproute2" in told
    assert "apt-get here" in told


def test_nothing_is_run_where_nothing_is_lacking(monkeypatch, capsys):
    monkeypatch.setattr(system_packages, "ALL", (THERE,))
    monkeypatch.setattr(system_packages.lacking, "__defaults__", ((THERE,),))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a command was run"))
    assert system_packages.main() == 0
    assert "nothing to install" in capsys.readouterr().out


def test_each_package_is_named_where_contributors_read_of_them():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert [package.name for package in system_packages.ALL if package.name not in text] == []


def test_it_runs_with_the_standard_library_alone():
    """It is called on a bare machine, before `.venv` is there."""
    code = "import deploy.system_packages as s; s.lacking(); print('click' in sys.modules or 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"]},
        cwd=Path("/"),
    )
    assert done.stdout.strip() == "False"
