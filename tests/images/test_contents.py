"""What is in the images, and what their commands say as the images' user, on a root that cannot be written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pip
import pytest

from deploy.images.__main__ import IMAGES
from tests.images.docker import Docker

pytestmark = [pytest.mark.images, pytest.mark.slow, pytest.mark.timeout(1200)]

HARDENED = ("--rm", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--network", "none")
AS_ROOT = ("--user", "0", "--cap-add", "DAC_READ_SEARCH")
OURS = {"daemons": "laminar", "engine": "laminar-engine"}
MIB_MAX = {"laminar": 350, "laminar-engine": 1300, "laminar-etcd": 120}
"""Each a seventh or more above what it is; the engine's with torch's CPU build."""
UNWANTED = """
find / -xdev \\( -path '/opt/*/tests' -o -path '*/torch/test' -o -path /src -o -path /opt/pip -o -path /wheels \\
    -o -name pip.conf -o -name '*.key' -o -path /run/secrets -o -perm /6000 -type f \\) -print
find / -xdev -type f \\( -name '*.pem' -o -name '*.crt' \\) -exec grep -l 'PRIVATE KEY' {} +
for tool in gcc pip pip3 strip; do command -v $tool; done
"""


def said(docker: Docker, image: str, *words: str, status: int = 0, options: Sequence[str] = ()) -> str:
    done = docker.run("docker", "run", *HARDENED, *options, image, *words, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("image", IMAGES.values())
def test_an_image_is_small_and_not_root(docker: Docker, image: str) -> None:
    [found] = json.loads(docker.run("docker", "image", "inspect", image).stdout)
    print(f"{image}: {found['Size'] >> 20} MiB")
    assert found["Size"] >> 20 <= MIB_MAX[image]
    assert found["Config"]["User"] == "10001:10001"


@pytest.mark.parametrize("image", OURS.values())
def test_no_secret_test_or_build_tool_is_in_it(docker: Docker, image: str) -> None:
    """As root, who sees everything."""
    found = said(docker, image, "sh", "-c", f"{UNWANTED}true", options=AS_ROOT)
    assert found == ""


@pytest.mark.parametrize("image", OURS.values())
def test_pip_finds_nothing_that_is_broken(docker: Docker, image: str) -> None:
    """By the pip of this environment: the image has none."""
    mounted = ["--volume", f"{Path(pip.__file__).parent}:/given/pip:ro", "--env", "PYTHONPATH=/given"]
    assert "No broken requirements found." in said(docker, image, "python3", "-m", "pip", "check", options=mounted)


def test_commands_say_what_they_are(docker: Docker) -> None:
    for command in ("paramserver", "gateway"):
        assert f"{command}, version" in said(docker, "laminar", command, "--version")
        assert "Usage:" in said(docker, "laminar", command, "--help")
    assert "[envs]'" in said(docker, "laminar", "agents-env", "--help", status=1)
    assert "Usage: gateway" in said(docker, "laminar"), "what it does unless it is told"
    assert "Usage: gateway engine" in said(docker, "laminar-engine")


def test_wrong_options_are_wrong_usage(docker: Docker) -> None:
    assert "No such option" in said(docker, "laminar", "paramserver", "serve", "--prot", "7070", status=2)
    assert "Missing option" in said(docker, "laminar", "gateway", "serve", status=2)
    serve = ("paramserver", "serve", "--name", "relay", "--host", "0.0.0.0", "--advertise", "relay")
    refused = said(docker, "laminar", *serve, status=1)
    assert "--credentials" in refused
    assert "--insecure" in refused
