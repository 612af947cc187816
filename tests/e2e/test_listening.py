"""No daemon listens off loopback before its operator has said who may use it; what takes no credentials says so."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import gateway.cli
import paramserver.cli
import trainer_client.integrations.prime_rl
from tests.support.relays import Relays
from tests.support.words import tokenizer

ELSEWHERE = ("0.0.0.0", "::", "192.0.2.1", "engines-0")


def commands(directory: Path) -> dict[str, tuple[click.Command, list[str], str]]:
    """Each daemon's command, its other options, and which of its options mend a refusal."""
    pool = directory / "pool"
    model = tokenizer(directory / "model")
    return {
        "gateway serve": (
            gateway.cli.cli,
            ["serve", "--model=m", f"--tokenizer={model}", "--port=0"],
            "--api-keys FILE",
        ),
        "gateway engine": (
            gateway.cli.cli,
            ["engine", f"--model={model}"],
            "in a closed network alone: its routes load",
        ),
        "paramserver serve": (
            paramserver.cli.cli,
            ["serve", "--name=r", "--advertise=127.0.0.1", f"--pool-dir={pool}"],
            "give --credentials DIR, which `paramserver credentials init` makes, or --insecure in a closed network",
        ),
        "the prime-rl server": (
            trainer_client.integrations.prime_rl.main,
            ["--relay=127.0.0.1:1", "--port=0"],
            "in a closed network alone: it publishes",
        ),
    }


@pytest.mark.parametrize("host", ELSEWHERE)
@pytest.mark.parametrize("daemon", ["gateway serve", "gateway engine", "paramserver serve", "the prime-rl server"])
def test_a_daemon_off_loopback_refuses_to_start_and_says_what_mends_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], daemon: str, host: str
) -> None:
    command, options, mend = commands(tmp_path)[daemon]
    ended = CliRunner().invoke(command, [*options, f"--host={host}"])
    assert ended.exit_code != 0
    said = " ".join((ended.output, str(ended.exception), capfd.readouterr().err))
    assert f"{daemon} on {host} would serve whoever reaches it, without credentials" in said, said
    assert mend in said, said
    assert "--insecure" in said
    assert not (tmp_path / "pool").exists(), "nothing was begun"
    assert not (tmp_path / "pool.etcd").exists()


def test_the_port_for_bytes_is_a_port_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paramserver.daemon.process.address_of", lambda interface: "10.0.0.1")
    command, options, mend = commands(tmp_path)["paramserver serve"]
    ended = CliRunner().invoke(command, [*options, "--bind-interface=eth1"])
    assert (ended.exit_code, mend in ended.output) == (1, True), ended.output
    assert "paramserver serve on 10.0.0.1" in ended.output


def test_an_insecure_engine_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def served(*_: Any) -> None:
        return None

    monkeypatch.setattr("gateway.engines.embedded.cli._serve", served)
    monkeypatch.setattr("gateway.engines.embedded.cli.setup_logging", lambda *_, **__: None)
    command, options, _ = commands(tmp_path)["gateway engine"]
    for flags, warnings in ((["--host=0.0.0.0", "--insecure"], 1), ([], 0)):
        caplog.clear()
        assert CliRunner().invoke(command, [*options, *flags]).exit_code == 0
        said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len([line for line in said if "--insecure: gateway engine on 0.0.0.0" in line]) == warnings


@pytest.mark.slow
def test_an_insecure_relay_says_so_at_its_start_and_in_its_status(relays: Relays) -> None:
    daemon = relays.start("a", "--host", "0.0.0.0", "--advertise", "127.0.0.1", "--insecure")
    assert "WARNING" in daemon.log()
    assert "--insecure: paramserver serve on 0.0.0.0 takes no credentials" in daemon.log()
    shown = CliRunner().invoke(paramserver.cli.cli, ["status", "--relay", daemon.ready["grpc"]])
    assert "INSECURE: its ports take no credentials" in shown.output, shown.output
    told = CliRunner().invoke(paramserver.cli.cli, ["status", "--relay", daemon.ready["grpc"], "--json"])
    assert json.loads(told.output)["insecure"] is True
    near = relays.start("b")
    told = CliRunner().invoke(paramserver.cli.cli, ["status", "--relay", near.ready["grpc"], "--json"])
    assert json.loads(told.output)["insecure"] is False
    assert "--insecure" not in near.log()
