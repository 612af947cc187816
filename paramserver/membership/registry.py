"""The registry seam: a small, ordered, leased key-value store with transactions. etcd, or memory in tests.

Invariants that every implementation keeps (the contract suite checks them):
- a transaction applies all of its writes or none, at one revision; revisions only grow;
- keys under a lease vanish together, when it is revoked or not kept alive for its TTL;
- a watch begins with the state and then gives every change in revision order; when it cannot (compaction,
  a wiped store) it gives the state again and says so.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Entry:
    """A key and its value; `created` is the revision at which the key came to be."""

    key: str
    value: bytes
    created: int


@dataclass(frozen=True, slots=True)
class Absent:
    """Guard: the key does not exist."""

    key: str


@dataclass(frozen=True, slots=True)
class Created:
    """Guard: the key exists since exactly this revision (so nobody else has taken it in between)."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class Put:
    """Write; `lease` 0 means the key stays until deleted."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    key: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """Whether all guards held, and the store's revision then."""

    succeeded: bool
    revision: int


@dataclass(frozen=True, slots=True)
class State:
    """Everything under the watched prefix, at `revision`; forget what was known before."""

    entries: tuple[Entry, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Changed:
    """A key was written, at `revision`."""

    entry: Entry
    revision: int


@dataclass(frozen=True, slots=True)
class Removed:
    """A key was deleted, or its lease ended, at `revision`."""

    key: str
    revision: int


Guard = Absent | Created
Write = Put | Delete
Event = State | Changed | Removed


class Registry(Protocol):
    """Every call has a deadline of its own; `Unavailable` means that the outcome is not known."""

    async def list(self, prefix: str) -> State: ...
    async def transact(self, guards: Sequence[Guard], writes: Sequence[Write]) -> Outcome: ...
    async def grant(self, ttl_s: float) -> int: ...
    async def keep_alive(self, lease: int) -> bool:
        """False when the lease has ended."""
        ...

    async def revoke(self, lease: int) -> None: ...
    def watch(self, prefix: str) -> AsyncIterator[Event]: ...
    async def close(self) -> None: ...
