"""The prompt pool: tasks that runners lease with a deadline, and what came of them.

Invariants:
- an operation has its effect on disk, in one transaction, when it returns (in a log that gateways share: there); so the
  pool is the same after kill -9;
- a lease whose request went away before its answer is given back. A request that is sent again under its name
  (`request`) supersedes the one before: it gets what that one leased, which leases no more and gives nothing back;
- a change is counted and wakes those that wait whether or not its caller stays;
- a waiting request wakes when tasks are added or come back, and when a lease expires.

With a gateway that has `--data` all of it holds after a restart; without, the pool is in memory and lost at exit. What
was added survives a power cut; of the last leases and ends a power cut may lose some, so that a sample is leased again.

Gateways that share a log have the same pool: each has all of it in memory, and carries out the same commands with the
same times, so all decide alike. Leases begin and end by the log's clock; times in answers are this gateway's. While the
log's store is away requests get 503 after a wait, and leases go on running; a runner that renews its lease after it
ended has it still, unless another one was faster.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.core.commands import Effect
from gateway.core.tasks import (
    LEASE_S,
    TASKS_MAX,
    WAIT_S_MAX,
    Ending,
    Leased,
    NewTask,
    PoolCounts,
    TaskResult,
)
from gateway.log.base import Hooks, Ordering, Outcome
from gateway.log.local import alone
from gateway.runtime.clock import unix_s
from gateway.runtime.shielded import ShieldedTasks
from gateway.store.database import Database
from gateway.tasks import leases, rows
from gateway.tasks.commands import (
    AddTasks,
    Command,
    FailLease,
    FinishLease,
    LeaseSamples,
    ReleaseLeases,
    RemoveTasks,
    RenewLeases,
    SetPriorities,
)
from gateway.tasks.leases import LeaseRequest
from gateway.tasks.machine import TaskTables

SOON_S = 0.05
"""An expiry that is due by this gateway's clock may not be by the log's: a request that waits looks no more often."""

_RequestKey = tuple[str, str, str]
"""Pool, runner and name of a lease request: another runner's request of the same name is another request."""


@dataclass(frozen=True, slots=True)
class PromptPoolStatistics:
    """`tasks` and `leases`: now, in all pools. The others count since the gateway's start; `expired` leases are those
    of runners that died or were too slow, `given_up` samples those that failed too often."""

    tasks: int = 0
    leases: int = 0
    leased: int = 0
    finished: int = 0
    failed: int = 0
    released: int = 0
    expired: int = 0
    given_up: int = 0


