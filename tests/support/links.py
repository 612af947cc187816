"""Several hosts on one machine, for tests and benchmarks: network namespaces, each with a cable to one switch.

    with Net(8, rate_bit_s=1e9) as net:
        etcd = net.start_etcd(directory)                    # at the switch, reached from every host
        relay = start(..., prefix=net.hosts[0].prefix)      # a process on a host; it listens on `host.address`
        net.hosts[0].cut("both"); net.hosts[0].restore()

Invariants:
- whoever made a net removes it, on any way out of `with` and at exit; what a killed process left behind is removed
  by the next net that is made, processes in its namespaces included (its names carry the maker's pid);
- a rate holds for each direction of a host's cable, with a burst so small that any transfer of some MiB has drained
  it (`tbf`); the switch itself has no limit;
- a cut cable loses packets silently, as a broken switch port does: no reset, no carrier loss seen by the host.

Needs root and `ip`, `tc`, `iptables`; `missing()` says what is not there. Delay and loss are not offered: the
kernels this runs on have no `netem`.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from paramserver.membership.local import find_etcd, free_port
from protos.process import TIED
from tests.support.processes import Daemon
from tests.support.skips import cannot_mount, needs

TOOLS = ("ip", "tc", "iptables")
BURST_BYTES = 160 << 10  # a little more than two of the kernel's largest packets: a smaller burst cuts each into
# frames of 1500 bytes, and many hosts on few cores are then bound by packets, not by the rate; 1.3 ms of 1 Gbit/s
QUEUE_BYTES = 4 << 20  # a switch port's buffer: deep enough that TCP fills the link, small enough to stay honest
QUEUE_S = 0.3  # of a slow link it holds no more than this: three seconds of packets in a port look like a dead host
SUBNETS = range(1, 255)  # 10.77.N.0/24
_NAME = re.compile(r"lm(\d+)-[0-9a-z]{2}")
_LOCK = Path(tempfile.gettempdir()) / "laminar-links.lock"
_serial = itertools.count()

Direction = Literal["both", "in", "out"]


def missing() -> str:
    """Why no net can be made here; "" when it can."""
    if sys.platform != "linux":
        return needs("network namespaces need Linux", "run it on Linux")
    if reason := cannot_mount():
        return reason
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return needs(f"not installed: {', '.join(absent)}", "`make system-packages`")
    probe = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    if probe.returncode:
        return needs(f"no network namespaces: {probe.stderr.strip()}", "a kernel with CONFIG_NET_NS")
    return ""


@dataclass(eq=False)
class Host:
    """One namespace: its processes are started with `prefix` before their command, and listen on `address`."""

    number: int
    namespace: str
    address: str
    port: str
    """The switch's end of the cable; the host's end is its eth0."""

    @property
    def prefix(self) -> tuple[str, ...]:
        """Puts a command on this host; the process keeps the pid of the one that was started."""
        return ("ip", "netns", "exec", self.namespace)

    def limit(self, rate_bit_s: float | None, direction: Direction = "both") -> None:
        """Bits per second each way, as seen from the host; None: no limit."""
        if direction in ("both", "out"):
            _limit(["-n", self.namespace], "eth0", rate_bit_s)
        if direction in ("both", "in"):
            _limit([], self.port, rate_bit_s)

    def cut(self, direction: Direction = "both") -> None:
        """Drops what this host sends ("out"), what is sent to it ("in"), or both, from now on."""
        if direction in ("both", "in"):
            self._iptables("-A", "INPUT", "-i", "eth0", "-j", "DROP")
        if direction in ("both", "out"):
            self._iptables("-A", "OUTPUT", "-o", "eth0", "-j", "DROP")

    def restore(self) -> None:
        """Ends every cut; limits stay."""
        self._iptables("-F")

    def pids(self) -> list[int]:
        """Processes on this host."""
        done = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False)
        return [int(line) for line in done.stdout.split()]

    def bytes_sent(self) -> int:
        """What left this host's cable since it was made, headers included."""
        return self._counter("rx_bytes")

    def bytes_received(self) -> int:
        return self._counter("tx_bytes")

    def _counter(self, name: str) -> int:
        return int(Path(f"/sys/class/net/{self.port}/statistics/{name}").read_text())

    def _iptables(self, *arguments: str) -> None:
        _run(*self.prefix, "iptables", "-w", *arguments)


