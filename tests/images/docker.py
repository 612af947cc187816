"""A Docker for one run: its daemon has a network namespace of its own, so that nothing of the host's firewall changes.

Its images, containers and volumes lie in a folder that is removed with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from deploy.images.__main__ import IMAGES
from tests.support.skips import cannot_mount, needs

STARTS_S = 60.0
"""How long the daemon may take; it takes some five seconds."""
_DAEMON = """
set -eu
ip link set lo up
mount -t tmpfs tmpfs /run
exec dockerd --data-root "$1/data" --exec-root /run/docker --host "unix://$1/socket" --pidfile "$1/pid"
"""


def lacking() -> str:
    """Why the tests cannot run here; "" when they can."""
    for command, package in (("buildah", "buildah"), ("dockerd", "docker.io"), ("docker-compose", "docker-compose")):
        if shutil.which(command) is None:
            return needs(f"no {command}", f"apt-get install --no-install-recommends {package}")
    if reason := cannot_mount():
        return reason
    for image in IMAGES.values():
        if subprocess.run(["buildah", "inspect", f"localhost/{image}"], capture_output=True, check=False).returncode:
            return needs(f"no image {image}", "make images")
    return ""


class Docker:
    """The client of one daemon."""

    def __init__(self, folder: Path, pid: int) -> None:
        self.folder = folder
        self._pid = pid
        self._environment = {**os.environ, "DOCKER_HOST": f"unix://{folder}/socket"}

    def run(
        self, *words: str, stdin: str = "", check: bool = True, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """A command that finds this daemon, with what it printed. Raises AssertionError where it fails and `check`."""
        environment = {**self._environment, **variables}
        done = subprocess.run(
            words, env=environment, input=stdin, capture_output=True, text=True, timeout=600, check=False
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done

    def inside(self, *words: str) -> str:
        """What a command of this machine prints in the daemon's network, where ports are published."""
        return self.run("nsenter", "--target", str(self._pid), "--net", *words).stdout

    def load(self, image: str) -> None:
        """Takes an image from buildah, as docs/deploy.md says."""
        archive = self.folder / "image.tar"
        self.run("buildah", "push", "--quiet", f"localhost/{image}", f"docker-archive:{archive}:{image}:latest")
        self.run("docker", "load", "--quiet", "--input", str(archive))
        archive.unlink()


@contextlib.contextmanager
def started() -> Iterator[Docker]:
    folder = Path(tempfile.mkdtemp(prefix="laminar-docker-"))
    command: Sequence[str] = ["unshare", "--net", "--mount", "sh", "-c", _DAEMON, "sh", str(folder)]
    with (folder / "log").open("wb") as log:
        daemon = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + STARTS_S
        docker = Docker(folder, daemon.pid)
        while docker.run("docker", "info", check=False).returncode:
            assert daemon.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.2)
        yield docker
    finally:
        daemon.send_signal(signal.SIGTERM)  # it stops its containers
        try:
            daemon.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()
        shutil.rmtree(folder)
