"""Changes of the experience as data, and what each makes of its bookkeeping. Pure.

`decide` looks and changes nothing: so a store may write what was decided before the state has it, and gateways that
share a log decide alike. Invariants:
- a command may be carried out twice: a finish is known by its name at the gateway that sends it, a lease by its own
  name, a revision by the number of those before it;
- what another gateway was faster with is refused as `Raced`: nothing was done, so choose again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from gateway.core.admission import Readers
from gateway.core.commands import Effect
from gateway.core.experience import (
    Bounded,
    BufferState,
    Change,
    Closed,
    Gone,
    Leased,
    LeftOut,
    Put,
    Released,
    Replaced,
    Used,
)
from gateway.core.selection import Bound, Entry
from protos.errors import Conflict, NotFound, OutOfCapacity
from protos.packed import Facts

ENDED_S = 3600.0
"""How long an acknowledgement is remembered, which is answered alike when it comes again."""
CONFIRMED_S = 1800.0
"""How long a finish is known after its gateway has forgotten it: longer than a kernel repeats packets of a connection
that broke, which is about 15 minutes."""

Why = Literal["stale", "equal", "by_readers", "by_group"]


class Raced(Conflict):
    """Another gateway has changed what was chosen. Nothing was done: catch up, and choose again."""


class AddSession(msgspec.Struct, frozen=True, tag=True):
    """`sender`, `finish`: the gateway, and its name for this finish; empty where only one gateway adds. `capacity`,
    `bytes_max`: of the buffer. `body`: the row's name in a log."""

    session_id: str
    group_id: str
    oldest_version: int
    facts: Facts
    capacity: int
    bytes_max: int | None
    sender: str = ""
    finish: str = ""
    body: str = ""


class ConfirmFinishes(msgspec.Struct, frozen=True, tag=True):
    """The sender will not send these again; with `others`, none but these."""

    sender: str
    finishes: Sequence[str]
    others: bool = False


class ReviseSession(msgspec.Struct, frozen=True, tag=True):
    """`edits`: how often it was revised before."""

    session_id: str
    edits: int
    facts: Facts
    body: str = ""


class LeaseEntries(msgspec.Struct, frozen=True, tag=True):
    """`chosen`: numbers of entries, each with how often it was used before."""

    lease_id: str
    reader: str
    lease_s: float
    uses_max: int
    chosen: Sequence[tuple[int, int]]


class Acknowledge(msgspec.Struct, frozen=True, tag=True):
    lease_id: str


class ReleaseLease(msgspec.Struct, frozen=True, tag=True):
    lease_id: str


class EndLapsed(msgspec.Struct, frozen=True, tag=True):
    """Time goes on: leases that are over end with each command."""


class EvictEntries(msgspec.Struct, frozen=True, tag=True):
    """Those that are free."""

    seqs: Sequence[int]
    why: Why


class LeaveOut(msgspec.Struct, frozen=True, tag=True):
    """The entry's body is damaged."""

    lease_id: str
    seq: int


class CloseGroup(msgspec.Struct, frozen=True, tag=True):
    group_id: str
    members: int


class DropGroup(msgspec.Struct, frozen=True, tag=True):
    group_id: str


class DeclareReader(msgspec.Struct, frozen=True, tag=True):
    """What a reader requests (`gateway.core.admission`)."""

    name: str
    batch: int
    group_size: int | None
    staleness_max: int
    waits: bool
    version: int = 0
    by_token: bool = False


class SetBound(msgspec.Struct, frozen=True, tag=True):
    """The newest version that a gateway knows of, and how far behind it a trajectory may be."""

    version: int
    staleness_max: int | None
    by_token: bool


Command = (
    AddSession
    | ConfirmFinishes
    | ReviseSession
    | LeaseEntries
    | Acknowledge
    | ReleaseLease
    | EndLapsed
    | EvictEntries
    | LeaveOut
    | CloseGroup
    | DropGroup
    | DeclareReader
    | SetBound
)


