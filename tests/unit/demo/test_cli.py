"""The command line, its preparations, and the commands it would run."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from click.testing import CliRunner

from deploy.demo import cli
from deploy.demo.plan import ENGINES, RELAYS, Plan, Settings, settle
from deploy.demo.processes import Command, DemoError
from deploy.demo.speed import measure_speed
from gateway.core.dtypes import Choice, Dtype, Figure
from tests.support.tiny_model import tiny_model

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


@pytest.mark.parametrize(("kib", "told"), [(64 << 20, ""), (3 << 20, "3.0 GiB of memory are available"), (None, "")])
def test_too_little_memory_is_told_beforehand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kib: int | None, told: str
) -> None:
    meminfo = tmp_path / "meminfo"
    line = "" if kib is None else f"MemAvailable:   {kib} kB\n"
    meminfo.write_text(f"MemTotal:       99999999 kB\n{line}SwapTotal:             0 kB\n")
    cli.warn_of_memory(settings(tmp_path), meminfo)
    said = capsys.readouterr().err
    assert told in said
    assert bool(said) == bool(told)


@pytest.mark.parametrize(("variable", "expected"), [("DISPLAY", True), ("WAYLAND_DISPLAY", True), ("OTHER", False)])
def test_a_browser_is_opened_only_where_somebody_sees_it(
    variable: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, ":0")
    assert cli.has_screen() is expected


def test_a_larger_model_gets_larger_pools(tmp_path: Path) -> None:
    assert cli.pool_bytes(tmp_path) == settings(tmp_path).pool_bytes
    for part in (1, 2):
        with (tmp_path / f"model-{part}.safetensors").open("wb") as file:
            file.truncate(256 << 20)  # sparse
    assert cli.pool_bytes(tmp_path) == (4 * 512 + 128) << 20


def test_help_teaches_and_wrong_usage_is_2() -> None:
    told = CliRunner().invoke(cli.main, ["--help"])
    assert told.exit_code == 0
    assert "kills one engine on purpose" in " ".join(told.output.split())
    for words in ("--model", "--dtype", "--budget-s", "measures for a second"):
        assert words in " ".join(told.output.split())
    assert CliRunner().invoke(cli.main, ["--steps", "0"]).exit_code == 2
    assert CliRunner().invoke(cli.main, ["--model", "/no/such/directory"]).exit_code == 2


def measured(dtype: Dtype, threads: int) -> Choice:
    figures = [Figure(dtype=d, threads=1, decode=1, prefill=1, train=100.04) for d in ("float32", "bfloat16")]  # type: ignore[arg-type]
    more = Figure(dtype=dtype, threads=2, decode=1, prefill=1, train=180.0)
    return Choice(dtype=dtype, threads=threads, reason="so it was measured", figures=(*figures, more))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trainer_and_engines_get_the_same_dtype(tmp_path: Path, dtype: Dtype) -> None:
    plan = Plan(settle(settings(tmp_path), measured(dtype, 2), cores=2))
    commands = [plan.trainer("r", "g"), *(plan.engine(name) for name in ENGINES)]
    assert [option(command, "--dtype") for command in commands] == [[dtype]] * 4
    assert [option(command, "--threads") for command in commands] == [["2"], ["1"], ["1"], ["1"]]
    assert option(commands[0], "--tokens-per-s") == ["180.0"]
    assert option(commands[0], "--budget-s") == ["240.0"]


@pytest.mark.parametrize(("cores", "threads"), [(2, 1), (7, 1), (8, 2)])
def test_engines_get_more_threads_only_where_everybody_has_cores(tmp_path: Path, cores: int, threads: int) -> None:
    assert settle(settings(tmp_path), measured("float32", 2), cores=cores).engine_threads == threads
    assert settle(settings(tmp_path), measured("float32", 1), cores=cores).engine_threads == 1


def test_another_dtype_may_be_asked_for(tmp_path: Path) -> None:
    asked = settle(settings(tmp_path), measured("float32", 2), cores=2, dtype="bfloat16")
    assert (asked.dtype, asked.trainer_threads, asked.train_tokens_per_s) == ("bfloat16", 1, 100.0)
    assert settle(settings(tmp_path), measured("float32", 2), cores=2, dtype="float32").trainer_threads == 2


def test_what_was_chosen_is_said_with_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "measure_speed", lambda *_: measured("float32", 2))
    assert cli.fit_processor(settings(tmp_path), None).dtype == "float32"
    told = capsys.readouterr().out
    assert "so it was measured: trainer and engines compute in float32, the trainer with 2 threads" in told
    assert told.count("tokens/s") == 1
    assert told.count("float32") >= 3


@pytest.mark.slow
def test_the_processor_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    choice = measure_speed(tiny_model("llama", "bfloat16"), cli.ROOT, cli.CHILD_ENV)
    assert choice.chosen in choice.figures
    with pytest.raises(DemoError, match="could not be measured: gateway engine-dtype"):
        measure_speed(tmp_path, cli.ROOT, cli.CHILD_ENV)


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
