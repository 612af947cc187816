"""The units of `deploy/systemd`: the daemons take their command lines, and a stop lasts as long as a drain may."""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import click
import pytest

from deploy.setup_env import ROOT
from gateway.app import DRAIN_TIMEOUT_S
from gateway.engines.embedded.cli import SHUTDOWN_TIMEOUT_S
from paramserver.config import EngineBeside
from paramserver.daemon.process import DRAIN_S
from protos.access.credentials import CREDENTIALS_VARIABLE
from protos.access.fleet import FLEET_ROLES
from protos.access.secret_file import FORBIDDEN
from protos.errors import InvalidRequest
from protos.options import parse_bytes
from tests.support.skips import needs
from tests.unit.deploy.command_lines import check, env_file, words

FOLDER = ROOT / "deploy/systemd"
SERVICES = ("laminar-relay", "laminar-gateway", "laminar-engine")
BINARIES = "/opt/laminar/bin"
ACCESS = {
    "laminar-relay": "",
    "laminar-gateway": "--api-keys /etc/laminar/keys",
    "laminar-engine": "",
}
"""The last words of each command line."""
CREDENTIALS = {"laminar-relay": "/etc/laminar/relay", "laminar-gateway": "/etc/laminar/gateway"}
"""Directories, in the environment of the daemon and of what runs beside it."""
EXPOSURE_MAX = {"laminar-relay": 20, "laminar-gateway": 20, "laminar-engine": 50}
"""Of `systemd-analyze security`, in tenths: an engine needs devices."""


