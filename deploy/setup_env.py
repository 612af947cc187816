"""Makes `.venv`, ready to run everything in this checkout. Standard library only: it runs before anything is installed.

The heavy part (torch and the rest of requirements.lock) is installed once per lock into
`$LAMINAR_CACHE/envs/` (default `~/.cache/laminar-rl`), outside the checkout, and shared by every checkout.
`.venv` itself is thin: the shared packages through a path file, and this checkout installed in editable form.
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

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
VENV = ROOT / ".venv"
NEEDED_BYTES = 4 << 30
TOOLS = ("etcd", "etcdctl", "ruff", "lint-imports", "protoc-gen-mypy", "protoc-gen-mypy_grpc")
"""Commands of the shared packages that this checkout's targets run by name."""


def fail(problem: str, remedy: str) -> None:
    sys.exit(f"setup: {problem}\n       {remedy}")


def cache_dir() -> Path:
    return Path(os.environ.get("LAMINAR_CACHE") or Path.home() / ".cache" / "laminar-rl")


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def python_tag() -> str:
    return f"py{sys.version_info.major}{sys.version_info.minor}-{platform.machine()}"


def pip(*arguments: str) -> None:
    """Runs pip quietly; on failure its own output is what the user needs to see."""
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

    `finish` has the last hand on a new one; a lock with one is complete in itself, dependencies are not looked at.
    """
    target = cache_dir() / "envs" / f"{prefix}{python_tag()}-{digest(lock.read_bytes())}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{target}.lock", "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if (target / ".complete").exists():
            return target
        if shutil.disk_usage(target.parent).free < NEEDED_BYTES:
            fail(
                f"less than {NEEDED_BYTES >> 30} GiB free under {target.parent}",
                "Free some space, or set LAMINAR_CACHE to a folder on a larger disk.",
            )
        count = sum(1 for line in lock.read_text().splitlines() if line and not line.startswith("#"))
        print(
            f"setup: installing {count} packages into {target} (once; some minutes, 2 to 4 GB) ...",
            flush=True,
        )
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(target)], check=True)
        alone = ("--no-deps",) if finish else ()
        pip(str(target / "bin" / "python"), "-m", "pip", "install", *alone, "--requirement", str(lock))
        if finish:
            finish(target)
        (target / ".complete").touch()
        return target


def thin_environment(shared: Path, venv: Path = VENV, tools: Sequence[str] = TOOLS) -> None:
    """`venv`: the shared packages through a path file, this checkout in editable form, its commands in bin."""
    stamp = venv / ".stamp"
    wanted = f"{shared}\n{ROOT}\n{digest((ROOT / 'pyproject.toml').read_bytes(), repr(tools).encode())}"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    if venv.is_symlink():
        fail(
            f"{venv} is a link to {venv.resolve()}", "It would be emptied: remove the link, and run the command again."
        )
    print(f"setup: making {venv}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--clear", str(venv)], check=True)
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
