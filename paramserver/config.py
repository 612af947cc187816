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

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidRequest(f"{self.name!r} cannot name a relay", hint="letters, digits, '.', '_', '-'")
        names = [engine.name(self.name) for engine in self.engines]
        if len(set(names)) < len(names):
            raise InvalidRequest(f"two engines would be named alike: {', '.join(names)}", hint="one port for each")
        if self.retain < 1:
            raise InvalidRequest(f"--retain is {self.retain}", hint="keep at least 1 version")
        if self.chunk_bytes is not None and self.chunk_bytes < 4096:
            raise InvalidRequest(f"chunks of {self.chunk_bytes} bytes", hint="use at least 4096")


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
