"""The one configuration of a relay, resolved once by the CLI and printed at start."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from protos.engines import check_kind, is_address
from protos.errors import InvalidRequest

_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]iB)?", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_ANY_ADDRESS = ("0.0.0.0", "::", "[::]", "")


CHUNK_BYTES_MIN, CHUNK_BYTES_MAX = 4096, 1 << 30  # a publisher and each stripe hold one; frames count in 32 bits
LEASE_TTL_MAX_S = 3600.0
SILENCE_MAX_S = 60.0
RATE_MIN = 256 << 10  # bytes go in pieces of 64 KiB, on two stripes, and silence of half a second is death


@dataclass(frozen=True, slots=True)
class EngineBeside:
    """An engine on this host, to be registered for gateways."""

    kind: str
    url: str

    @classmethod
    def parse(cls, text: str) -> EngineBeside:
        """`KIND=URL`, as `--engine` takes it."""
        kind, _, url = text.partition("=")
        if not (kind and is_address(url)):
            raise InvalidRequest(f"--engine {text!r} is not KIND=URL", hint="such as vllm=http://engines-0:8000")
        check_kind(kind, f"--engine {text!r}")
        return cls(kind, url.rstrip("/"))

    def name(self, relay: str) -> str:
        """Of its own among all engines, since a relay's is, and the same whenever this relay starts again."""
        parts = urlsplit(self.url)
        return f"{relay}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """Times in seconds, sizes in bytes; addresses "host:port", port 0 for any free one."""

    name: str
    etcd: str
    engines: tuple[EngineBeside, ...] = ()
    host: str = "127.0.0.1"
    advertise: str = ""  # what others reach it by; "": host
    port: int = 0
    data_port: int = 0
    publish_host: bool = True
    distrust_publisher: bool = False  # publishers get no descriptor: their bytes are copied and hashed again here
    zone: str = ""
    rack: str = ""
    pool_dir: Path = Path("/dev/shm/laminar")
    pool_bytes: int = 4 << 30
    chunk_bytes: int | None = None  # None: chosen for each version from measured hops
    retain: int = 2
    spill: Path | None = None
    spill_retain: int = 2
    num_stripes: int = 2
    transport: Literal["tcp", "nixl"] = "tcp"
    lease_ttl_s: float = 5.0
    silence_s: float = 0.5
    max_rate: float | None = None
    bind_interface: str | None = None
    metrics_port: int | None = None

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
                f"--spill {self.spill} is in the --pool-dir {self.pool_dir}, which is cleared when it ends",
                hint="give it a directory elsewhere, on a disk",
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


def parse_bytes(text: str) -> int:
    """ "4GiB", "512MiB" or plain bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidRequest(f"{text!r} is not a size", hint='write bytes, or "512MiB", "4GiB"')
    return int(float(match[1]) * _UNITS[(match[2] or "").upper()])


def show_bytes(num: int) -> str:
    """The shortest exact-enough form: "1.5 GiB"."""
    size = float(num)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