class PromptPool:
    """All pools of one gateway, each with a name; a runner leases from one of them."""

    def __init__(self, database: Database, *, order: Ordering | None = None, tasks_max: int = TASKS_MAX) -> None:
        """`database`: has the tables. `order`: of changes; default: as they come."""
        self._database, self._tables = database, TaskTables(database)
        self._commands = (order or alone(database))(self._tables, Hooks(self._applied, self._restored))
        self._tasks_max = tasks_max
        self._statistics = PromptPoolStatistics()
        self._changed = asyncio.Event()  # replaced at each change: whoever took it before a look misses none
        self._shielded = ShieldedTasks()
        self._newest: dict[_RequestKey, object] = {}  # of a request's key: the one that was sent last, while it lives

    async def open(self) -> None:
        """Takes over what the previous process left, or what other gateways have made, leases included."""
        await self._commands.open()

    async def close(self) -> None:
        """Waits for the changes in progress. The database stays open."""
        await self._shielded.drain()
        await self._commands.close()

    async def add(self, pool: str, tasks: Sequence[NewTask]) -> int:
        """Adds the tasks whose id the pool does not have, and returns how many. OutOfCapacity when they do not fit."""
        return await self._shielded.run(self._add(pool, tasks), "add-tasks")

    async def _add(self, pool: str, tasks: Sequence[NewTask]) -> int:
        added: int = await self._commands.run(AddTasks(pool, tasks, self._tasks_max))
        await self._commands.synced()
        return added

    async def lease(
        self,
        pool: str,
        runner: str,
        *,
        count: int = 1,
        lease_s: float = LEASE_S,
        wait_s: float = 0.0,
        request: str | None = None,
    ) -> Leased:
        """Up to `count` samples; waits up to `wait_s` for the first one. Returns at once from a drained pool."""
        deadline = time.monotonic() + min(wait_s, WAIT_S_MAX)
        names = [secrets.token_hex(8) for _ in range(2 * count)]
        wanted = LeaseRequest(pool, runner, count, lease_s, request, names)
        key, mine = (pool, runner, request or names[0]), object()
        self._newest[key] = mine
        try:
            while True:
                changed = self._changed
                leased = await self._lease(wanted, key, mine)
                remaining_s = deadline - time.monotonic()
                if leased.leases or leased.drained or remaining_s <= 0:
                    return leased
                await _wait(changed, remaining_s, leased.next_expiry_unix_s)
                if self._newest.get(key) is not mine:
                    return Leased(())
        finally:
            if self._newest.get(key) is mine:
                del self._newest[key]

    async def _lease(self, wanted: LeaseRequest, key: _RequestKey, mine: object) -> Leased:
        """Written by a task of its own: a caller that is cancelled never gets the ids, so its leases are given back."""
        leasing = self._shielded.start(self._write_lease(wanted), "lease-tasks")
        try:
            return await asyncio.shield(leasing)
        except asyncio.CancelledError:
            if self._newest.get(key) is mine:
                gone = object()
                self._newest[key] = gone
                self._shielded.start(self._give_back(leasing, key, gone), "give-back-tasks")
            raise

    async def _write_lease(self, wanted: LeaseRequest) -> Leased:
        """A request that waits looks again at each change, and most find nothing: these are not worth a command."""
        await self._commands.look()
        now, ahead_s = self._commands.now(), self._commands.now() - unix_s()
        nothing = await self._database.run(lambda connection: leases.nothing_to_lease(connection, wanted, now))
        found: Leased = nothing or await self._commands.run(LeaseSamples(wanted))
        return _in_local_time(found, ahead_s) if ahead_s else found

    async def _give_back(self, leasing: asyncio.Task[Leased], key: _RequestKey, gone: object) -> None:
        await asyncio.wait([leasing])
        if self._newest.get(key) is not gone:
            return  # it was sent again meanwhile, and that request has the leases
        del self._newest[key]
        if leasing.exception() is None and (found := leasing.result().leases):
            await self._commands.run(ReleaseLeases([lease.lease_id for lease in found]))

    async def renew(self, lease_ids: Sequence[str], lease_s: float = LEASE_S) -> tuple[list[str], list[str]]:
        """The leases that now last `lease_s` from now, and those that are lost."""
        answer: tuple[list[str], list[str]] = await self._change(RenewLeases(lease_ids, lease_s))
        return answer

    async def finish(self, lease_id: str, reward: float) -> Ending:
        """Ends a lease with the sample's reward; the same again when it is repeated. NotFound when another runner has
        the sample, Conflict when the lease ended otherwise."""
        answer: Ending = await self._change(FinishLease(lease_id, reward))
        return answer

    async def fail(self, lease_id: str, error: str) -> Ending:
        """Ends a lease without a reward. Errors as `finish`."""
        answer: Ending = await self._change(FailLease(lease_id, error))
        return answer

    async def release(self, lease_ids: Sequence[str]) -> int:
        """Gives the samples back: others may lease them at once. How many leases this ended."""
        answer: int = await self._change(ReleaseLeases(lease_ids))
        return answer

    async def results(self, pool: str, after: int = 0, limit: int = 1000) -> list[TaskResult]:
        """Each task's newest ended round, in the order of their ends, after the one numbered `after`."""
        return await self._database.run(lambda connection: rows.results(connection, pool, after, limit))

    async def prioritize(self, pool: str, priorities: Mapping[str, float]) -> list[str]:
        """Sets priorities, by task id; returns the ids that the pool does not have."""
        answer: list[str] = await self._change(SetPriorities(pool, priorities))
        return answer

    async def remove(self, pool: str, task_ids: Sequence[str] | None) -> int:
        """Removes the tasks, or all drained ones (None), and returns how many. Leases on them are lost."""
        answer: int = await self._change(RemoveTasks(pool, task_ids))
        return answer

    async def counts(self, pool: str) -> PoolCounts:
        return await self._database.run(lambda connection: rows.count(connection, pool))

    async def leased(self) -> frozenset[tuple[str, int]]:
        """The samples that runners have now, of all pools, each by its group and index."""
        now = self._commands.now()
        return frozenset(await self._database.run(lambda connection: connection.execute(rows.LIVE, (now,)).fetchall()))

    def statistics(self) -> PromptPoolStatistics:
        return self._statistics

    async def _change(self, command: Command) -> Any:
        return await self._shielded.run(self._commands.run(command), type(command).__name__)

    def _applied(self, command: Command, outcome: Outcome, mine: bool) -> None:
        if not isinstance(outcome, Effect):
            return
        now = self._statistics
        changes = {name: getattr(now, name) + change for name, change in outcome.counted.items()}
        self._statistics = replace(now, **changes)
        if outcome.notable:
            self._notify()

    def _restored(self) -> None:
        tasks, live = self._tables.totals
        self._statistics = PromptPoolStatistics(tasks=tasks, leases=live)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def _wait(changed: asyncio.Event, remaining_s: float, next_expiry_unix_s: float | None) -> None:
    """Returns when the pool changed, the deadline has come, or a lease expired: then the caller looks again."""
    if next_expiry_unix_s is not None:
        remaining_s = min(remaining_s, max(0.0, next_expiry_unix_s - unix_s()))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(remaining_s):
            await changed.wait()


def _in_local_time(leased: Leased, ahead_s: float) -> Leased:
    found = [replace(lease, until_unix_s=lease.until_unix_s - ahead_s) for lease in leased.leases]
    due = leased.next_expiry_unix_s
    return Leased(found, leased.drained, None if due is None else max(due - ahead_s, unix_s() + SOON_S))
