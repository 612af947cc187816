"""Makes `.venv`, ready to run everything in this checkout: `python -m deploy.setup_env`.

Standard library only: it runs before anything is installed.

The heavy part (torch and the rest of requirements.lock) is installed once per lock into
`$LAMINAR_CACHE/envs/` (default `~/.cache/laminar-rl`), outside the checkout, and shared by every checkout. The size of
the download is printed before it starts. `$LAMINAR_TORCH_INDEX` names an index that has torch's CPU build, for when
pip's own index has none. `.venv` itself is thin: a path file leads to the shared packages, and this checkout is
installed in editable form.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

from deploy import downloads

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
VENV = ROOT / ".venv"
NEEDED_BYTES = 4 << 30
"""Disk space required when the size of the download is unknown."""
TOOLS = ("etcd", "etcdctl", "hadolint", "ruff", "lint-imports", "protoc-gen-mypy", "protoc-gen-mypy_grpc")
"""Commands of the shared packages that this checkout's targets run by name."""


def fail(problem: str, remedy: str) -> None:
    sys.exit(f"setup: {problem}\n       {remedy}")


def cache_dir() -> Path:
    return Path(os.environ.get("LAMINAR_CACHE") or Path.home() / ".cache" / "laminar-rl")


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def python_tag() -> str:
    """With the patch release, since packages may differ between two of one minor release: redis wants async-timeout
    before 3.11.3."""
    return f"py{platform.python_version()}-{platform.machine()}"


def pip(*arguments: str) -> None:
    """Runs pip quietly; on failure shows pip's own output."""
    done = subprocess.run(
        [*arguments, "--quiet", "--disable-pip-version-check"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    if done.returncode:
        tail = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("WARNING"))[-3000:]
        fail(
            f"pip failed:\n{tail}",
            "Check the network and the package index that pip uses (`pip config list`), then run the command again.",
        )


def shared_environment(lock: Path = LOCK, prefix: str = "", finish: Callable[[Path], None] | None = None) -> Path:
    """The cached environment of `lock`; installed now if it is not there yet. Safe under concurrent calls.

    `finish` completes a new environment. A lock that has one lists all packages: pip does not resolve dependencies.
    """
    target = cache_dir() / "envs" / f"{prefix}{python_tag()}-{digest(lock.read_bytes())}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{target}.lock", "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if (target / ".complete").exists():
            return target
        shutil.rmtree(target, ignore_errors=True)
        make_venv(target)
        alone = ("--no-deps",) if finish else ()
        _install(target, (*alone, "--requirement", str(lock), *torch_index()), is_complete=not alone)
        if finish:
            finish(target)
        (target / ".complete").touch()
        return target


def torch_index() -> tuple[str, ...]:
    """pip's options for torch's other index. pip prefers its CPU build, since `+cpu` sorts above the plain version."""
    index = os.environ.get("LAMINAR_TORCH_INDEX")
    return ("--extra-index-url", index) if index else ()


def make_venv(target: Path, *options: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "venv", *options, str(target)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        fail(
            f"{sys.executable} cannot make a virtual environment:\n{(done.stdout + done.stderr).strip()[-1000:]}",
            "On Debian and Ubuntu `make system-packages`, as root, installs what it lacks.",
        )


def _install(target: Path, arguments: tuple[str, ...], is_complete: bool) -> None:
    """`is_complete`: pip resolves dependencies as well."""
    python = str(target / "bin" / "python")
    print("setup: finding out what there is to download (under a minute) ...", flush=True)
    pip(python, "-m", "pip", "install", downloads.PIP)
    found = downloads.resolve([python, "-m", "pip", "--disable-pip-version-check"], arguments)
    if found and not is_complete and found.wants_cuda(platform.machine()):
        fail(
            f"the package index offers torch {found.torch} for CUDA only, and this environment has no CUDA",
            f"Set LAMINAR_TORCH_INDEX={downloads.CPU_INDEX} and run the command again.",
        )
    needed = NEEDED_BYTES if found is None else found.disk_bytes
    if shutil.disk_usage(target).free < needed:
        fail(
            f"less than {needed / 2**30:.0f} GiB free under {target.parent}",
            "Free some space, or set LAMINAR_CACHE to a folder on a larger disk.",
        )
    size = "of unknown size: pip does not give it" if found is None else downloads.described(found)
    count = f" {len(found.files)}" if found else ""
    print(f"setup: installing{count} packages into {target} (once, some minutes): {size} ...", flush=True)
    # What is resolved is not resolved again. Compiling every file of every package would take nearly as long as the
    # rest, and most are never imported: Python compiles those that are.
    exact = arguments if found is None else ("--no-deps", *downloads.pins(found), *torch_index())
    pip(python, "-m", "pip", "install", "--no-compile", *exact)


def thin_environment(shared: Path, venv: Path = VENV, tools: Sequence[str] = TOOLS) -> None:
    """`venv`: the shared packages through a path file, this checkout in editable form, its commands in bin."""
    stamp = venv / ".stamp"
    built_from = [
        path.read_bytes()
        for path in (ROOT / "pyproject.toml", ROOT / "hatch_build.py", *sorted(ROOT.glob("paramserver/data/*.[ch]")))
    ]
    wanted = f"{shared}\n{ROOT}\n{digest(*built_from, repr(tools).encode())}"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    if venv.is_symlink():
        fail(
            f"{venv} is a link to {venv.resolve()}", "It would be emptied: remove the link, and run the command again."
        )
    print(f"setup: making {venv}", flush=True)
    make_venv(venv, "--without-pip", "--clear")
    relative = Path(sysconfig.get_path("purelib", "venv", {"base": "", "platbase": ""}).lstrip("/"))
    (venv / relative / "laminar_shared.pth").write_text(f"{shared / relative}\n")
    python = str(venv / "bin" / "python")
    editable = ("install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    pip(str(shared / "bin" / "python"), "-m", "pip", "--python", python, *editable)
    for tool in tools:
        (venv / "bin" / tool).symlink_to(shared / "bin" / tool)
    stamp.write_text(wanted)


def main() -> None:
    if sys.version_info < (3, 11):
        fail(
            f"Python 3.11 or newer is needed; {sys.executable} is {platform.python_version()}",
            "Install one and name it: make PYTHON=python3.12 ...",
        )
    if sys.platform != "linux":
        fail(
            f"Linux is needed (shared memory, file leases); this is {sys.platform}",
            "Use a Linux host or container.",
        )
    thin_environment(shared_environment())


if __name__ == "__main__":
    main()
