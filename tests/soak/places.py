"""Where strangers try: every port of a soak's relays and gateways, by the name of its process, past all links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EngineDoor:
    """The port of a relay in front of an engine, at `address`. `host`: that which the relay's certificate is for."""

    port: int
    host: str
    address: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Places:
    """`relays`: addresses for gRPC; `data`: for bytes; `gateways`: URLs."""

    relays: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)
    engines: Mapping[str, EngineDoor] = field(default_factory=dict)
    gateways: Mapping[str, str] = field(default_factory=dict)
