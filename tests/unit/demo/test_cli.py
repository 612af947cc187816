"""The command line, its preparations, and the commands it would run."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from click.testing import CliRunner

from deploy.demo import cli
from deploy.demo.plan import ENGINES, RELAYS, Plan, Settings
from deploy.demo.processes import Command, DemoError

Usage = namedtuple("Usage", "total used free")


def settings(directory: Path) -> Settings:
    return Settings(
        model_dir=directory / "model",
        report_dir=directory / "report",
        data_dir=directory / "data",
        pool_dir=directory / "pools",
        seed=7,
    )


def option(command: Command, name: str) -> list[str]:
    return [value for flag, value in zip(command.argv, command.argv[1:], strict=False) if flag == name]


def test_only_what_an_earlier_run_left_is_replaced(tmp_path: Path) -> None:
    made = settings(tmp_path)
    made.logs.mkdir(parents=True)
    for name in ("report.html", "logs/old.log", "mine.txt"):
        (made.report_dir / name).write_text("x")
    cli.prepare_report(made)
    assert sorted(path.name for path in made.report_dir.rglob("*")) == ["logs", "mine.txt"]


def test_scratch_directories_are_gone_afterwards() -> None:
    with cli.scratch_directories() as scratch:
        assert scratch.data.is_dir()
        assert scratch.pools.parent == cli.SHARED_MEMORY
    assert not scratch.data.exists()
    assert not scratch.pools.exists()


def test_too_little_shared_memory_is_told_with_the_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(64 << 20, 0, 64 << 20))
    with pytest.raises(DemoError, match=r"has 64 MiB free, and the relays' pools need 3456 MiB .*--shm-size"):
        cli.check_memory(settings(tmp_path))


@pytest.mark.parametrize(("variable", "expected"), [("DISPLAY", True), ("WAYLAND_DISPLAY", True), ("OTHER", False)])
def test_a_browser_is_opened_only_where_somebody_sees_it(
    variable: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, ":0")
    assert cli.has_screen() is expected


def test_help_teaches_and_wrong_usage_is_2() -> None:
    told = CliRunner().invoke(cli.main, ["--help"])
    assert told.exit_code == 0
    assert "kills one engine on purpose" in " ".join(told.output.split())
    assert CliRunner().invoke(cli.main, ["--steps", "0"]).exit_code == 2


def test_each_engine_loads_from_its_own_relay(tmp_path: Path) -> None:
    engines = {name: f"http://127.0.0.1:{9000 + i}" for i, name in enumerate(ENGINES)}
    command = Plan(settings(tmp_path)).gateway(engines, ["h:1", "h:2", "h:3"])
    assert option(command, "--engine") == [f"engine-{i}=vllm=http://127.0.0.1:{8999 + i}@h:{i}" for i in (1, 2, 3)]


def test_only_the_first_relay_takes_versions(tmp_path: Path) -> None:
    commands = [Plan(settings(tmp_path)).relay(name, "e:1") for name in RELAYS]
    assert ["--publish-host" in command.argv for command in commands] == [True, False, False]
    assert len({option(command, "--pool-dir")[0] for command in commands}) == 3


def test_an_engine_comes_back_to_its_address(tmp_path: Path) -> None:
    plan = Plan(settings(tmp_path))
    assert option(plan.engine("engine-1"), "--port") == ["0"]
    assert option(plan.engine("engine-1", 4321), "--port") == ["4321"]


def test_only_the_trainer_ends_by_itself(tmp_path: Path) -> None:
    plan = Plan(settings(tmp_path))
    commands = [plan.etcd(), plan.engine("engine-1"), plan.trainer("r", "g"), plan.runner("tool-chain", "g")]
    assert [command.name for command in commands if command.ends_by_itself] == ["trainer"]
    assert option(commands[2], "--seed") == option(commands[3], "--seed") == ["7"]
