"""Builds the images without a registry: `make images`, or `python -m deploy.images [daemons engine etcd]`.

mmdebstrap makes the base image from Debian's own packages, buildah the others from the Containerfile; its `chroot`
isolation needs no container engine. Exit status 0: all are built; 1: one is not; 2: an option is wrong, or a tool is
missing.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from deploy.images import network
from deploy.images.network import WHEELS_INSIDE, Network

ROOT = Path(__file__).resolve().parents[2]
CONTAINERFILE = Path(__file__).with_name("Containerfile")
IGNORED = Path(__file__).with_name("Containerfile.dockerignore")
IMAGES = {"daemons": "laminar", "engine": "laminar-engine", "etcd": "laminar-etcd"}
"""Names of the images by their stage, as in deploy/compose."""
SUITE = "bookworm"
"""Debian 12, which the Containerfile starts from where there is a registry."""
BASE = f"localhost/laminar-base:{SUITE}"
UNREAD = ("doc", "man", "info", "locale", "lintian", "groff", "bash-completion")
"""Folders of /usr/share that nobody reads in a container; Debian's `slim` images lack them, too."""
WITHOUT_PERL = (
    'chroot "$1" sh -euc \'apt-mark auto "~i" >/dev/null; apt-mark manual apt usr-is-merged >/dev/null; '
    "DEBIAN_FRONTEND=noninteractive apt-get purge --yes --quiet=2 --auto-remove usrmerge perl >/dev/null'"
)
"""Perl is there for `usrmerge` alone, whose work is done once the packages are unpacked: 50 MB."""


class Failed(Exception):
    """A step that did not end well."""


def say(line: str) -> None:
    print(f"images: {line}", flush=True)


def run(what: str, command: Sequence[str], hint: str) -> None:
    """Runs a step, its output in sight of the user. Raises Failed with `hint` where it fails."""
    say(f"{what}: {shlex.join(command)}")
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    if status:
        raise Failed(f"{what}: {command[0]} ended with status {status}, its output stands above. {hint}")


def output(*command: str) -> str:
    """What a command prints. Raises Failed with its errors where it fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"{shlex.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


def debian_command(tar: Path, mirrors: Sequence[str]) -> list[str]:
    """The command that makes a minimal Debian; without `mirrors` it is from Debian's own, with security updates."""
    left_out = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in UNREAD]
    licenses = "--dpkgopt=path-include=/usr/share/doc/*/copyright"
    small = ["--include=usr-is-merged", f"--customize-hook={WITHOUT_PERL}"]
    return ["mmdebstrap", "--variant=apt", *left_out, licenses, *small, SUITE, str(tar), *mirrors]


def make_base(mirrors: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="laminar-images-") as scratch:
        tar = Path(scratch) / "base.tar"
        hint = "Check the network and http_proxy; --mirror names another mirror of Debian."
        run("the base", debian_command(tar, mirrors), hint)
        container = output("buildah", "from", "scratch")
        try:
            output("buildah", "add", "--quiet", container, str(tar), "/")
            output("buildah", "config", "--cmd", "bash", container)
            output("buildah", "commit", "--quiet", container, BASE)
        finally:
            output("buildah", "rm", container)


def build_command(target: str, given: argparse.Namespace, where: Network, pip_conf: Path) -> list[str]:
    """The command that builds one image."""
    words = ["buildah", "bud", "--isolation", "chroot", "--layers", "--ignorefile", str(IGNORED)]
    words += ["--build-arg", f"DEBIAN={given.base or BASE}", *([] if given.base else ["--pull-never"])]
    if given.torch_index:
        words += ["--build-arg", f"LAMINAR_TORCH_INDEX={given.torch_index}"]
    words += ["--secret", f"id=pip.conf,src={pip_conf}"]
    words += ["--secret", f"id=ca.crt,src={where.ca}"] if where.ca else []
    words += ["--volume", f"{where.wheels}:{WHEELS_INSIDE}:ro"] if where.wheels else []
    return [*words, "--file", str(CONTAINERFILE), "--target", target, "--tag", IMAGES[target], str(ROOT)]


