"""The configuration of a relay: one frozen value per process, resolved once by the command line.

Each field is an option of `paramserver serve`, made by `protos.options` from its annotation and default.
"""

from __future__ import annotations

import getpass
import re
import socket
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from protos.access.credentials import CREDENTIALS_VARIABLE
from protos.access.etcd import EtcdAccess
from protos.access.listening import INSECURE, is_loopback
from protos.engines import ENGINE_KINDS, check_kind, is_address
from protos.errors import InvalidRequest
from protos.options import DIRECTORY, PORT, Flag, HostPort, Size
from protos.telemetry.options import TelemetryConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_PORT_BEHIND = re.compile(r"@[0-9]{1,5}$")

_ANY_ADDRESS = ("0.0.0.0", "::", "[::]", "")  # noqa: S104 - compared with, not bound


CHUNK_BYTES_MIN, CHUNK_BYTES_MAX = 4096, 1 << 30  # a publisher and each stripe hold one; frames count in 32 bits
LEASE_TTL_MAX_S = 3600.0
SILENCE_MAX_S = 60.0
OWN_ETCD = ".etcd"
RATE_MIN = 256 << 10  # bytes go in pieces of 64 KiB, on two stripes, and silence of half a second is death


@dataclass(frozen=True, slots=True)
class EngineBeside:
    """An engine on this host, to be registered for gateways. `port`: for the port of TLS in front of it; 0: any free
    one, None: none was named."""

    kind: str
    url: str
    port: int | None = None

    @classmethod
    def parse(cls, text: str) -> EngineBeside:
        """`KIND=URL[@PORT]`, as `--engine` takes it."""
        kind, _, address = text.partition("=")
        url, at, port = address.rpartition("@") if _PORT_BEHIND.search(address) else (address, "", "")
        if not (kind and is_address(url) and (not at or int(port) < 65536)):
            raise InvalidRequest(
                f"--engine {text!r} is not KIND=URL[@PORT]", hint="such as vllm=http://127.0.0.1:8000@8443"
            )
        check_kind(kind, f"--engine {text!r}")
        return cls(kind, url.rstrip("/"), int(port) if at else None)

    @property
    def on_loopback(self) -> bool:
        """Whether only this host reaches it: others need a port in front of it."""
        return is_loopback(urlsplit(self.url).hostname or "")

    def name(self, relay: str) -> str:
        """The engine's name: unique, since the relay's is, and the same after a restart of the relay."""
        parts = urlsplit(self.url)
        return f"{relay}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """The options of `paramserver serve`, in the order of its help. Times in seconds, sizes in bytes."""

    name: Annotated[
        str,
        Flag(required=False, default=socket.gethostname, show_default="this host's name"),
        "Name of this relay: unique among relays, and the same after a restart.",
    ]
    etcd: Annotated[
        str,
        HostPort(),
        Flag(required=False),
        "HOST:PORT of etcd. Without it, one of its own runs on loopback, its data in POOL_DIR.etcd.",
    ]
    _: KW_ONLY
    etcd_access: EtcdAccess = field(default_factory=EtcdAccess)
    host: Annotated[str, "Address to listen on, and by which other relays reach this one."] = "127.0.0.1"
    advertise: Annotated[
        str, "Address or name by which other relays reach this one instead, as with --host 0.0.0.0."
    ] = ""
    credentials: Annotated[
        Path | None,
        DIRECTORY,
        Flag(envvar=CREDENTIALS_VARIABLE, show_envvar=True),
        "A relay's credentials (`paramserver credentials` makes them): gRPC by mutual TLS alone, and bytes sealed by "
        "keys that follow from the fleet key. They are read again when they change.",
    ] = None
    data_tls: Annotated[
        bool, "With --credentials: bytes by mutual TLS, too, on connections to this relay and from it."
    ] = False
    insecure: Annotated[bool, INSECURE] = False
    port: Annotated[int, PORT, "gRPC port; 0: any free one."] = 0
    data_port: Annotated[int, PORT, "Port for bytes; 0: any free one."] = 0
    engines: Annotated[
        tuple[EngineBeside, ...],
        Flag("--engine", metavar="KIND=URL[@PORT]"),
        f"An engine on this host, registered for gateways with the same --etcd; KIND: {', '.join(ENGINE_KINDS)}. With "
        "--credentials one on loopback is registered by a port of this relay, PORT or any free one, which takes mutual "
        "TLS and leads to it.",
    ] = ()
    publish_host: Annotated[
        bool, "Candidate for master. Another relay becomes master only when no candidate is left."
    ] = True
    zone: Annotated[str, "Where this host is: relays of a zone are neighbours in the chain."] = ""
    rack: Annotated[str, "Where in its zone: relays of a rack are neighbours too."] = ""
    pool_dir: Annotated[
        Path,
        DIRECTORY,
        Flag(required=False, show_default="/dev/shm/laminar-USER/NAME"),  # noqa: S108 - help text
        "Directory in a tmpfs for snapshots.",
    ]
    group: Annotated[
        str,
        Flag(show_default="this user alone"),
        "Group whose members may read the versions in memory and on disk, and publish through shared memory.",
    ] = ""
    pool_bytes: Annotated[int, Size(), "Memory for snapshots, allocated at start: about four times a version."] = (
        4 << 30
    )
    retain: Annotated[int, Meta(ge=1), "Newest versions to keep without a pin."] = 2
    forget: Annotated[
        bool,
        "Keep nothing in memory at the end. Without it, the versions held stay in POOL_DIR for the next start, and the "
        "data of an etcd of its own beside it; `paramserver clear` gives that memory back.",
    ] = False
    spill: Annotated[
        Path | None,
        DIRECTORY,
        "Keep versions on this disk too: a restarted tier serves the last one again without the trainer.",
    ] = None
    spill_retain: Annotated[int, Meta(ge=1), "Newest versions to keep on disk."] = 2
    stripes: Annotated[int, Meta(ge=1, le=16), "TCP connections per hop."] = 2
    transport: Annotated[
        Literal["tcp", "nixl"],
        "Transport of bytes between relays; nixl (RDMA where the hosts have it) with relays that have it too.",
    ] = "tcp"
    lease_ttl_s: Annotated[
        float, Meta(ge=1.0), "Time without contact to etcd after which a relay is no member; an hour at most."
    ] = 5.0
    silence_s: Annotated[
        float, Meta(ge=0.2), "Silence of an upstream relay after which it is bypassed; a minute at most."
    ] = 0.5
    distrust_publisher: Annotated[
        bool, "Map no memory into publishers: they send their bytes, which this relay copies and hashes again."
    ] = False
    metrics_port: Annotated[
        int | None,
        PORT,
        Flag(show_default="none are served"),
        "Port of the Prometheus metrics, by TLS where there are credentials; 0: any free one.",
    ] = None
    max_rate: Annotated[
        int | None, Size(), "Bytes per second to send at most: links may be shared with training. At least 256KiB."
    ] = None
    bind_interface: Annotated[
        str | None,
        Flag(metavar="NAME", show_default="that of --host"),
        "Network interface for bytes, such as eth1.",
    ] = None
    chunk_bytes: Annotated[
        int | None, Size(), Flag(show_default="from measured hops"), "Size of chunks, 4KiB to 1GiB."
    ] = None
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    @property
    def reached_by(self) -> str:
        """The address or name by which others reach this relay."""
        return self.advertise or self.host

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidRequest(f"{self.name!r} cannot name a relay", hint="letters, digits, '.', '_', '-'")
        names = [engine.name(self.name) for engine in self.engines]
        if len(set(names)) < len(names):
            raise InvalidRequest(f"two engines would be named alike: {', '.join(names)}", hint="one port for each")
        if (self.advertise or self.host) in _ANY_ADDRESS:
            raise InvalidRequest(
                f"--host {self.host} is every address of this host, and the other relays need one that they reach",
                hint="give --host that one, or add --advertise with it or with a name of this host",
            )
        if self.data_tls and self.credentials is None:
            raise InvalidRequest("--data-tls without credentials", hint="add --credentials DIR, or leave it out")
        self._check_engines()
        if self.retain < 1:
            raise InvalidRequest(f"--retain is {self.retain}", hint="keep at least 1 version")
        if self.chunk_bytes is not None and not CHUNK_BYTES_MIN <= self.chunk_bytes <= CHUNK_BYTES_MAX:
            raise InvalidRequest(
                f"chunks of {show_bytes(self.chunk_bytes)}",
                hint=f"use {show_bytes(CHUNK_BYTES_MIN)} to {show_bytes(CHUNK_BYTES_MAX)}",
            )
        self._check_times_and_rates()
        if self.spill is not None and self.spill.absolute().resolve().is_relative_to(self.pool_dir.resolve()):
            raise InvalidRequest(
                f"--spill {self.spill} is in the --pool-dir {self.pool_dir}, which is in memory",
                hint="give it a directory elsewhere, on a disk",
            )

    def _check_engines(self) -> None:
        for engine in self.engines:
            has_port = engine.on_loopback and self.credentials is not None
            if engine.port is not None and not has_port:
                raise InvalidRequest(
                    f"--engine {engine.kind}={engine.url}@{engine.port}: a port in front of an engine is for one on "
                    "loopback, at a relay with credentials",
                    hint=f"leave out the @{engine.port}, or add --credentials and give an address such as "
                    "http://127.0.0.1:8000",
                )
            if has_port and not engine.url.startswith("http://"):
                raise InvalidRequest(
                    f"--engine {engine.kind}={engine.url}: the port in front of it has TLS, and the engine none",
                    hint="start the engine with plain http on loopback",
                )

    def _check_times_and_rates(self) -> None:
        for option, value, most in (
            ("--lease-ttl-s", self.lease_ttl_s, LEASE_TTL_MAX_S),
            ("--silence-s", self.silence_s, SILENCE_MAX_S),
        ):
            if not 0 < value <= most:  # NaN is in no range
                raise InvalidRequest(f"{option} is {value:g}", hint=f"give at most {most:g} seconds")
        if self.max_rate is not None and self.max_rate < RATE_MIN:
            raise InvalidRequest(
                f"--max-rate is {show_bytes(round(self.max_rate))} in a second",
                hint=f"give at least {show_bytes(RATE_MIN)}: peers take a slower one for dead",
            )


def default_pool_dir(name: str) -> Path:
    return Path(f"/dev/shm/laminar-{getpass.getuser()}") / name  # noqa: S108 - a tmpfs is the point


def own_etcd_dir(pool_dir: Path) -> Path:
    """Where a relay without --etcd keeps the data of its own one: beside its pool."""
    return pool_dir.with_name(f"{pool_dir.name}{OWN_ETCD}")


def show_bytes(num: int) -> str:
    """The shortest exact-enough form: "1.5 GiB"."""
    size = float(num)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def show_apart(*sizes: int) -> list[str]:
    """Sizes that are to be compared: exact where `show_bytes` would not tell two of them apart."""
    shown = [show_bytes(size) for size in sizes]
    return shown if len(set(shown)) == len(set(sizes)) else [f"{size:,} bytes" for size in sizes]
