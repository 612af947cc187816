"""Installs the Debian packages that set-up, tests and benchmarks need and this machine lacks: `make system-packages`.

It prints the apt line and runs it, as root. It checks for the command, library or header that is used, not for dpkg's
list: a Python or a compiler from elsewhere is as good. Nothing else in the project changes the host.
Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SystemPackage:
    """A package by its name in Debian and Ubuntu, its purpose, and a check whether the machine has what it provides."""

    name: str
    purpose: str
    is_there: Callable[[], bool]


def _has_command(name: str) -> bool:
    """Whether a command is in this PATH or root's: a user's own often lacks sbin."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin") is not None


def _has_library(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _has_faketime() -> bool:
    """It is loaded into a program by its path, and not found where linkers look."""
    return any(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))


def _has_headers() -> bool:
    return (Path(sysconfig.get_path("include")) / "Python.h").is_file()


def _has_postgresql() -> bool:
    return any(Path("/usr/lib/postgresql").glob("*/bin/initdb"))


def _has_fonts() -> bool:
    return any(Path("/usr/share/fonts").rglob("*.ttf"))


CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
SET_UP = (
    SystemPackage("gcc", "compiles a package that has no wheel", lambda: _has_command("cc") or _has_command("gcc")),
    SystemPackage("libc6-dev", "what a compiler needs", lambda: Path("/usr/include/stdio.h").is_file()),
    SystemPackage("python3-dev", "Python's headers, for the same", _has_headers),
    SystemPackage("python3-venv", "virtual environments", lambda: importlib.util.find_spec("ensurepip") is not None),
)
TESTS = (
    SystemPackage("iproute2", "tests of cut and slow links", lambda: _has_command("ip") and _has_command("tc")),
    SystemPackage("iptables", "tests of cut links", lambda: _has_command("iptables")),
    SystemPackage("bubblewrap", "the sandbox of `agents-env run code` on older kernels", lambda: _has_command("bwrap")),
    SystemPackage("redis-server", "tests of stores that gateways share", lambda: _has_command("redis-server")),
    SystemPackage("postgresql", "the same with PostgreSQL", _has_postgresql),
    SystemPackage("libfaketime", "clock steps in `make soak`", _has_faketime),
    SystemPackage("nginx", "the test of the proxy that docs/security.md shows", lambda: _has_command("nginx")),
    SystemPackage("prometheus", "promtool, for tests of the alert rules", lambda: _has_command("promtool")),
    SystemPackage("chromium", "tests of the dashboard", lambda: any(map(_has_command, CHROMIUM))),
    SystemPackage("fonts-dejavu-core", "its text", _has_fonts),
)
BENCHMARKS = (
    SystemPackage("libibverbs1", "Mooncake, in `make bench-relay`", lambda: _has_library("libibverbs.so.1")),
    SystemPackage("librdmacm1", "Mooncake, in `make bench-relay`", lambda: _has_library("librdmacm.so.1")),
)
ALL = (*SET_UP, *TESTS, *BENCHMARKS)
APT_ENVIRONMENT: Mapping[str, str] = {"DEBIAN_FRONTEND": "noninteractive"}


def lacking(packages: Sequence[SystemPackage] = ALL) -> list[SystemPackage]:
    """The packages that this machine lacks."""
    return [package for package in packages if not package.is_there()]


def apt_lines(names: Sequence[str]) -> list[list[str]]:
    """The commands that install packages; the first one fetches the list of packages, which a bare machine lacks."""
    return [["apt-get", "update", "-qq"], ["apt-get", "install", "--yes", "--no-install-recommends", *names]]


def refusal(names: Sequence[str], has_apt: bool, is_root: bool) -> str:
    """Why the packages cannot be installed here, and what to do instead; "" when they can."""
    if not has_apt:
        return (
            f"there is no apt-get here. Install what Debian calls {', '.join(names)} with this system's own tool "
            "(names may differ)."
        )
    if not is_root:
        sudo = "sudo " if _has_command("sudo") else ""
        line = " && ".join(sudo + " ".join(command) for command in apt_lines(names))
        return f"installing needs root: run `{sudo}make system-packages`{'' if sudo else ' as root'}, or\n    {line}"
    return ""


def main() -> int:
    wanted = lacking()
    if not wanted:
        print(f"system-packages: nothing to install, all is there ({', '.join(p.name for p in ALL)})")
        return 0
    for package in wanted:
        print(f"system-packages: {package.name}: {package.purpose}")
    names = [package.name for package in wanted]
    reason = refusal(names, _has_command("apt-get"), os.geteuid() == 0)
    if reason:
        sys.stderr.write(f"system-packages: {reason}\n")
        return 1
    for command in apt_lines(names):
        print(" ".join(command), flush=True)
        if subprocess.run(command, env=os.environ | APT_ENVIRONMENT, check=False).returncode:
            sys.stderr.write("system-packages: apt-get failed: see its output above\n")
            return 1
    if left := lacking(wanted):
        sys.stderr.write(f"system-packages: installed, but still not found: {', '.join(p.name for p in left)}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
