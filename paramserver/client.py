"""The public face of the parameter service: watch, acquire, publish, status. Asyncio; gRPC inside.

Invariants:
- only sealed versions that the relay holds complete are ever shown or acquired;
- a lease that lapsed is never quietly taken for one that was held: `release` raises NotFound.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

Stage = Literal["copied", "sealed", "k_relays", "all", "lost"]
EventKind = Literal["sealed", "available", "retired", "lost"]


@dataclass(frozen=True, slots=True)
class SealedVersion:
    """A sealed version as one relay sees it."""

    model: str
    version: int
    step: int
    run: str
    root_digest: str
    size_bytes: int
    sealed_unix_s: float


@dataclass(frozen=True, slots=True)
class VersionEvent:
    """What happened to a version; `available` means sealed and held complete by the watched relay."""

    kind: EventKind
    version: SealedVersion


@dataclass(frozen=True, slots=True)
class Lease:
    """A pin on the local relay: until `ttl_s` after the last renewal, `path` is not retired."""

    lease_id: str
    model: str
    version: int
    path: Path
    root_digest: str
    step: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class TransferStatus:
    """One version on its way into a relay."""

    model: str
    version: int
    upstream: str
    bytes_done: int
    bytes_total: int


@dataclass(frozen=True, slots=True)
class PinStatus:
    """One pin on a relay's snapshot."""

    model: str
    version: int
    holder: str
    expires_in_s: float


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """What a relay knows of one model: its master, the chain of the newest plan, the versions held here."""

    model: str
    master: str
    epoch: str
    plan: int
    chain: tuple[str, ...]
    versions: tuple[int, ...]
    newest_sealed: int | None


@dataclass(frozen=True, slots=True)
class RelayStatus:
    """One relay's own view of itself and of its models."""

    relay: str
    instance: str
    members: tuple[str, ...]
    models: tuple[ModelStatus, ...]
    transfers: tuple[TransferStatus, ...]
    pins: tuple[PinStatus, ...]
    pool_bytes: int
    used_bytes: int
    quarantined_bytes: int
    cut_off: tuple[str, ...]
    registry_reachable: bool

    @property
    def held(self) -> dict[str, tuple[int, ...]]:
        """Versions held complete and sealed, per model."""
        return {model.model: model.versions for model in self.models}


class RelayClient:
    """A connection to one relay's gRPC port, "host:port"."""

    def __init__(self, address: str, *, timeout_s: float = 10.0) -> None:
        self.address = address
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        raise NotImplementedError

    async def status(self) -> RelayStatus:
        raise NotImplementedError

    async def versions(self, model: str) -> list[SealedVersion]:
        """Sealed versions that this relay holds complete, ascending."""
        raise NotImplementedError

    async def newest(self, model: str) -> SealedVersion | None:
        raise NotImplementedError

    def watch(self, model: str) -> AsyncIterator[VersionEvent]:
        """The current state, then every change; reconnects by itself."""
        raise NotImplementedError

    async def acquire(
        self, model: str, version: int | None = None, *, holder: str, ttl_s: float = 60.0
    ) -> Lease:
        """Pins `version` (None: the newest). NotFound when this relay does not hold it."""
        raise NotImplementedError

    async def renew(self, lease: Lease) -> None:
        raise NotImplementedError

    async def release(self, lease: Lease) -> None:
        """Ends the pin. NotFound when it had lapsed: what was loaded under it does not count."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class TensorSource:
    """One tensor to publish. `read` gives its contiguous little-endian bytes, valid while publish copies."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], memoryview]


class Ticket:
    """What is known of one published version."""

    model: str
    version: int
    run: str
    step: int

    async def wait_sealed(self, timeout_s: float) -> None:
        raise NotImplementedError

    async def wait_copies(self, k: int, timeout_s: float) -> None:
        raise NotImplementedError

    async def wait_all(self, timeout_s: float) -> None:
        raise NotImplementedError

    async def stage(self) -> Stage:
        raise NotImplementedError

    async def holders(self) -> tuple[str, ...]:
        """Names of the relays that hold this version verified."""
        raise NotImplementedError


async def publish(
    relay: RelayClient,
    model: str,
    tensors: Sequence[TensorSource],
    *,
    step: int,
    run: str,
    file_bytes_max: int = 4 << 30,
    metadata: Mapping[str, str] | None = None,
    force_tcp: bool = False,
) -> Ticket:
    """Writes one version; returns at *copied*, when the tensors may change again."""
    raise NotImplementedError
