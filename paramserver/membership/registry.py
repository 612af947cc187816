"""The registry seam: a small, ordered, leased key-value store with transactions. etcd, or memory in tests.

Invariants that every implementation keeps (the contract suite checks them):
- a transaction applies all of its writes or none, at one revision; revisions only grow;
- keys under a lease vanish together, when it is revoked or not kept alive for its TTL;
- a transaction of more than `OPERATIONS_MAX` guards or writes is refused (TooLarge), as etcd refuses it: who writes
  more writes it in `parts`, each of which stands for itself;
- a watch begins with the state and then gives every change in revision order; when it cannot (compaction,
  a wiped store) it gives the whole state again, as a `State` event.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from protos.errors import TooLarge

RETRY_S = 0.3  # between two tries of a registry that is away
OPERATIONS_MAX = 128
"""Guards, and writes, in one transaction: etcd's default (`--max-txn-ops`)."""

PART_BYTES_MAX = 1 << 20
"""Keys and values in one of several `parts`; etcd takes 1.5 MiB in a request (`--max-request-bytes`)."""


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


def parts(writes: Sequence[Write]) -> Iterator[list[Write]]:
    """Writes that need not happen together, in order, as transactions that the registry takes."""
    part: list[Write] = []
    num_bytes = 0
    for write in writes:
        size = len(write.key) + (len(write.value) if isinstance(write, Put) else 0)
        if part and (len(part) == OPERATIONS_MAX or num_bytes + size > PART_BYTES_MAX):
            yield part
            part, num_bytes = [], 0
        part.append(write)
        num_bytes += size
    if part:
        yield part


def check_size(guards: Sequence[Guard], writes: Sequence[Write]) -> None:
    """TooLarge when no registry takes the transaction."""
    most = max(len(guards), len(writes))
    if most > OPERATIONS_MAX:
        raise TooLarge(f"a transaction of {most} operations", hint=f"write at most {OPERATIONS_MAX} at once")


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
