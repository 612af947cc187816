"""Hosts of their own on one machine: network namespaces of `tests.support.links`, each with file systems of its own.

    with own_hosts(2) as (net, first, second):
        etcd = net.start_etcd(directory)
        relay = start_relay("a", first, etcd.ready["etcd"], directory)   # its pool lies in /dev/shm of that host alone
        subprocess.run([*second.prefix, sys.executable, ...])            # a process of the other host

So two hosts have the same paths and the same ports, and see neither each other's files nor sockets: as machines of a
fleet that were set up alike. What a test shares with them (logs, ready files) lies outside of PRIVATE.

Invariants: a host's mounts live as long as its keeper, a process that does nothing else; they go with the hosts, and
with whoever made them. Needs what `links.missing()` names; mounts alone what `skips.cannot_mount()` does.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.links import Host, Net
from tests.support.processes import Daemon, start
from tests.support.relays import PATIENT

PRIVATE = ("/dev/shm", "/run")
"""Where each host has an empty file system of its own."""
POOL_DIR = "/dev/shm/laminar"
GRPC_PORT, DATA_PORT = 7070, 7071  # nobody else listens in a namespace that was made for the test
_NSENTER = shutil.which("nsenter") or "nsenter"
_KEEP = 'how=$1; shift; for each; do mount -t tmpfs -o "$how" laminar-test "$each"; done; echo ready; exec cat'


@dataclass(eq=False)
class Mounts:
    """File systems of their own for the processes that `prefix` starts; `keeper` keeps them."""

    keeper: subprocess.Popen[str]

    @property
    def prefix(self) -> tuple[str, ...]:
        return (_NSENTER, f"--target={self.keeper.pid}", "--mount", "--net", f"--wd={Path.cwd()}", "--")

    def path(self, path: Path | str) -> Path:
        """A path there, as this process reaches it."""
        return Path(f"/proc/{self.keeper.pid}/root{path}")


@dataclass(eq=False)
class OwnHost(Host):
    """A host whose PRIVATE is its own."""

    mounts: Mounts

    @property
    def prefix(self) -> tuple[str, ...]:
        return self.mounts.prefix

    def path(self, path: str) -> Path:
        return self.mounts.path(path)


@contextlib.contextmanager
def own_hosts(num_hosts: int) -> Iterator[tuple[Net, *tuple[OwnHost, ...]]]:
    """A net and its hosts."""
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(Net(num_hosts))
        own = [(host, stack.enter_context(own_mounts(*PRIVATE, within=host.prefix))) for host in net.hosts]
        yield (net, *(OwnHost(host.number, host.namespace, host.address, host.port, mounts) for host, mounts in own))


@contextlib.contextmanager
def own_mounts(*directories: Path | str, how: str = "rw", within: Sequence[str] = ()) -> Iterator[Mounts]:
    """An empty file system at each of `directories`, mounted with the options `how`; `within` is a host's prefix."""
    command = [*within, "unshare", "--mount", "--propagation=private", "sh", "-ec", _KEEP, "sh", how]
    command += map(str, directories)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None
        if keeper.stdout.readline() != "ready\n":
            raise RuntimeError(f"no file systems of its own: {' '.join(command)}")
        try:
            yield Mounts(keeper)
        finally:
            keeper.kill()  # `cat` also ends by itself when this process does


def start_relay(
    name: str,
    on: OwnHost,
    etcd: str,
    directory: Path,
    *flags: str,
    pool_bytes: str = "64MiB",
    python: Sequence[str] = (sys.executable,),
) -> Daemon:
    """A relay with the pool and the ports that a relay has on each of these hosts; `python`: of another release."""
    return start(
        f"relay-{name}",
        [
            *("paramserver", "serve", "--name", name, "--etcd", etcd, "--host", on.address),
            *("--port", str(GRPC_PORT), "--data-port", str(DATA_PORT)),
            *("--pool-dir", POOL_DIR, "--pool-bytes", pool_bytes, *PATIENT, *flags),
        ],
        directory,
        env={"PARAMSERVER_SERVE_INSECURE": "1"},  # not as a flag: the release before has none
        prefix=on.prefix,
        python=python,
    )
