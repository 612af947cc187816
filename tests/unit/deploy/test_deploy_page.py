"""docs/deploy.md: the paths, ports, variables and options that it names are those of the files."""

from __future__ import annotations

import re

import deploy.images.__main__ as images
from deploy.setup_env import ROOT
from paramserver.config import EngineBeside
from tests.unit.deploy import test_compose, test_systemd
from tests.unit.deploy.command_lines import check, env_file, options_of_all

PAGE = (ROOT / "docs/deploy.md").read_text()
OF_OTHERS = {
    *("--nodes", "--batch", "--signal", "--overlap"),  # sbatch, scancel, srun
    *("--now", "--namespace", "--from-file"),  # systemctl, kubectl
    *("--build", "--input", "--prune", "--no-install-recommends"),  # docker, buildah, apt-get
}


def test_folders_and_files_are_there() -> None:
    named = re.findall(r"`(deploy/[\w./*-]+)`", PAGE)
    assert len(named) >= 8
    assert all(list(ROOT.glob(name)) for name in named)
    for name in re.findall(r"`((?:laminar|run-laminar|job|base|charts|overlays)[\w/.-]*\.\w+)`", PAGE):
        assert list(ROOT.glob(f"deploy/**/{name}")) or name.startswith("laminar-JOBID"), name
    folders = {path.name for path in (ROOT / "deploy").iterdir() if path.is_dir() and not path.name.startswith("_")}
    assert {name for name in folders if f"`deploy/{name}`" in PAGE} == folders - {"demo", "reference"}


def test_ports_are_those_of_the_units() -> None:
    of_relay, of_gateway = test_systemd.of("laminar-relay").params, test_systemd.of("laminar-gateway").params
    found = {what: int(port) for port, what in re.findall(r"^\| (\d+) \| (.+?) \|", PAGE, re.MULTILINE)}
    assert found == {
        "relay: gRPC": of_relay["port"],
        "relay: bytes": of_relay["data_port"],
        "relay: metrics": of_relay["metrics_port"],
        "engine": test_systemd.of("laminar-engine").params["port"],
        "relay with credentials: the port in front of an engine": EngineBeside.parse(of_relay["engines"][0]).port,
        "gateway: API and metrics": of_gateway["port"],
        "etcd": int(of_relay["etcd"].rpartition(":")[2]),
        "Redis": 6379,
    }


def test_the_same_ports_everywhere() -> None:
    relay, gateway = (
        check(test_compose.command_line("relay")).params,
        check(test_compose.command_line("gateway")).params,
    )
    systemd = test_systemd.of("laminar-relay").params
    assert [relay[name] for name in ("port", "data_port", "metrics_port")] == [
        systemd[name] for name in ("port", "data_port", "metrics_port")
    ]
    assert gateway["port"] == test_systemd.of("laminar-gateway").params["port"]
    job = env_file(ROOT / "deploy/slurm/job.env")
    assert (int(job["RELAY_PORT"]), int(job["GATEWAY_PORT"])) == (relay["port"], gateway["port"])


def test_variables_and_options_are_there() -> None:
    files = [
        *ROOT.glob("deploy/systemd/*.env"),
        *ROOT.glob("deploy/slurm/*.env"),
        *ROOT.glob("deploy/kubernetes/base/*.env"),
    ]
    known = {name for path in files for name in env_file(path)}
    assert {"ACCESS_OPTIONS", "RELAY_ACCESS", "ENGINE_ACCESS", "GATEWAY_ACCESS", "HOST", "ETCD", "POOL_BYTES"} <= known
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE))
    of_images = {option for action in images.options()._actions for option in action.option_strings}
    assert named - OF_OTHERS <= options_of_all() | of_images
