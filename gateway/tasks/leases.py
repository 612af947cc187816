"""The leases of the prompt pool on disk: how samples are leased, and how leases end.

Invariants:
- expired leases end in the next operation that leases, so nothing has to run in between;
- a lease that expired keeps its id until another runner gets the sample: until then it can be renewed or finished;
- a lease ends once, and how is remembered (`task_ends`): the same end again changes nothing and gets the same answer.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gateway.core.tasks import (
    ENDS_KEPT,
    ERROR_CHARS_MAX,
    Ending,
    Leased,
    LeaseEnd,
    TaskLease,
    is_given_up,
    is_ready,
)
from gateway.tasks.rows import EXPIRED, FINISHED, FREE, GIVEN_UP, LEASED, NEXT_FREE, NEXT_READY, OF_LEASE, OF_REQUEST
from protos.errors import Conflict, NotFound


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """`names`: random parts for ids, two for each of the `count` leases. `request`: the runner's own name of this
    request: sent again, it gets the same leases."""

    pool: str
    runner: str
    count: int
    lease_s: float
    request: str | None
    names: Sequence[str]


@dataclass(frozen=True, slots=True)
class Changed:
    """What an operation did besides its answer, for the counters."""

    expired: int = 0
    given_up: int = 0


def lease(connection: sqlite3.Connection, wanted: LeaseRequest, now: float) -> tuple[Leased, Changed]:
    if wanted.request is not None and (held := _held(connection, wanted)):
        return Leased(held), Changed()
    changed = _expire(connection, now)
    names, until, leases = iter(wanted.names), now + wanted.lease_s, []
    for _ in range(wanted.count):
        found = connection.execute(NEXT_FREE, (wanted.pool,)).fetchone()
        found = found or _begin_round(connection, wanted.pool, f"g-{next(names)}")
        if found is None:
            break
        group_number, sample_index = found
        connection.execute(
            "UPDATE task_samples SET state=1, attempts=attempts+1, lease_id=?, request=?, runner=?, until_unix_s=? "
            "WHERE group_number=? AND sample_index=?",
            (f"task-{next(names)}", wanted.request, wanted.runner, until, group_number, sample_index),
        )
        leases.append(_lease(connection, group_number, sample_index))
    if leases:
        return Leased(leases), changed
    return Leased((), *_outlook(connection, wanted.pool)), changed


def nothing_to_lease(connection: sqlite3.Connection, wanted: LeaseRequest, now: float) -> Leased | None:
    """The answer to a request that `lease` would answer without a change; None where it would change something."""
    if (
        connection.execute(NEXT_FREE, (wanted.pool,)).fetchone()
        or connection.execute(NEXT_READY, (wanted.pool,)).fetchone()
    ):
        return None
    if connection.execute(EXPIRED, (now,)).fetchone() or (wanted.request is not None and _held(connection, wanted)):
        return None
    return Leased((), *_outlook(connection, wanted.pool))


def _held(connection: sqlite3.Connection, wanted: LeaseRequest) -> list[TaskLease]:
    found = connection.execute(OF_REQUEST, (wanted.request, wanted.pool, wanted.runner)).fetchall()
    return [_lease(connection, number, index) for number, index in found]


def _begin_round(connection: sqlite3.Connection, pool: str, group_id: str) -> tuple[int, int] | None:
    """Begins the next round of the task whose turn it is; its first sample."""
    found = connection.execute(NEXT_READY, (pool,)).fetchone()
    if found is None:
        return None
    seq, group_size, repeats, rounds = found
    number = connection.execute(
        "INSERT INTO task_groups(group_id, task_seq, pool, round, group_size, unended) VALUES (?,?,?,?,?,?)",
        (group_id, seq, pool, rounds, group_size, group_size),
    ).lastrowid
    assert number is not None
    connection.executemany(
        "INSERT INTO task_samples(group_number, sample_index, pool) VALUES (?,?,?)",
        [(number, index, pool) for index in range(group_size)],
    )
    connection.execute(
        "UPDATE tasks SET rounds=rounds+1, open_groups=open_groups+1, ready=? WHERE seq=?",
        (is_ready(repeats, rounds + 1), seq),
    )
    return number, 0


def _lease(connection: sqlite3.Connection, group_number: int, sample_index: int) -> TaskLease:
    lease_id, attempts, until = connection.execute(
        "SELECT lease_id, attempts, until_unix_s FROM task_samples WHERE group_number=? AND sample_index=?",
        (group_number, sample_index),
    ).fetchone()
    group_id, group_size, number, task_id, data = connection.execute(
        "SELECT group_id, task_groups.group_size, round, task_id, data FROM task_groups "
        "JOIN tasks ON seq=task_seq WHERE number=?",
        (group_number,),
    ).fetchone()
    return TaskLease(lease_id, task_id, data, group_id, group_size, sample_index, number, attempts, until)


def _outlook(connection: sqlite3.Connection, pool: str) -> tuple[bool, float | None]:
    """Of a pool that has nothing to lease now: whether it is drained, and when the next lease expires."""
    open_group = connection.execute("SELECT 1 FROM task_groups WHERE pool=? LIMIT 1", (pool,)).fetchone()
    [until] = connection.execute(
        "SELECT min(until_unix_s) FROM task_samples INDEXED BY task_samples_leased WHERE state=1"
    ).fetchone()
    return open_group is None, until


def _expire(connection: sqlite3.Connection, now: float) -> Changed:
    expired = connection.execute(EXPIRED, (now,)).fetchall()
    given_up = 0
    for group_number, sample_index, lease_id, failures in expired:
        attempts_max = _attempts_max(connection, group_number)
        if is_given_up(failures + 1, attempts_max):
            _end_sample(connection, lease_id, group_number, sample_index, GIVEN_UP, "expired", error=_EXPIRED)
            given_up += 1
        else:
            connection.execute(
                "UPDATE task_samples SET state=0, failures=failures+1, error=? WHERE group_number=? AND sample_index=?",
                (_EXPIRED, group_number, sample_index),
            )
    return Changed(len(expired), given_up)


_EXPIRED = "runner: its lease expired"


EndOperation = Callable[[sqlite3.Connection], tuple[Ending, bool]]
"""Ends a lease; also returns whether it was live, and not one that had expired."""


def renew(connection: sqlite3.Connection, lease_ids: Sequence[str], until: float) -> tuple[list[str], list[str], int]:
    """Those that are renewed, those that are lost (ended, or their sample is another runner's), and how many of the
    renewed ones had expired."""
    renewed: dict[str, int] = {}
    for lease_id in lease_ids:
        found = connection.execute(OF_LEASE, (lease_id,)).fetchone()
        if found is not None:
            connection.execute("UPDATE task_samples SET state=1, until_unix_s=? WHERE lease_id=?", (until, lease_id))
            renewed.setdefault(lease_id, found[2])
    lost = [lease_id for lease_id in lease_ids if lease_id not in renewed]
    return list(renewed), lost, sum(state == FREE for state in renewed.values())


def finish(connection: sqlite3.Connection, lease_id: str, reward: float) -> tuple[Ending, bool]:
    found = connection.execute(OF_LEASE, (lease_id,)).fetchone()
    if found is None:
        return _ended_before(connection, lease_id, "finished", reward), False
    group_number, sample_index, state, _ = found
    ending = _end_sample(connection, lease_id, group_number, sample_index, FINISHED, "finished", reward=reward)
    return ending, state == LEASED


def fail(connection: sqlite3.Connection, lease_id: str, error: str) -> tuple[Ending, bool]:
    found = connection.execute(OF_LEASE, (lease_id,)).fetchone()
    if found is None:
        return _ended_before(connection, lease_id, "failed"), False
    group_number, sample_index, state, failures = found
    error = error[:ERROR_CHARS_MAX]
    failures += state == LEASED  # else its expiry was counted
    if is_given_up(failures, _attempts_max(connection, group_number)):
        ending = _end_sample(connection, lease_id, group_number, sample_index, GIVEN_UP, "failed", error=error)
    else:
        ending = Ending(retried=True)
        _free(connection, lease_id, failures, error)
        _note_end(connection, lease_id, "failed", ending)
    return ending, state == LEASED


def release(connection: sqlite3.Connection, lease_ids: Iterable[str]) -> int:
    """Gives the samples back; returns how many leases this ended. One that has ended is left alone."""
    released = 0
    for lease_id in lease_ids:
        found = connection.execute(OF_LEASE, (lease_id,)).fetchone()
        if found is not None:
            released += found[2] == LEASED
            _free(connection, lease_id, found[3], "")
            _note_end(connection, lease_id, "released", Ending(retried=True))
    return released


def _free(connection: sqlite3.Connection, lease_id: str, failures: int, error: str) -> None:
    connection.execute(
        "UPDATE task_samples SET state=0, lease_id=NULL, request=NULL, failures=?, error=? WHERE lease_id=?",
        (failures, error, lease_id),
    )


def _end_sample(
    connection: sqlite3.Connection,
    lease_id: str,
    group_number: int,
    sample_index: int,
    state: int,
    how: LeaseEnd,
    *,
    reward: float | None = None,
    error: str = "",
) -> Ending:
    connection.execute(
        "UPDATE task_samples SET state=?, lease_id=NULL, request=NULL, reward=?, error=? "
        "WHERE group_number=? AND sample_index=?",
        (state, reward, error, group_number, sample_index),
    )
    [unended] = connection.execute(
        "UPDATE task_groups SET unended=unended-1 WHERE number=? RETURNING unended", (group_number,)
    ).fetchone()
    ending = Ending(group_ended=unended == 0)
    number = _note_end(connection, lease_id, how, ending, reward)
    if ending.group_ended:
        _end_group(connection, group_number, number)
    return ending


def _note_end(
    connection: sqlite3.Connection, lease_id: str, how: LeaseEnd, ending: Ending, reward: float | None = None
) -> int:
    number = connection.execute(
        "INSERT INTO task_ends(lease_id, how, retried, group_ended, reward) VALUES (?,?,?,?,?)",
        (lease_id, how, ending.retried, ending.group_ended, reward),
    ).lastrowid
    assert number is not None
    connection.execute("DELETE FROM task_ends WHERE number<=?", (number - ENDS_KEPT,))
    return number


def _ended_before(connection: sqlite3.Connection, lease_id: str, how: LeaseEnd, reward: float | None = None) -> Ending:
    """The answer of the request that ended the lease. Conflict if it ended otherwise, NotFound if it is another's."""
    found = connection.execute(
        "SELECT how, retried, group_ended, reward FROM task_ends WHERE lease_id=?", (lease_id,)
    ).fetchone()
    if found is None:
        raise NotFound(
            f"no lease {lease_id!r}",
            hint="it expired and its sample is another runner's, or its task was removed: renew leases in time",
        )
    if found[0] != how:
        raise Conflict(f"lease {lease_id} has {found[0]} before", hint="lease another task")
    if found[3] != reward:
        raise Conflict(
            f"lease {lease_id} has finished before, with reward {found[3]:g} and not {reward:g}",
            hint="a sample has one reward: send the same again, or lease another task",
        )
    return Ending(bool(found[1]), bool(found[2]), repeated=True)


def _end_group(connection: sqlite3.Connection, group_number: int, result_number: int) -> None:
    """The task gets the group's rewards; its samples are forgotten."""
    group_id, task_seq, number = connection.execute(
        "DELETE FROM task_groups WHERE number=? RETURNING group_id, task_seq, round", (group_number,)
    ).fetchone()
    samples = connection.execute(
        "SELECT reward, error FROM task_samples WHERE group_number=? ORDER BY sample_index", (group_number,)
    ).fetchall()
    result = {
        "group_id": group_id,
        "round": number,
        "rewards": [s[0] for s in samples],
        "errors": [s[1] for s in samples],
    }
    connection.execute("DELETE FROM task_samples WHERE group_number=?", (group_number,))
    connection.execute(
        "UPDATE tasks SET open_groups=open_groups-1, result_number=?, result=? WHERE seq=?",
        (result_number, json.dumps(result), task_seq),
    )


def _attempts_max(connection: sqlite3.Connection, group_number: int) -> int:
    [attempts_max] = connection.execute(
        "SELECT attempts_max FROM task_groups JOIN tasks ON seq=task_seq WHERE number=?", (group_number,)
    ).fetchone()
    return int(attempts_max)
