"""`deploy/compose` and `deploy/images`: the daemons take their command lines; images hold what the wheel is made of."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from jsonschema import Draft202012Validator

from deploy.setup_env import ROOT
from gateway.app import DRAIN_TIMEOUT_S
from paramserver.config import EngineBeside
from protos.access.credentials import Credentials
from protos.access.key_file import KeyFile
from protos.options import parse_bytes
from tests.support.wheels import copied_into_the_build
from tests.unit.deploy.command_lines import check

CONTAINERFILE = ROOT / "deploy/images/Containerfile"
COMPOSE: Mapping[str, Any] = yaml.safe_load((ROOT / "deploy/compose/compose.yaml").read_text())
SERVICES: Mapping[str, Mapping[str, Any]] = COMPOSE["services"]
GIVEN = {"MODEL_DIR": "/srv/models/policy"}
DAEMONS = ("relay", "engine", "gateway")


def interpolated(text: str) -> str:
    """As compose does: `${NAME:-default}` and `${NAME:?what is missing}`. KeyError names one that has to be given."""

    def value(found: re.Match[str]) -> str:
        name, kind, rest = found.groups()
        return GIVEN.get(name, rest) if kind == ":-" else GIVEN[name]

    return re.sub(r"\$\{(\w+)(:-|:\?)([^}]*)\}", value, text)


def command_line(service: str) -> list[str]:
    return shlex.split(interpolated(SERVICES[service]["command"]))


def stages() -> dict[str, str]:
    """Each stage of the Containerfile, and its text."""
    parts = re.split(r"^FROM \S+ AS (\S+)$", CONTAINERFILE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name", ["compose.yaml", "monitoring.yaml"])
def test_a_file_is_what_the_compose_specification_allows(name: str) -> None:
    schema = Draft202012Validator(get_builtin_schema("vendor.compose-spec"))
    file = yaml.safe_load((ROOT / "deploy/compose" / name).read_text())
    assert [f"{error.json_path}: {error.message}" for error in schema.iter_errors(file)] == []
    file["services"]["misspelled"] = {"image": "laminar", "dependson": []}
    [error] = schema.iter_errors(file)
    assert "dependson" in error.message


@pytest.mark.parametrize("service", DAEMONS)
def test_the_daemons_take_their_command_lines(service: str) -> None:
    check(command_line(service))


def test_health_is_asked_for_without_a_key() -> None:
    tests = {service: one["healthcheck"]["test"] for service, one in SERVICES.items() if "healthcheck" in one}
    assert set(tests) == {"relay", "gateway"}
    assert {test[0] for test in tests.values()} == {"CMD"}
    for service, port in {"relay": "metrics_port", "gateway": "port"}.items():
        assert tests[service][1:3] == ["python3", "-c"]
        url = f"http://127.0.0.1:{check(command_line(service)).params[port]}/healthz"
        assert f"'{url}'" in tests[service][3]
        compile(tests[service][3], "healthcheck", "exec")


@pytest.mark.parametrize(
    ("service", "name", "access"),
    [
        ("relay", "RELAY_ACCESS", "--credentials /credentials/relay"),
        ("relay", "ENGINE_ADDRESS", "http://127.0.0.1:8000@8443"),
        ("engine", "ENGINE_ACCESS", "--host 127.0.0.1"),
        ("gateway", "GATEWAY_ACCESS", "--api-keys /data/keys --credentials /credentials/gateway"),
    ],
)
def test_who_may_use_a_daemon_has_a_single_place(service: str, name: str, access: str) -> None:
    assert SERVICES[service]["command"].count(f"${{{name}:-{access}}}") == 1


def test_keys_are_made_once_where_the_gateway_reads_them(tmp_path: Path) -> None:
    keys, gateway = SERVICES["keys"], SERVICES["gateway"]
    assert set(keys["volumes"]) <= set(gateway["volumes"])
    assert keys["build"] == gateway["build"], "the same user"
    assert gateway["depends_on"]["keys"] == {"condition": "service_completed_successfully"}
    path = check(command_line("gateway")).params["api_keys"]
    assert str(path) in keys["command"][-1]
    command = [word.replace("$$", "$").replace("/data/", f"{tmp_path}/") for word in keys["command"]]
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    made = tmp_path / path.name
    subprocess.run(command, env=environment, check=True, timeout=120)
    assert KeyFile(made).by_role() == dict.fromkeys(("admin", "trainer", "agent", "reader"), 1)
    text = made.read_text()
    subprocess.run(command, env=environment, check=True, timeout=120)
    assert made.read_text() == text, "the second start leaves them"
    assert list(tmp_path.iterdir()) == [made]


@pytest.mark.slow
def test_credentials_are_made_once_and_each_daemon_gets_its_own(tmp_path: Path) -> None:
    makes = SERVICES["credentials"]
    for name in ("fleet", "credentials/relay", "credentials/gateway"):
        (tmp_path / name).mkdir(parents=True)
    text = makes["command"][-1].replace("$$", "$")
    script = re.sub(r"(?<=[ ])/(fleet|credentials)", rf"{tmp_path}/\1", text)
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    made: dict[str, bytes] = {}
    for _ in range(2):
        subprocess.run([*makes["command"][:-1], script], env=environment, check=True, timeout=120, capture_output=True)
        now = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        assert not made or now == made, "the second start leaves them"
        made = now
    for service in ("relay", "gateway"):
        path = check(command_line(service)).params["credentials"]
        found = Credentials(tmp_path / path.relative_to("/"))
        assert found.identity.role == service
        mounted = [volume.split(":") for volume in SERVICES[service]["volumes"]]
        assert [f"{service}-credentials", str(path), "ro"] in mounted
        assert not [volume for volume in mounted if volume[0] == "fleet"], "the CA's key is no daemon's"
        assert f"{service}-credentials:{path}" in makes["volumes"]
        assert SERVICES[service]["depends_on"]["credentials"] == {"condition": "service_completed_successfully"}
    relay = Credentials(tmp_path / "credentials/relay").material
    assert check(command_line("relay")).params["advertise"] in relay.hosts
    made_by_image = re.findall(r"install -d (.+?)(?: \\)?$", stages()["run"], re.MULTILINE)
    private = next(line for line in made_by_image if "-m 0700" in line)
    assert {volume.partition(":")[2] for volume in makes["volumes"]} <= set(private.split()), "volumes take its owner"


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_has_no_rights_and_time_for_its_drain(service: str) -> None:
    found = SERVICES[service]
    assert (found["read_only"], found["cap_drop"], found["restart"]) == (True, ["ALL"], "on-failure")
    assert found["security_opt"] == ["no-new-privileges:true"]
    assert int(found["stop_grace_period"].removesuffix("s")) >= 2 * DRAIN_TIMEOUT_S
    assert "user" not in found, "the image's"
    assert set(found.get("depends_on", ())) <= set(SERVICES)


def test_what_is_mounted_is_there() -> None:
    mounted = {interpolated(volume).split(":")[0] for one in SERVICES.values() for volume in one.get("volumes", ())}
    assert {name for name in mounted if not name.startswith("/")} == set(COMPOSE["volumes"])


def test_relay_and_engine_share_one_tmpfs_that_holds_the_pool() -> None:
    shared = {
        service: [volume.split(":")[1] for volume in SERVICES[service]["volumes"] if volume.startswith("pool:")]
        for service in ("relay", "engine")
    }
    assert shared == {"relay": ["/run/laminar"], "engine": ["/run/laminar"]}
    options = COMPOSE["volumes"]["pool"]["driver_opts"]
    assert options["type"] == "tmpfs"
    size = re.search(r"size=(\d+)g", options["o"])
    assert size is not None
    relay = check(command_line("relay")).params
    assert parse_bytes(f"{size[1]}GiB") > relay["pool_bytes"]
    assert relay["pool_dir"].is_relative_to("/run/laminar")


def test_only_the_gateway_is_reached_from_outside_and_from_this_machine_alone() -> None:
    published = {service: one["ports"] for service, one in SERVICES.items() if "ports" in one}
    assert published == {"gateway": ["127.0.0.1:8080:8080"]}
    assert check(command_line("gateway")).params["port"] == 8080


def test_the_relay_registers_the_engine_with_which_it_shares_a_loopback() -> None:
    engine, relay = check(command_line("engine")).params, check(command_line("relay")).params
    [registered] = relay["engines"]
    found = EngineBeside.parse(registered)
    assert found.url == f"http://{engine['host']}:{engine['port']}"
    assert found.on_loopback
    assert found.port
    shared = [one for one in SERVICES.values() if "network_mode" in one]
    assert shared == [SERVICES["relay"], SERVICES["engine"]]
    assert {one["network_mode"] for one in shared} == {"service:host"}
    assert all("host" in one["depends_on"] for one in shared)
    assert not {"ports", "networks", "hostname"} & {key for one in shared for key in one}, "they are the other's"


def test_the_shared_network_has_the_relays_name_and_outlives_both() -> None:
    host = SERVICES["host"]
    assert host["networks"] == {"default": {"aliases": [check(command_line("relay")).params["advertise"]]}}
    assert (host["command"], host["init"]) == ("sleep infinity", True)
    assert "depends_on" not in host


def test_without_credentials_the_engine_is_reached_as_the_header_says(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        (ROOT / "deploy/compose/compose.yaml")
        .read_text()
        .partition("# Without credentials: ")[2]
        .partition(". Then")[0]
    )
    settings = [word.split("=", 1) for word in shlex.split(text.replace("\n# ", " ").replace(", and ", " "))]
    monkeypatch.setattr(sys.modules[__name__], "GIVEN", {**GIVEN, **dict(settings)})
    relay, engine, gateway = (check(command_line(service)).params for service in DAEMONS)
    assert relay["engines"] == (f"embedded=http://{relay['advertise']}:{engine['port']}",)
    assert (relay["insecure"], engine["insecure"], engine["host"]) == (True, True, "0.0.0.0")
    assert (relay["credentials"], gateway["credentials"]) == (None, None)


def test_services_are_built_from_stages_that_there_are_and_are_not_root() -> None:
    targets = {service: one["build"]["target"] for service, one in SERVICES.items()}
    daemons = dict.fromkeys(("host", "relay", "keys", "credentials", "gateway"), "daemons")
    assert targets == {"etcd": "etcd", "engine": "engine", **daemons}
    for target in targets.values():
        assert re.findall(r"^USER (\S+)$", stages()[target], re.MULTILINE) == ["10001:10001"]
    for one in SERVICES.values():
        assert (
            ROOT / "deploy/compose" / one["build"]["context"] / one["build"]["dockerfile"]
        ).resolve() == CONTAINERFILE


def test_stages_copy_from_stages_that_there_are() -> None:
    found = stages()
    assert set(re.findall(r"--from=(\S+)", CONTAINERFILE.read_text())) <= set(found)
    bases = set(re.findall(r"^FROM (\S+)", CONTAINERFILE.read_text(), re.MULTILINE)) - {"${DEBIAN}"}
    assert bases <= set(found)


def test_the_build_copies_all_that_the_wheel_is_made_of() -> None:
    """That these files are enough is shown by `tests/e2e/operating/test_wheel.py`, which builds the wheel from them."""
    copied = copied_into_the_build()
    assert all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {*packages, "pyproject.toml", project["project"]["readme"], "hatch_build.py"} <= set(copied)
