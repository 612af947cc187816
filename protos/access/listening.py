"""Where a daemon listens: off this host only with credentials, or where its operator says that none are needed.

The unix socket of a relay is no matter of `--host`: the mode of its directory protects it.
"""

from __future__ import annotations

import ipaddress
import logging

from protos.errors import InvalidRequest

INSECURE = "Serve other hosts without credentials: whoever reaches the port may do everything."
"""The help of `--insecure`."""


def is_loopback(host: str) -> bool:
    """Whether only this host reaches a daemon that listens on `host`. A name other than localhost is not resolved: what
    it means may change."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def check_listening(program: str, host: str, *, insecure: bool, has_keys: bool = False, mend: str) -> None:
    """Raises InvalidRequest where `program` would serve other hosts and nobody has decided who may use it; `mend` names
    the options that decide it."""
    if not (is_loopback(host) or insecure or has_keys):
        raise InvalidRequest(
            f"{program} on {host or 'every address'} would serve whoever reaches it, without credentials", hint=mend
        )


def warn_insecure(log: logging.Logger, program: str, host: str) -> None:
    """The line that stands in the log at every start with `--insecure`."""
    log.warning("--insecure: %s on %s takes no credentials; whoever reaches it may do everything", program, host)
