"""Set-up: the size is said before anything is installed, and what cannot work is refused before it is downloaded."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from deploy import downloads, setup_env
from deploy.downloads import Downloads, File
from deploy.setup_env import shared_environment

MIB = 1 << 20
CUDA = Downloads([File("torch", "2.13.0", False, 500 * MIB), File("nvidia-cublas", "13", False, 2000 * MIB)])
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What pip is told to install; it does not."""
    told: list[tuple[str, ...]] = []
    monkeypatch.setattr(setup_env, "pip", lambda *arguments: told.append(arguments))
    return told


def test_an_environment_without_cuda_refuses_a_torch_that_needs_it(
    installed: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(downloads, "resolve", lambda *_: CUDA)
    monkeypatch.setattr(setup_env.platform, "machine", lambda: "x86_64")
    with pytest.raises(SystemExit, match=f"Set LAMINAR_TORCH_INDEX={downloads.CPU_INDEX}"):
        setup_env._install(tmp_path, ("--requirement", "lock"), is_complete=False)
    assert not any("lock" in arguments for arguments in installed)


def test_a_disk_without_room_for_what_is_resolved_is_refused(
    installed: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(downloads, "resolve", lambda *_: CUDA)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 6 << 30))
    with pytest.raises(SystemExit, match="less than 8 GiB free"):
        setup_env._install(tmp_path, ("--requirement", "lock"), is_complete=True)
    assert not any("lock" in arguments for arguments in installed)


def test_the_size_is_said_before_pip_installs_what_was_resolved(
    installed: list[tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(downloads, "resolve", lambda *_: CUDA)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 1 << 40))
    setup_env._install(tmp_path, ("--requirement", "lock"), is_complete=True)
    assert "2.4 GiB to download" in capsys.readouterr().out
    assert installed[-1][-2:] == ("torch==2.13.0", "nvidia-cublas==13"), "what was resolved"


def test_without_sizes_pip_resolves_as_it_installs(
    installed: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(downloads, "resolve", lambda *_: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 1 << 40))
    setup_env._install(tmp_path, ("--requirement", "lock"), is_complete=True)
    assert installed[-1][-2:] == ("--requirement", "lock")


@pytest.mark.slow
def test_an_environment_is_made_from_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAMINAR_CACHE", str(tmp_path))
    lock = tmp_path / "small.lock"
    lock.write_text("iniconfig==2.3.1\n")
    made = shared_environment(lock, "small-")
    assert list(made.glob("lib/python*/site-packages/iniconfig"))
    told = capsys.readouterr().out
    assert "setup: installing 1 packages into" in told
    assert "to download" in told
    assert shared_environment(lock, "small-") == made
    assert capsys.readouterr().out == "", "the second time nothing is installed"
