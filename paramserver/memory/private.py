"""Who may read a relay's directories: its user, and one group if it is named. For versions in memory and on disk.

The mode of the directory guards all that is in it, whatever the files' own modes. In one that a group may read, what
is made belongs to that group, too.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from protos.errors import InvalidRequest, Unavailable

log = logging.getLogger(__name__)

OWNER_ALONE, WITH_GROUP = 0o700, 0o2750


def keep_private(directory: Path, group: int | None, option: str) -> None:
    """Makes the directory, and lets nobody else into it. InvalidRequest where it is another user's, who could exchange
    what is in it, and where this user cannot give it to the group. `option` names the directory in hints."""
    try:
        directory.mkdir(mode=OWNER_ALONE, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        raise Unavailable(f"cannot use {directory}: {error.strerror}", hint=f"choose another {option}") from error
    if status.st_uid not in (0, os.geteuid()):
        raise InvalidRequest(f"{directory} belongs to another user", hint=f"choose another {option}")
    try:
        if group is not None:
            os.chown(directory, -1, group)
        directory.chmod(OWNER_ALONE if group is None else WITH_GROUP)
    except PermissionError as error:
        if group is not None:
            raise InvalidRequest(
                f"cannot give {directory} to the group of --group: {error.strerror}",
                hint="the relay's user has to own it and be in the group",
            ) from error
        if status.st_mode & stat.S_IRWXO:  # a volume that somebody mounted, and that is root's
            log.warning(
                "others may read the versions in %s: it is not this user's, which so cannot change it", directory
            )