def build(given: argparse.Namespace, where: Network) -> None:
    if not given.base and (given.renew_base or not output("buildah", "images", "-q", "--filter", f"reference={BASE}")):
        make_base(given.mirror)
    elif not given.base:
        say(f"the base is {BASE}, made before; --renew-base makes it anew, with Debian's updates since then")
    hint = (
        "If pip found no index: its settings (`pip config list`) and --ca say where it is, and by whose certificates."
    )
    with tempfile.TemporaryDirectory(prefix="laminar-images-") as scratch:
        pip_conf = Path(scratch) / "pip.conf"
        pip_conf.write_text(where.pip_conf)
        for target in given.targets:
            run(f"the image {IMAGES[target]}", build_command(target, given, where, pip_conf), hint)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m deploy.images", description="Builds the images without a registry.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"{', '.join(IMAGES)} (default: all)")
    parser.add_argument("--base", metavar="IMAGE", help="a Debian 12 of a registry, such as docker.io/debian:12-slim")
    parser.add_argument(
        "--renew-base", action="store_true", help="make the base anew, with Debian's updates since then"
    )
    mirror = "an address, or a line of apt's sources.list; repeatable (default: Debian's, with its security updates)"
    parser.add_argument("--mirror", action="append", default=[], metavar="MIRROR", help=mirror)
    parser.add_argument(
        "--ca", type=Path, metavar="FILE", help=f"certificates (default: {', '.join(network.CA_VARIABLES)})"
    )
    wheels = "a folder of wheels that pip may take (default: the first one of pip's find-links)"
    parser.add_argument("--wheels", type=Path, metavar="DIR", help=wheels)
    index = "an index with torch's CPU build (default: LAMINAR_TORCH_INDEX)"
    parser.add_argument("--torch-index", metavar="URL", help=index, default=os.environ.get("LAMINAR_TORCH_INDEX"))
    return parser


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The options. Leaves with status 2 where one is wrong, or a tool is missing."""
    parser = options()
    given = parser.parse_args(words)
    if unknown := [target for target in given.targets if target not in IMAGES]:
        parser.error(f"no target {unknown[0]!r}; there are: {', '.join(IMAGES)}")
    given.targets = given.targets or list(IMAGES)
    tools = ["buildah"] if given.base else ["buildah", "mmdebstrap"]
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        parser.error(
            f"{' and '.join(missing)} not found: apt-get install --no-install-recommends {' '.join(missing)} (other "
            f"systems need Debian's archive keys as well: debian-archive-keyring). With a registry, docker and podman "
            f"build these images, too: the head of {CONTAINERFILE.relative_to(ROOT)} has the commands."
        )
    return given


def pips_settings() -> str:
    """The output of `pip config list`; without a pip here it has none."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        say(f"this Python has no pip, so only --ca and variables name certificates: {done.stderr.strip()[-200:]}")
    return done.stdout


def main(words: Sequence[str]) -> int:
    given, started = parsed(words), time.monotonic()
    try:
        where = network.read(pips_settings(), os.environ, given.ca, given.wheels and given.wheels.resolve())
    except ValueError as error:
        say(str(error))
        return 2
    if where.left_out:
        say(f"pip goes without {', '.join(where.left_out)}: a build does not see this machine's disk")
    try:
        build(given, where)
    except Failed as error:
        say(f"FAILED: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; `buildah containers` lists what an interrupted build leaves, `buildah rm` removes it")
        return 130
    for target in given.targets:
        say(f"{IMAGES[target]}: {output('buildah', 'images', '--format', '{{.Size}}', IMAGES[target])}")
    say(f"built in {time.monotonic() - started:.0f} s; docs/deploy.md says how podman and docker get them")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
