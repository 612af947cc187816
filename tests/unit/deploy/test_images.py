"""`make images`: what the build learns of its network, what it runs, and what it says when something is missing."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deploy.images import network
from deploy.images.__main__ import BASE, CONTAINERFILE, IMAGES, build_command, debian_command, parsed
from deploy.images.network import CA_INSIDE, WHEELS_INSIDE, Network
from deploy.setup_env import ROOT

CONFIG = """\
:env:.index-url='https://user:secret@index.example/simple'
global.extra-index-url='https://more.example/simple file:///srv/simple'
global.index-url='https://pypi.org/simple'
global.no-color='true'
freeze.timeout='10'
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that are found and do nothing."""
    for name in ("buildah", "mmdebstrap"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


def pip_conf(where: Network) -> dict[str, str]:
    """The file, as pip reads it."""
    parser = configparser.RawConfigParser()
    parser.read_string(where.pip_conf)
    return dict(parser["global"])


def test_the_build_uses_the_index_that_pip_uses_here() -> None:
    found = network.read(CONFIG, {})
    assert pip_conf(found) == {
        "index-url": "https://user:secret@index.example/simple",
        "extra-index-url": "https://more.example/simple",
    }
    assert found.left_out == ("file:///srv/simple",)


def test_without_settings_pip_has_its_own() -> None:
    assert network.read("", {}) == Network({})
    assert Network({}).pip_conf == "[global]\n"


def test_a_folder_of_wheels_is_mounted(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    listed = f"global.find-links='/nowhere {tmp_path} https://links.example/'"
    of_pip, of_option = network.read(listed, {}), network.read(listed, {}, wheels=other)
    assert (of_pip.wheels, of_pip.left_out) == (tmp_path, ("/nowhere",))
    assert (of_option.wheels, of_option.left_out) == (other, ("/nowhere", str(tmp_path)))
    assert pip_conf(of_pip) == pip_conf(of_option) == {"find-links": f"https://links.example/ {WHEELS_INSIDE}"}
    with pytest.raises(ValueError, match=r"--wheels /nowhere: there is no such folder"):
        network.read("", {}, wheels=Path("/nowhere"))


def test_certificates_come_from_the_option_or_pip_or_the_environment(tmp_path: Path) -> None:
    of_option, of_pip, of_variable = (tmp_path / name for name in ("option", "pip", "variable"))
    for path in (of_option, of_pip, of_variable):
        path.touch()
    environment = {"CURL_CA_BUNDLE": str(of_variable)}
    listed = f"global.cert='{of_pip}'"
    assert network.read(listed, environment, of_option).ca == of_option
    assert network.read(listed, environment).ca == of_pip
    assert network.read("", environment).ca == of_variable
    assert pip_conf(network.read("", environment)) == {"cert": CA_INSIDE}
    assert f"target={CA_INSIDE}" in CONTAINERFILE.read_text()
    with pytest.raises(ValueError, match=r"/nowhere are not there; --ca names"):
        network.read("", {"SSL_CERT_FILE": "/nowhere"})


@pytest.mark.usefixtures("tools")
def test_no_command_has_an_address_with_a_password_in_it(tmp_path: Path) -> None:
    where = network.read(CONFIG, {}, wheels=tmp_path)
    given = parsed(["engine", "--torch-index", "https://torch.example"])
    command = build_command("engine", given, where, Path("/secrets/pip.conf"))
    assert "secret@" not in " ".join(command)
    assert "id=pip.conf,src=/secrets/pip.conf" in command
    assert f"{tmp_path}:{WHEELS_INSIDE}:ro" in command
    assert {"LAMINAR_TORCH_INDEX=https://torch.example", f"DEBIAN={BASE}", "--pull-never"} <= set(command)
    assert command[command.index("--tag") + 1] == "laminar-engine"


@pytest.mark.usefixtures("tools")
def test_a_base_of_a_registry_is_pulled() -> None:
    given = parsed(["--base", "docker.io/debian:12-slim"])
    command = build_command("daemons", given, Network({}), Path("pip.conf"))
    assert "DEBIAN=docker.io/debian:12-slim" in command
    assert "--pull-never" not in command
    assert given.targets == list(IMAGES)


def test_a_mirror_takes_the_place_of_debians() -> None:
    assert debian_command(Path("base.tar"), ["http://mirror.example/debian"])[-3:] == [
        "bookworm",
        "base.tar",
        "http://mirror.example/debian",
    ]


def test_images_are_those_of_the_compose_file_and_stages_of_the_containerfile() -> None:
    services = yaml.safe_load((ROOT / "deploy/compose/compose.yaml").read_text())["services"].values()
    assert {one["build"]["target"]: one["image"] for one in services} == IMAGES
    assert set(IMAGES) <= set(re.findall(r" AS (\S+)$", CONTAINERFILE.read_text(), re.MULTILINE))


def said(*words: str, path: str = "/nowhere") -> tuple[int, str]:
    command = [sys.executable, "-m", "deploy.images", *words]
    done = subprocess.run(
        command, cwd=ROOT, env={"PATH": path}, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_missing_tools_are_named_with_the_command_that_installs_them() -> None:
    status, text = said("daemons")
    assert status == 2
    assert "buildah and mmdebstrap not found: apt-get install --no-install-recommends buildah mmdebstrap" in text
    status, text = said("--base", "debian:12-slim")
    assert status == 2
    assert "buildah not found" in text


def test_an_unknown_target_is_refused_before_anything_runs() -> None:
    status, text = said("gateway")
    assert status == 2
    assert "no target 'gateway'; there are: daemons, engine, etcd" in text


@pytest.mark.usefixtures("tools")
def test_certificates_that_are_not_there_are_wrong_usage(tmp_path: Path) -> None:
    status, text = said("--ca", "/nowhere", path=str(tmp_path))
    assert status == 2
    assert "images: the certificates /nowhere are not there" in text


def test_a_step_that_fails_is_named_with_what_may_help(tmp_path: Path) -> None:
    (tmp_path / "mmdebstrap").write_text("#!/bin/sh\necho no route to the mirror\nexit 25\n")
    (tmp_path / "buildah").write_text("#!/bin/sh\n")
    for name in ("mmdebstrap", "buildah"):
        (tmp_path / name).chmod(0o755)
    status, text = said("daemons", path=f"{tmp_path}:/bin")
    assert status == 1
    assert "no route to the mirror\nimages: FAILED: the base: mmdebstrap ended with status 25" in text
    assert "--mirror" in text
