"""Hosts of their own on one machine: network namespaces of `tests.support.links`, each with file systems of its own.

    with own_hosts(2) as (net, first, second):
        etcd = net.start_etcd(directory)
        relay = start_relay("a", first, etcd.ready["etcd"], directory)   # its pool lies in /dev/shm of that host alone
        subprocess.run([*second.prefix, sys.executable, ...])            # a process of the other host

So two hosts have the same paths and the same ports, and see neither each other's files nor sockets: as machines of a
fleet that were set up alike. What a test shares with them (logs, ready files) lies outside of PRIVATE.

Invariants: a host's mounts live as long as its keeper, a process that does nothing else; they go with the hosts.
Needs what `links.missing()` names.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.links import Host, Net
from tests.support.processes import Daemon, start
from tests.support.relays import PATIENT

PRIVATE = ("/dev/shm", "/run")
"""Where each host has an empty file system of its own."""
POOL_DIR = "/dev/shm/laminar"
GRPC_PORT, DATA_PORT = 7070, 7071  # nobody else listens in a namespace that was made for the test
_KEEP = 'for each; do mount -t tmpfs laminar-test "$each"; done; echo ready; exec cat'


@dataclass(eq=False)
class OwnHost(Host):
    """A host whose PRIVATE is its own; `keeper` keeps the mounts."""

    keeper: subprocess.Popen[str]

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("nsenter", f"--target={self.keeper.pid}", "--mount", "--net", "--")

    def path(self, path: str) -> Path:
        """A path of this host, as this process reaches it."""
        return Path(f"/proc/{self.keeper.pid}/root{path}")


@contextlib.contextmanager
def own_hosts(num_hosts: int) -> Iterator[tuple[Net, *tuple[OwnHost, ...]]]:
    """A net and its hosts."""
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(Net(num_hosts))
        yield (net, *(stack.enter_context(_own(host)) for host in net.hosts))


@contextlib.contextmanager
def _own(host: Host) -> Iterator[OwnHost]:
    command = [*host.prefix, "unshare", "--mount", "--propagation=private", "sh", "-ec", _KEEP, "sh", *PRIVATE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None
        if keeper.stdout.readline() != "ready\n":
            raise RuntimeError(f"no file systems of its own on {host.namespace}: {' '.join(command)}")
        yield OwnHost(host.number, host.namespace, host.address, host.port, keeper)
        keeper.kill()  # `cat` also ends by itself when this process does


def start_relay(name: str, on: OwnHost, etcd: str, directory: Path, *flags: str, pool_bytes: str = "64MiB") -> Daemon:
    """A relay with the pool and the ports that a relay has on each of these hosts."""
    return start(
        f"relay-{name}",
        [
            *("paramserver", "serve", "--name", name, "--etcd", etcd, "--host", on.address, "--insecure"),
            *("--port", str(GRPC_PORT), "--data-port", str(DATA_PORT)),
            *("--pool-dir", POOL_DIR, "--pool-bytes", pool_bytes, *PATIENT, *flags),
        ],
        directory,
        prefix=on.prefix,
    )