@dataclass(slots=True)
class Known:
    """What is remembered besides the entries. `landed`: by gateway, the finishes that it may send again, with when it
    said that it will not (else infinity). `ended`: acknowledged leases, with how many they had, and when."""

    landed: dict[str, dict[str, float]] = field(default_factory=dict)
    ended: dict[str, tuple[int, float]] = field(default_factory=dict)
    readers: Readers = field(default_factory=Readers)


@dataclass(frozen=True, slots=True)
class Decided:
    """`changes`: to be made, in order. `unnamed`: bodies that then have no name any more."""

    answer: Any
    changes: Sequence[Change] = ()
    counted: Mapping[str, int] = field(default_factory=dict)
    unnamed: Sequence[str] = ()


def carry_out(state: BufferState, known: Known, command: Command, now: float) -> Effect:
    """`now`: Unix seconds. Raises LaminarError as the operations do; then only leases that are over have ended."""
    lapsed = state.lapse(now)
    decided = decide(state, known, command, now)
    for change in decided.changes:
        state.make(change)
    remember(known, command, decided, now)
    return effect_of(decided, len(lapsed))


def effect_of(decided: Decided, num_lapsed: int = 0) -> Effect:
    counted = {**decided.counted, "lapsed_leases": num_lapsed} if num_lapsed else decided.counted
    return Effect(decided.answer, counted, bool(decided.changes or num_lapsed), decided.unnamed)


def decide(state: BufferState, known: Known, command: Command, now: float) -> Decided:
    match command:
        case AddSession():
            return _add(state, known, command)
        case ReviseSession():
            return _revise(state, command)
        case LeaseEntries():
            return _lease(state, command, now)
        case Acknowledge(lease_id):
            return _acknowledge(state, known, lease_id)
        case ReleaseLease(lease_id):
            if (lease := state.leases.get(lease_id)) is None:
                raise NotFound(f"no lease {lease_id!r}", hint="it was acknowledged or given back before, or it expired")
            return Decided(len(lease.entries), [Released(lease)])
        case EvictEntries(seqs, why):
            return _evict([state.free[seq] for seq in seqs if seq in state.free], why)
        case LeaveOut(lease_id, seq):
            lease = state.leases.get(lease_id)
            entry = None if lease is None else lease.entries.get(seq)
            return Decided(None, [] if lease is None or entry is None else [LeftOut(lease, entry)])
        case CloseGroup(group_id, members):
            names = [*(name for name in state.closed_groups if name != group_id), group_id]
            return Decided(None, [Closed(group_id, members, names[: max(0, len(names) - state.capacity)])])
        case DropGroup(group_id):
            return _evict([entry for entry in state.free.values() if entry.group_id == group_id], "by_group")
        case SetBound(version, staleness_max, by_token):
            return _bound(state, Bound(version, staleness_max, by_token))
    return Decided(None)


def remember(known: Known, command: Command, decided: Decided, now: float) -> None:
    """What a command that was carried out leaves besides changes of the entries."""
    match command:
        case AddSession() if command.finish:
            known.landed.setdefault(command.sender, {})[command.finish] = math.inf
        case ConfirmFinishes(sender, finishes, others):
            _confirm(known, sender, set(finishes), now, others=others)
        case Acknowledge(lease_id) if lease_id not in known.ended:
            known.ended[lease_id] = decided.answer, now
        case DeclareReader() as it:
            known.readers.requested(
                it.name,
                it.batch,
                it.group_size,
                it.staleness_max,
                now,
                waits=it.waits,
                version=it.version,
                by_token=it.by_token,
            )
    while known.ended and now - next(iter(known.ended.values()))[1] > ENDED_S:
        del known.ended[next(iter(known.ended))]