class Net:
    """`num_hosts` hosts on one switch. The maker's own namespace is at the switch too, with `address`, unlimited."""

    def __init__(self, num_hosts: int, *, rate_bit_s: float | None = None) -> None:
        reason = missing()
        if reason:
            raise RuntimeError(reason)
        self.name = f"lm{os.getpid()}-{_base36(next(_serial) % 1000)}"
        self.switch = f"{self.name}b"
        self.hosts: list[Host] = []
        self._daemons: list[subprocess.Popen[bytes]] = []
        atexit.register(self.close)
        try:
            with _one_at_a_time():
                sweep()
                self.subnet = _free_subnet()
                self.address = f"{self.subnet}.1"
                _run("ip", "link", "add", self.switch, "type", "bridge")
                _run("ip", "addr", "add", f"{self.address}/24", "dev", self.switch)
            _run("ip", "link", "set", self.switch, "up")
            for number in range(num_hosts):
                self._add(number)
                self.hosts[-1].limit(rate_bit_s)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start_etcd(self, directory: Path) -> Daemon:
        """A real etcd at the switch, its data under `directory`; `ready["etcd"]` is its address on the net."""
        port = free_port()
        endpoint, peer = f"{self.address}:{port}", f"http://127.0.0.1:{free_port(besides=port)}"
        log_path = directory / f"{self.name}-etcd.log"
        command = [
            *(sys.executable, "-I", "-S", TIED, str(find_etcd())),
            f"--data-dir={directory / self.name}-etcd",
            "--name=links",
            f"--listen-client-urls=http://{endpoint}",
            f"--advertise-client-urls=http://{endpoint}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=links={peer}",
            "--log-level=error",
        ]
        with log_path.open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._daemons.append(process)
        daemon = Daemon("etcd", process, log_path, {"etcd": endpoint})
        _wait_listening(daemon, self.address, int(endpoint.rpartition(":")[2]))
        return daemon

    def close(self) -> None:
        """Kills what still runs on the hosts, and removes every part of the net. May be called again."""
        atexit.unregister(self.close)
        for process in self._daemons:
            if process.poll() is None:
                process.kill()
                process.wait()
        _remove(self.name)

    def _add(self, number: int) -> None:
        namespace, port, address = f"{self.name}n{number}", f"{self.name}h{number}", f"{self.subnet}.{10 + number}"
        _run("ip", "netns", "add", namespace)
        _run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _run("ip", "link", "set", port, "master", self.switch, "up")
        _run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        _run("ip", "-n", namespace, "link", "set", "eth0", "up")
        _run("ip", "-n", namespace, "link", "set", "lo", "up")
        self.hosts.append(Host(number, namespace, address, port))


def sweep() -> None:
    """Removes nets whose makers are dead, with the processes that still run on their hosts."""
    for name in _names():
        found = _NAME.fullmatch(name)
        if found is not None and not Path(f"/proc/{found[1]}").exists():
            _remove(name)


def _names() -> set[str]:
    """Nets of which any part is there."""
    parts = [*_listed("ip", "netns", "list"), *(path.name for path in Path("/sys/class/net").iterdir())]
    return {found[1] for part in parts if (found := re.fullmatch(r"(lm\d+-[0-9a-z]{2})(?:b|[nh]\d+)", part))}


def _remove(name: str) -> None:
    for namespace in _listed("ip", "netns", "list"):
        if re.fullmatch(rf"{name}n\d+", namespace):
            for pid in _listed("ip", "netns", "pids", namespace):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
    for path in Path("/sys/class/net").iterdir():
        if re.fullmatch(rf"{name}(b|h\d+)", path.name):
            subprocess.run(["ip", "link", "del", path.name], capture_output=True, check=False)


def _limit(where: Sequence[str], device: str, rate_bit_s: float | None) -> None:
    tc = ["tc", *where, "qdisc"]
    if rate_bit_s is None:
        subprocess.run([*tc, "del", "dev", device, "root"], capture_output=True, check=False)
        return
    queue_bytes = min(QUEUE_BYTES, BURST_BYTES + round(QUEUE_S * rate_bit_s / 8))
    shape = ("tbf", "rate", f"{round(rate_bit_s)}bit", "burst", str(BURST_BYTES), "limit", str(queue_bytes))
    _run(*tc, "replace", "dev", device, "root", *shape)


def _free_subnet() -> str:
    taken = "\n".join(_listed("ip", "-4", "-o", "addr", whole_lines=True))
    return next(f"10.77.{n}" for n in SUBNETS if f" 10.77.{n}." not in taken)


def _listed(*command: str, whole_lines: bool = False) -> list[str]:
    """The lines that the command prints, or the first word of each."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    return lines if whole_lines else [line.split()[0] for line in lines]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Two makers must not choose the same subnet."""
    with _LOCK.open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        yield


def _base36(number: int) -> str:
    digits = "0123456789acdefgijklmopqrstuvwxyz"  # without the letters that end a part's name: b, h, n
    high, low = divmod(number, len(digits))
    return digits[high % len(digits)] + digits[low]


def _wait_listening(daemon: Daemon, host: str, port: int, timeout_s: float = 180.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, port), 1.0):
            return
        if daemon.process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"{daemon.name} does not listen on {host}:{port}:\n{daemon.log()[-2000:]}")
        time.sleep(0.02)
