"""File systems of a bounded size for the parts of a soak, and how they are filled. Linux, as root.

Each is a tmpfs in a mount namespace of the soak's own, so that none outlives it, however it ends. What is synced there
costs no disk: the soak kills processes, and no machine.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from pathlib import Path

from tests.support.skips import cannot_mount

BALLAST = "somebody-elses"
GRAIN_BYTES = 4096
_INSIDE = "LAMINAR_SOAK_NAMESPACE"


def enter_namespace() -> str:
    """Starts this program again in a mount namespace of its own. Returns "" once it is there, or why it cannot be."""
    reason = cannot_mount()
    if not reason and not os.environ.get(_INSIDE):
        os.environ[_INSIDE] = "1"
        os.execvp("unshare", ["unshare", "--mount", sys.executable, "-m", "tests.soak", *sys.argv[1:]])
    return reason


def mount(directory: Path, num_bytes: int) -> None:
    directory.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes},mode=700", "soak", str(directory)], check=True)


def unmount(directory: Path) -> None:
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


def fill(directory: Path) -> None:
    """Takes what is left there; called again, what has become free meanwhile."""
    with (directory / BALLAST).open("ab", buffering=0) as file:
        size = 1 << 20
        while size >= GRAIN_BYTES:
            try:
                os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                size //= 2


def empty(directory: Path) -> None:
    (directory / BALLAST).unlink(missing_ok=True)


def used_bytes(directory: Path) -> int:
    """Without the ballast."""
    found = os.statvfs(directory)
    used = (found.f_blocks - found.f_bfree) * found.f_frsize
    with contextlib.suppress(FileNotFoundError):
        used -= (directory / BALLAST).stat().st_blocks * 512
    return used