def _add(state: BufferState, known: Known, command: AddSession) -> Decided:
    if command.finish and command.finish in known.landed.get(command.sender, ()):
        return Decided(None)
    if command.session_id in state.sessions:
        raise Conflict(
            f"the trajectory of session {command.session_id} is already in the experience buffer",
            hint="give each session a name of its own over all gateways",
        )
    state.capacity, state.bytes_max = command.capacity, command.bytes_max  # of the newest finish, on all gateways alike
    refuse_full(state)
    facts = command.facts
    entry = Entry(
        state.last_seq + 1, command.session_id, command.group_id, command.oldest_version, facts, 0, command.body
    )
    if not (gone := state.room_for(entry)):
        return Decided(entry, [Put(entry)], {"added": 1})
    stale = sum(map(state.is_stale, gone))
    counted = {"added": 1, "evicted_stale": stale, "evicted_for_room": len(gone) - stale}
    return Decided(entry, [Gone(gone), Put(entry)], counted, [old.body for old in gone])


def refuse_full(state: BufferState) -> None:
    if state.full():
        raise OutOfCapacity(
            f"all {state.capacity} places of the experience buffer are leased to readers",
            hint="acknowledge leases after use",
        )


def free_session(state: BufferState, session_id: str) -> Entry:
    """Raises NotFound for one that is not here, Conflict for one that a reader has."""
    if session_id not in state.sessions:
        raise NotFound(f"session {session_id} is not in the experience buffer", hint="it was used, or dropped")
    entry = next((entry for entry in state.free.values() if entry.session_id == session_id), None)
    if entry is None:
        raise Conflict(f"a reader has session {session_id}", hint="give rewards before it is sampled")
    return entry


def _revise(state: BufferState, command: ReviseSession) -> Decided:
    entry = free_session(state, command.session_id)
    if entry.edits != command.edits:
        raise Raced(f"session {command.session_id} was revised meanwhile")
    after = replace(entry, facts=command.facts, body=command.body or entry.body, edits=entry.edits + 1)
    return Decided(None, [Replaced(after)], unnamed=[entry.body] if command.body else [])


def _lease(state: BufferState, command: LeaseEntries, now: float) -> Decided:
    if command.lease_id in state.leases:
        raise Conflict(f"there is a lease {command.lease_id!r}", hint="give each sample a name of its own")
    chosen = [state.free.get(seq) for seq, _ in command.chosen]
    found = [entry for entry, (_, uses) in zip(chosen, command.chosen, strict=True) if entry and entry.uses == uses]
    if len(found) < len(chosen):
        raise Raced("another gateway leased them")
    until = now + command.lease_s
    return Decided(found, [Leased(command.lease_id, command.reader, until, command.uses_max, found)])


def _acknowledge(state: BufferState, known: Known, lease_id: str) -> Decided:
    if lease_id in known.ended:
        return Decided(known.ended[lease_id][0])
    if (lease := state.leases.get(lease_id)) is None:
        raise NotFound(f"no lease {lease_id!r}", hint="it expired and its trajectories went back: sample again")
    kept, number = {entry.seq for entry in lease.again()}, len(lease.entries)
    unnamed = [entry.body for entry in lease.entries.values() if entry.seq not in kept]
    return Decided(number, [Used(lease)], {"acked": number}, unnamed)


def _evict(gone: Sequence[Entry], why: Why) -> Decided:
    counted = {} if why == "by_group" else {f"evicted_{why}": len(gone)}
    return Decided(len(gone), [Gone(gone)] if gone else [], counted, [entry.body for entry in gone])


def _bound(state: BufferState, own: Bound) -> Decided:
    """The newest version counts, whichever gateway knows of it."""
    if state.own.version > own.version:
        own = state.own
    gone = [entry for entry in state.free.values() if not own.allows(entry)]
    decided = _evict(gone, "stale")
    return replace(decided, changes=[*decided.changes, Bounded(own)])


def _confirm(known: Known, sender: str, finishes: set[str], now: float, *, others: bool) -> None:
    landed = known.landed.get(sender, {})
    for finish, at in list(landed.items()):
        if at == math.inf and (finish in finishes) != others:
            landed[finish] = now
        elif at < now - CONFIRMED_S:
            del landed[finish]
    if not landed:
        known.landed.pop(sender, None)
