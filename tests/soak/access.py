"""Who may do what in a soak: certificates at its relays, API keys at its gateways.

Invariants:
- both are made as an operator makes them, anew for each run;
- each process has the least role that serves: the judge pins snapshots, as what runs beside an engine does; and each
  relay's certificate is for its own address.
"""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.setup_env import ROOT

KEY_ROLES = {"runner": "agent", "trainer": "trainer"}
"""Roles of API keys, by the kind of process that has one."""


class Access:
    """The credentials and keys of one fleet, in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.fleet = directory / "credentials"
        self.elsewhere = directory / "credentials-elsewhere"
        """Of another fleet, which strangers come from."""
        self.key_file = directory / "api-keys"
        self.keys = {kind: secrets.token_urlsafe(24) for kind in KEY_ROLES}

    def of(self, holder: str) -> Path:
        """The directory of a holder: `relay-1`, `gateway-1`, or one of those that `init` names after roles."""
        return self.fleet / holder

    async def make(self, relays: Mapping[str, Sequence[str]], gateways: Sequence[str]) -> None:
        """`relays`: the addresses of each. CalledProcessError where a command failed."""
        self.key_file.touch(mode=0o600)
        self.key_file.write_text("".join(f"{role} {kind} {self.keys[kind]}\n" for kind, role in KEY_ROLES.items()))
        for fleet in (self.fleet, self.elsewhere):
            await _credentials("init", str(fleet))
        for name, hosts in relays.items():
            await _credentials("issue", str(self.fleet), "relay", name, *(f"--host={host}" for host in hosts))
        for name in gateways:
            await _credentials("issue", str(self.fleet), "gateway", name)


async def _credentials(*words: str) -> None:
    argv = (sys.executable, "-m", "paramserver", "credentials", *words)
    process = await asyncio.create_subprocess_exec(
        *argv, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await process.communicate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, argv, said)