def unit(name: str) -> Mapping[str, list[str]]:
    """A unit's keys, each with its values; continued lines are joined."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in (FOLDER / name).read_text().replace("\\\n", " ").splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            found[key].append(value)
    return found


def environment(service: str) -> dict[str, str]:
    [path] = unit(f"{service}.service")["EnvironmentFile"]
    assert path.startswith("/etc/laminar/")
    return env_file(FOLDER / Path(path).name)


def command_lines(service: str) -> list[list[str]]:
    """Of the daemon and of the commands beside it, as systemd would run them."""
    keys = unit(f"{service}.service")
    shown = [line.replace("%H", "engines-0") for key in ("ExecStart", "ExecStop") for line in keys[key]]
    return [words(line.removeprefix("-"), environment(service)) for line in shown]


def of(service: str) -> click.Context:
    return parsed(service, command_lines(service)[0])


def parsed(service: str, line: list[str]) -> click.Context:
    return check(line, environment(service).get(CREDENTIALS_VARIABLE, ""))


def credentials_of(service: str) -> Path | None:
    return Path(CREDENTIALS[service]) if service in CREDENTIALS else None


@pytest.mark.parametrize("service", SERVICES)
def test_the_daemons_take_the_command_lines_of_their_units(service: str) -> None:
    for line in command_lines(service):
        assert line[0].startswith(f"{BINARIES}/")
        assert parsed(service, line).params.get("credentials", None) == credentials_of(service)


def test_what_a_daemon_would_refuse_is_refused_here() -> None:
    """Or the test before could not fail."""
    relay = [*command_lines("laminar-relay")[0], "--insecure"]
    with pytest.raises(click.NoSuchOption):
        check([*relay, "--no-such-option"])
    with pytest.raises(click.BadParameter):
        check([*relay, "--retain", "0"])
    with pytest.raises(InvalidRequest, match="--advertise"):
        check([*relay, "--host", "0.0.0.0"])
    for service, access in ACCESS.items():
        line = command_lines(service)[0]
        elsewhere = ["--host", "engines-0"] if service == "laminar-engine" else []
        with pytest.raises(InvalidRequest, match=r"without credentials|is for one on"):
            check([*line[: len(line) - len(access.split())], *elsewhere])
    with pytest.raises(InvalidRequest, match="contradict each other"):
        parsed("laminar-relay", relay)
    with pytest.raises(click.UsageError):
        check(["paramserver", "start"])


@pytest.mark.parametrize("service", SERVICES)
def test_each_variable_of_a_unit_is_in_its_file_and_the_other_way_round(service: str) -> None:
    keys = unit(f"{service}.service")
    used = {name for key in ("ExecStart", "ExecStop") for line in keys[key] for name in re.findall(r"\$\{?(\w+)", line)}
    assert used == set(environment(service)) - {CREDENTIALS_VARIABLE}


@pytest.mark.parametrize("service", SERVICES)
def test_who_may_use_a_daemon_has_a_single_place(service: str) -> None:
    assert environment(service)["ACCESS_OPTIONS"] == ACCESS[service]
    [start] = unit(f"{service}.service")["ExecStart"]
    assert start.endswith(" $ACCESS_OPTIONS")
    assert environment(service).get(CREDENTIALS_VARIABLE) == CREDENTIALS.get(service)


@pytest.mark.parametrize("service", CREDENTIALS)
def test_the_credentials_are_put_where_the_daemons_group_may_read_them_and_nobody_else(service: str) -> None:
    text = (FOLDER / f"{service.removeprefix('laminar-')}.env").read_text()
    [(mode, group, path)] = re.findall(r"install -d -m (\d+) -g (\S+) (\S+)$", text, re.MULTILINE)
    assert (int(mode, 8), path) == (0o750, CREDENTIALS[service])
    [(mode, same, source, there)] = re.findall(r"install -m (\d+) -g (\S+) (\./fleet\S+) (\S+)$", text, re.MULTILINE)
    assert [group] == [same] == unit(f"{service}.service")["Group"]
    assert not int(mode, 8) & FORBIDDEN
    assert int(mode, 8) & stat.S_IRGRP
    assert (source, there) == (f"./fleet/{Path(path).name}/*", path)
    assert Path(path).name in FLEET_ROLES


def test_the_gateways_group_may_read_the_file_of_keys_and_nobody_else() -> None:
    text = (FOLDER / "gateway.env").read_text()
    [(mode, group, path)] = re.findall(r"install -m (\d+) -g (\S+) /dev/null (\S+)$", text, re.MULTILINE)
    assert [group] == unit("laminar-gateway.service")["Group"]
    assert int(mode, 8) & stat.S_IRGRP
    assert not int(mode, 8) & FORBIDDEN
    assert of("laminar-gateway").params["api_keys"] == Path(path)
    [made] = re.findall(rf"^#   (\S+ keys new .*) >> {path}$", text, re.MULTILINE)
    check(made.split())


@pytest.mark.parametrize("service", SERVICES)
def test_a_unit_is_not_root_and_can_gain_nothing(service: str) -> None:
    keys = unit(f"{service}.service")
    users = re.findall(r"^u (\S+)", (FOLDER / "laminar.sysusers.conf").read_text(), re.MULTILINE)
    assert keys["User"] == keys["Group"]
    assert keys["User"][0] in users
    assert [keys[key] for key in ("NoNewPrivileges", "CapabilityBoundingSet", "ProtectSystem", "ProtectHome")] == [
        ["yes"],
        [""],
        ["strict"],
        ["yes"],
    ]


@pytest.mark.parametrize("service", SERVICES)
def test_a_stop_lasts_longer_than_the_drain_and_a_failure_starts_it_again(service: str) -> None:
    keys = unit(f"{service}.service")
    drain_s = {
        "laminar-relay": max(DRAIN_S, float(environment("laminar-relay")["DRAIN_WAIT_S"])),
        "laminar-gateway": DRAIN_TIMEOUT_S,
        "laminar-engine": SHUTDOWN_TIMEOUT_S,
    }
    assert int(keys["TimeoutStopSec"][0]) >= 2 * drain_s[service]
    assert keys["KillSignal"] == ["SIGTERM"]
    assert (keys["Restart"], keys["RestartPreventExitStatus"]) == (["on-failure"], ["2"])
    assert keys["StartLimitIntervalSec"] == ["0"]


def test_relay_and_engine_share_a_user_and_the_mounted_memory() -> None:
    relay, engine = unit("laminar-relay.service"), unit("laminar-engine.service")
    [where] = unit("run-laminar.mount")["Where"]
    assert relay["User"] == engine["User"]
    assert relay["RequiresMountsFor"] == engine["RequiresMountsFor"] == relay["ReadWritePaths"] == [where]
    pool = of("laminar-relay").params["pool_dir"]
    assert pool.is_relative_to(where)
    assert [line for line in relay["ExecStartPre"] if line.endswith(f" {pool}")]


def test_the_mounted_memory_is_larger_than_the_pool() -> None:
    [options] = unit("run-laminar.mount")["Options"]
    size = re.search(r"size=(\d+)G", options)
    assert size is not None
    assert int(size[1]) << 30 > parse_bytes(environment("laminar-relay")["POOL_BYTES"])
    assert "huge=within_size" in options


def test_what_a_daemon_writes_is_below_its_own_directories() -> None:
    """All else is read-only to it."""
    assert of("laminar-gateway").params["data"] == Path("/var/lib", *unit("laminar-gateway.service")["StateDirectory"])


def test_the_relay_registers_the_engine_beside_it_behind_a_port_of_its_own() -> None:
    [registered] = of("laminar-relay").params["engines"]
    engine, relay = of("laminar-engine").params, of("laminar-relay").params
    found = EngineBeside.parse(registered)
    assert found.url == f"http://{engine['host']}:{engine['port']}"
    assert found.on_loopback
    assert found.port not in (None, 0, *(relay[name] for name in ("port", "data_port", "metrics_port")))


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The units with programs that are there."""
    for name in ("paramserver", "gateway"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    for path in (*FOLDER.glob("*.service"), *FOLDER.glob("*.mount")):
        (tmp_path / path.name).write_text(path.read_text().replace(BINARIES, str(tmp_path)))
    return tmp_path


ANALYZE = shutil.which("systemd-analyze")
with_systemd = pytest.mark.skipif(ANALYZE is None, reason=needs("no systemd-analyze", "apt-get install systemd"))


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert ANALYZE is not None
    return subprocess.run([ANALYZE, *arguments], capture_output=True, text=True, timeout=120, check=False)


@with_systemd
def test_systemd_finds_nothing_wrong_with_the_units(installed: Path) -> None:
    units = sorted(str(path) for path in installed.iterdir() if path.suffix in (".service", ".mount"))
    assert len(units) == 4
    done = analyze("verify", *units)
    assert (done.returncode, done.stderr) == (0, "")


@with_systemd
@pytest.mark.parametrize("service", SERVICES)
def test_systemd_calls_the_units_little_exposed(installed: Path, service: str) -> None:
    options = ("--offline=yes", "--no-pager", f"--threshold={EXPOSURE_MAX[service]}")
    done = analyze("security", *options, str(installed / f"{service}.service"))
    assert done.returncode == 0, done.stdout[-2000:]
