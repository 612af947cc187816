"""Checks of what a relay needs of its host: for `paramserver doctor`, and for the addresses of interfaces.

Every check is a pure judgement of numbers that were read; reading is in `look`.
"""

from __future__ import annotations

import fcntl
import os
import re
import resource
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from paramserver.config import show_apart, show_bytes
from paramserver.data.frames import CONGESTION_CONTROL, tune
from paramserver.memory.mapping import IN_MEMORY, available_memory, mount_of
from paramserver.memory.orphans import Orphan, orphans
from protos.errors import InvalidRequest
from protos.findings import Finding

_SIOCGIFADDR = 0x8915
FILES_MIN = 4096
"""Open files: 256 data connections, the pool's files, gRPC."""
COLLAPSING_KERNEL = (6, 1)
"""From then on the relay makes huge pages on any tmpfs."""
BUFFER_MIN = 4 << 20
"""Bytes of socket buffer that a 100 Gbit/s link with a round trip of 0.3 ms fills."""


@dataclass(frozen=True, slots=True)
class Host:
    """Readings of a host. Sizes in bytes; None: it could not be read."""

    pool_dir: Path
    file_system: str
    free_bytes: int  # with what an earlier life left in this very pool: the next one takes it over
    memory_bytes: int  # that is available, with the same
    huge: str  # the tmpfs's huge= option, "never" without one
    kernel: tuple[int, int]  # Linux's version
    files_max: int
    receive_buffer_max: int | None
    send_buffer_max: int | None
    congestion_control: str  # what a socket of the data port gets
    orphans: tuple[Orphan, ...]  # beside the pool directory


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface. InvalidRequest names those that there are."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise InvalidRequest(
                f"--bind-interface {interface}: {error.strerror}", hint=f"interfaces of this host: {names}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def look(pool_dir: Path) -> Host:
    """Reads this host. The directory need not exist: its nearest parent that does is looked at."""
    existing = next(path for path in (pool_dir, *pool_dir.parents) if path.exists())
    kind, options = mount_of(existing.resolve())
    status = os.statvfs(existing)
    found = tuple(orphans(pool_dir.parent))
    left_bytes = sum(one.size_bytes for one in found if one.directory == pool_dir)
    return Host(
        pool_dir,
        kind,
        status.f_bavail * status.f_frsize + left_bytes,
        available_memory() + left_bytes,
        next((o.removeprefix("huge=") for o in options.split(",") if o.startswith("huge=")), "never"),
        _kernel(os.uname().release),
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        _sysctl("net/core/rmem_max"),
        _sysctl("net/core/wmem_max"),
        _congestion_control(),
        found,
    )


def _kernel(release: str) -> tuple[int, int]:
    """The version in "6.1.0-13-amd64"; (0, 0) where it has none."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def judge(host: Host, pool_bytes: int) -> list[Finding]:
    """Every finding, right or wrong, for a relay whose pool has `pool_bytes`."""
    memory = host.file_system in IN_MEMORY
    fits = not memory or host.memory_bytes >= pool_bytes
    room = f"mount -o remount,size={-(-pool_bytes >> 30) + 1}G ...; in a container, raise --shm-size"
    orphaned = sum(one.size_bytes for one in host.orphans)
    findings = [
        Finding(
            "pool directory in memory",
            memory,
            f"{host.pool_dir} is on {host.file_system}",
            "choose a --pool-dir below /dev/shm, or mount a tmpfs for it",
        ),
        Finding(
            "room for the pool",
            host.free_bytes >= pool_bytes,
            "{} free, {} wanted".format(*show_apart(host.free_bytes, pool_bytes)),
            room if fits else "a smaller --pool-bytes: four times a version is enough",
        ),
        Finding(
            "memory for the pool",
            fits,
            "{} available, {} wanted".format(*show_apart(host.memory_bytes, pool_bytes)),
            "a smaller --pool-bytes, or end what uses the memory: Linux ends processes when it is out",
        ),
        Finding(
            "huge pages on the tmpfs",
            host.huge not in ("never", "0") or host.kernel >= COLLAPSING_KERNEL,
            f"huge={host.huge}, Linux {host.kernel[0]}.{host.kernel[1]}",
            "mount -o remount,huge=within_size ..., or Linux 6.1, on which the relay makes them itself: "
            "the first mapping of a version is then as fast as the next",
            advice=True,
        ),
        Finding(
            "open files",
            host.files_max >= FILES_MIN,
            f"{host.files_max} at most",
            f"ulimit -n {FILES_MIN}, or LimitNOFILE={FILES_MIN} in the unit",
        ),
        Finding(
            "orphaned pools",
            not host.orphans,
            "; ".join(f"{one.directory} ({show_bytes(one.size_bytes)})" for one in host.orphans) or "none",
            f"no relay holds them: {show_bytes(orphaned)} come back with `paramserver clear --pool-dir DIR`; the next "
            "relay of that directory finds its versions",
            advice=True,
        ),
    ]
    findings.append(
        Finding(
            "congestion control",
            host.congestion_control == CONGESTION_CONTROL,
            host.congestion_control,
            f"sysctl -w net.ipv4.tcp_allowed_congestion_control='{CONGESTION_CONTROL} ...': costs less processor time",
            advice=True,
        )
    )
    for name, value in (("rmem_max", host.receive_buffer_max), ("wmem_max", host.send_buffer_max)):
        if value is not None:
            findings.append(
                Finding(
                    f"socket buffers ({name})",
                    value >= BUFFER_MIN,
                    show_bytes(value),
                    f"sysctl -w net.core.{name}={BUFFER_MIN}: one stripe fills a faster link then",
                    advice=True,
                )
            )
    return findings


def judge_clock(offset_s: float, lease_ttl_s: float) -> Finding:
    """How long etcd took to answer, against how long a lease lives without a heartbeat."""
    right = offset_s < lease_ttl_s / 4
    return Finding(
        "etcd answers in time",
        right,
        f"{offset_s * 1000:.0f} ms, leases live {lease_ttl_s:g} s",
        "raise --lease-ttl-s, or put etcd on faster disks and a nearer network",
    )


def _sysctl(name: str) -> int | None:
    path = Path("/proc/sys") / name
    return int(path.read_text()) if path.exists() else None


def _congestion_control() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        tune(probe)
        return probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
