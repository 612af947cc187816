"""How an etcd is reached that does not take everybody: TLS, user and password, and the prefix of our keys there.

Invariant: a password comes from a file or from the environment, and is read again whenever it is used.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click

from protos.access.secret_file import read_public, read_secret
from protos.errors import InvalidRequest
from protos.options import Flag

PASSWORD_VARIABLE = "LAMINAR_ETCD_PASSWORD"  # noqa: S105 - its name, not a password
PASSWORD_BYTES_MAX = 4 << 10
CA_BYTES_MAX = 1 << 20
FILE = click.Path(dir_okay=False, path_type=Path)
_PREFIX = re.compile(r"(/[A-Za-z0-9._-]+)+")


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """Options of every daemon that has `--etcd`."""

    etcd_cacert: Annotated[
        Path | None, FILE, "The CA of etcd's certificate: with it etcd is called by TLS, without in the clear."
    ] = None
    etcd_user: Annotated[str, "User at etcd, where it has authentication switched on."] = ""
    etcd_password_file: Annotated[
        Path | None,
        FILE,
        Flag(show_default=f"the password is in {PASSWORD_VARIABLE}"),
        "File with that user's password. It is read again at each sign-in.",
    ] = None
    etcd_prefix: Annotated[
        str, "What all keys in etcd begin with, before `/laminar`: fleets with different ones share an etcd."
    ] = ""

    def __post_init__(self) -> None:
        if self.etcd_prefix and not _PREFIX.fullmatch(self.etcd_prefix):
            raise InvalidRequest(
                f"--etcd-prefix {self.etcd_prefix[:80]!r} is no prefix of keys",
                hint="such as /team-a, without a / at its end",
            )
        if self.etcd_password_file is not None and not self.etcd_user:
            raise InvalidRequest("--etcd-password-file without --etcd-user", hint="add --etcd-user NAME")

    def ca(self) -> bytes | None:
        """InvalidRequest where the file cannot be read."""
        if self.etcd_cacert is None:
            return None
        hint = "--etcd-cacert takes the certificate of etcd's CA, as PEM"
        return read_public(self.etcd_cacert, CA_BYTES_MAX, what="a certificate", hint=hint)[0]

    def password(self) -> str:
        """InvalidRequest where there is none, or others may read its file."""
        if self.etcd_password_file is None:
            found = os.environ.get(PASSWORD_VARIABLE, "")
        else:
            hint = "--etcd-password-file takes a file with a password"
            raw, _ = read_secret(self.etcd_password_file, PASSWORD_BYTES_MAX, what="a password", hint=hint)
            found = raw.decode("utf-8", "replace").strip()
        if not found:
            raise InvalidRequest(
                f"no password for --etcd-user {self.etcd_user}", hint=f"--etcd-password-file, or {PASSWORD_VARIABLE}"
            )
        return found


EVERYBODY = EtcdAccess()
"""An etcd without TLS and users."""
