"""Changes of the prompt pool as data, and how each is carried out in a database.

The same commands, carried out in the same order with the same times, make the same database wherever that happens: ids
are in the command, and nothing reads a clock. So a gateway may carry out its own at once, and gateways that share a
pool carry out each other's in one order (`gateway.log`).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence

import msgspec

from gateway.core.commands import Effect
from gateway.core.tasks import Ending, NewTask
from gateway.tasks import leases, rows
from gateway.tasks.leases import LeaseRequest


class AddTasks(msgspec.Struct, frozen=True, tag=True):
    pool: str
    tasks: Sequence[NewTask]
    tasks_max: int


class LeaseSamples(msgspec.Struct, frozen=True, tag=True):
    wanted: LeaseRequest


class RenewLeases(msgspec.Struct, frozen=True, tag=True):
    lease_ids: Sequence[str]
    lease_s: float


class FinishLease(msgspec.Struct, frozen=True, tag=True):
    lease_id: str
    reward: float


class FailLease(msgspec.Struct, frozen=True, tag=True):
    lease_id: str
    error: str


class ReleaseLeases(msgspec.Struct, frozen=True, tag=True):
    lease_ids: Sequence[str]


class SetPriorities(msgspec.Struct, frozen=True, tag=True):
    pool: str
    priorities: Mapping[str, float]


class RemoveTasks(msgspec.Struct, frozen=True, tag=True):
    """`task_ids` None: all drained ones."""

    pool: str
    task_ids: Sequence[str] | None


Command = AddTasks | LeaseSamples | RenewLeases | FinishLease | FailLease | ReleaseLeases | SetPriorities | RemoveTasks


def carry_out(connection: sqlite3.Connection, command: Command, now: float) -> Effect:
    """`now`: Unix seconds. Raises LaminarError as the operations do; whoever calls undoes what was changed then."""
    match command:
        case AddTasks(pool, tasks, tasks_max):
            added = rows.add(connection, pool, tasks, tasks_max)
            return Effect(added, {"tasks": added}, notable=True)
        case LeaseSamples(wanted):
            return _lease(connection, wanted, now)
        case RenewLeases(lease_ids, lease_s):
            renewed, lost, revived = leases.renew(connection, lease_ids, now + lease_s)
            return Effect((renewed, lost), {"leases": revived})
        case FinishLease(lease_id, reward):
            return _ended(*leases.finish(connection, lease_id, reward), "finished")
        case FailLease(lease_id, error):
            return _ended(*leases.fail(connection, lease_id, error), "failed")
        case ReleaseLeases(lease_ids):
            released = leases.release(connection, lease_ids)
            return Effect(released, {"leases": -released, "released": released}, notable=True)
        case SetPriorities(pool, priorities):
            return Effect(rows.prioritize(connection, pool, priorities))
        case RemoveTasks(pool, task_ids):
            removed, lost_leases = rows.remove(connection, pool, task_ids)
            return Effect(removed, {"tasks": -removed, "leases": -lost_leases}, notable=True)


def _lease(connection: sqlite3.Connection, wanted: LeaseRequest, now: float) -> Effect:
    leased, changed = leases.lease(connection, wanted, now)
    fresh = {f"task-{name}" for name in wanted.names}
    new = sum(lease.lease_id in fresh for lease in leased.leases)
    counted = {
        "leased": new,
        "leases": new - changed.expired,
        "expired": changed.expired,
        "given_up": changed.given_up,
    }
    return Effect(leased, counted, notable=bool(changed.expired))


def _ended(ending: Ending, was_leased: bool, counter: str) -> Effect:
    if ending.repeated:
        return Effect(ending)
    given_up = int(counter == "failed" and not ending.retried)
    # Also an end wakes those that wait: a pool may be drained now.
    return Effect(ending, {"leases": -was_leased, "given_up": given_up, counter: 1}, notable=True)
