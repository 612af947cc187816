"""The registry in memory, for tests: several connections share one `MemoryStore` with a clock of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from paramserver.membership.registry import (
    Absent,
    Changed,
    Delete,
    Entry,
    Event,
    Guard,
    Outcome,
    Put,
    Removed,
    State,
    Write,
    check_size,
)
from protos.errors import Unavailable


@dataclass
class _Key:
    value: bytes
    created: int
    lease: int


@dataclass
class _LeaseState:
    ttl_s: float
    expires_at: float


@dataclass
class MemoryStore:
    """The state of the registry. `reachable = False` makes every call fail, as an outage does."""

    clock: Callable[[], float]
    reachable: bool = True
    revision: int = 1
    keys: dict[str, _Key] = field(default_factory=dict)
    leases: dict[int, _LeaseState] = field(default_factory=dict)
    last_lease: int = 0  # no number is granted twice, as in etcd
    log: list[tuple[int, Event]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def expire(self) -> None:
        """Ends leases whose time is over; tests that move the clock call it, and so does every access."""
        for lease in [n for n, state in self.leases.items() if state.expires_at <= self.clock()]:
            self.end_lease(lease)

    def end_lease(self, lease: int) -> None:
        self.leases.pop(lease, None)
        for name in sorted(name for name, key in self.keys.items() if key.lease == lease):
            self.apply([Delete(name)])

    def apply(self, writes: Sequence[Write]) -> None:
        self.revision += 1
        for write in writes:
            if isinstance(write, Put):
                old = self.keys.get(write.key)
                created = old.created if old else self.revision
                self.keys[write.key] = _Key(write.value, created, write.lease)
                self.log.append((self.revision, Changed(Entry(write.key, write.value, created), self.revision)))
            elif self.keys.pop(write.key, None) is not None:
                self.log.append((self.revision, Removed(write.key, self.revision)))
        self.changed.set()
        self.changed = asyncio.Event()


class MemoryRegistry:
    """One connection to a `MemoryStore`."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def _open(self) -> MemoryStore:
        if not self._store.reachable:
            raise Unavailable("the registry is unreachable")
        self._store.expire()
        return self._store

    async def list(self, prefix: str) -> State:
        store = self._open()
        found = sorted((name, key) for name, key in store.keys.items() if name.startswith(prefix))
        return State(tuple(Entry(name, key.value, key.created) for name, key in found), store.revision)

    async def transact(self, guards: Sequence[Guard], writes: Sequence[Write]) -> Outcome:
        check_size(guards, writes)
        store = self._open()
        if not all(_holds(store, guard) for guard in guards):
            return Outcome(False, store.revision)
        if any(isinstance(write, Put) and write.lease and write.lease not in store.leases for write in writes):
            raise Unavailable("the lease of a key to be written has ended")
        store.apply(writes)
        return Outcome(True, store.revision)

    async def grant(self, ttl_s: float) -> int:
        store = self._open()
        store.last_lease += 1
        store.leases[store.last_lease] = _LeaseState(ttl_s, store.clock() + ttl_s)
        return store.last_lease

    async def keep_alive(self, lease: int) -> bool:
        state = self._open().leases.get(lease)
        if state is None:
            return False
        state.expires_at = self._store.clock() + state.ttl_s
        return True

    async def revoke(self, lease: int) -> None:
        self._open().end_lease(lease)

    async def watch(self, prefix: str) -> AsyncIterator[Event]:
        state, position = await self.list(prefix), len(self._store.log)
        yield state
        while True:
            changed = self._store.changed
            for _, event in self._store.log[position:]:
                position += 1
                if _name(event).startswith(prefix):
                    yield event
            if position == len(self._store.log):
                await changed.wait()

    async def close(self) -> None:
        """Nothing to close: the store belongs to the test."""


def _holds(store: MemoryStore, guard: Guard) -> bool:
    key = store.keys.get(guard.key)
    if isinstance(guard, Absent):
        return key is None
    return key is not None and key.created == guard.revision


def _name(event: Event) -> str:
    if isinstance(event, Changed):
        return event.entry.key
    assert isinstance(event, Removed)
    return event.key
