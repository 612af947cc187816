"""What a gateway knows of an experience that it shares: the buffer's bookkeeping, brought up to date by events. Pure.

Invariants:
- each event says what is, not what to change: what is applied twice, or was done here before its event came, has the
  same result;
- after all events up to a revision, in their order, the bookkeeping is what the shared store had at that revision. In
  between, it may hold what this gateway has changed since.

A lease in it has no end: it ends by the store's clock, and an event says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gateway.core.selection import Entry
from gateway.experience.leases import BufferState, LeaseState
from gateway.store.damage import leaving_out
from protos.decoding import decode_msgpack
from protos.packed import Facts


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that the store had at a revision, but for what the events above it say. `entries`: each with its lease's id,
    "" if it is free. `leases`: id, reader, and the uses that it allows."""

    revision: int
    entries: Sequence[tuple[Entry, str]]
    leases: Sequence[tuple[str, str, int]]
    closed_groups: Sequence[tuple[str, int]]


def restore(state: BufferState, snapshot: Snapshot) -> None:
    state.clear()
    for lease_id, reader, uses_max in snapshot.leases:
        state.leases[lease_id] = LeaseState(lease_id, reader, math.inf, {}, uses_max)
    for entry, lease_id in sorted(snapshot.entries, key=lambda found: found[0].seq):
        state.place(entry, lease_id if lease_id in state.leases else None)  # a later lease has its event
    state.closed_groups.update(snapshot.closed_groups)


def entry_of(fields: Mapping[str, bytes]) -> Entry | None:
    """None for one whose facts do not decode: it is named in the log."""
    with leaving_out("experience", fields["seq"].decode()):
        facts = decode_msgpack(fields["facts"], Facts)
        session_id, group_id = fields["session"].decode(), fields["group"].decode()
        return Entry(int(fields["seq"]), session_id, group_id, int(fields["oldest"]), facts, int(fields["uses"]))
    return None


def apply(state: BufferState, event: Mapping[str, bytes]) -> None:
    """`event`: the fields of one entry of the store's stream (`redis_store.lua` writes them)."""
    _APPLY[event["kind"].decode()](state, event)


def _put(state: BufferState, event: Mapping[str, bytes]) -> None:
    if (entry := entry_of(event)) is not None:
        state.place(entry)


def _gone(state: BufferState, event: Mapping[str, bytes]) -> None:
    for seq in _numbers(event["seqs"]):
        state.drop(seq)


def _leased(state: BufferState, event: Mapping[str, bytes]) -> None:
    entries = [entry for seq in _numbers(event["seqs"]) if (entry := state.drop(seq)) is not None]
    lease_id = event["lease"].decode()
    state.leases[lease_id] = LeaseState(lease_id, event["reader"].decode(), math.inf, {}, int(event["uses_max"]))
    for entry in entries:
        state.place(entry, lease_id)


def _ended(state: BufferState, event: Mapping[str, bytes]) -> None:
    for pair in event["free"].split():
        seq, _, uses = pair.partition(b":")
        if (entry := state.drop(int(seq))) is not None:
            state.place(replace(entry, uses=int(uses)))
    for used in _numbers(event["gone"]):
        state.drop(used)
    lease = state.leases.get(event["lease"].decode())
    if lease is not None:
        for other in list(lease.entries):
            state.drop(other)
        del state.leases[lease.lease_id]


def _facts(state: BufferState, event: Mapping[str, bytes]) -> None:
    seq = int(event["seq"])
    lease_id = state.holder(seq)
    with leaving_out("experience", seq):
        facts = decode_msgpack(event["facts"], Facts)
        if (entry := state.drop(seq)) is not None:
            state.place(replace(entry, facts=facts), lease_id)


def _closed(state: BufferState, event: Mapping[str, bytes]) -> None:
    state.closed_groups[event["group"].decode()] = int(event["members"])


def _opened(state: BufferState, event: Mapping[str, bytes]) -> None:
    state.closed_groups.pop(event["group"].decode(), None)


def _numbers(text: bytes) -> list[int]:
    return [int(word) for word in text.split()]


_APPLY = {
    "put": _put,
    "gone": _gone,
    "leased": _leased,
    "ended": _ended,
    "facts": _facts,
    "closed": _closed,
    "opened": _opened,
}
"""By the event's kind."""
