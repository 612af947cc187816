"""Where samples come from: the environment's own tasks, or a gateway's prompt pool.

Invariants:
- a sample is taken once, and then ends in exactly one way: completed, failed, or returned because the run stops;
- samples of own tasks come in order, a whole group before the next one; those of the pool in the pool's order;
- a lease is renewed for as long as its sample is here, and given back when the run stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self
from urllib.parse import quote

from agents_env.environment import Environment, PooledEnvironment, TaskT
from agents_env.failures import RolloutFailed, RunFailed
from agents_env.runner.journal import Journal
from agents_env.runner.plan import Plan, Sample, UnfitTask
from agents_env.server import Server, Usage

log = logging.getLogger("agents-env")

WAIT_S = 20.0
"""How long the gateway holds a request for a sample while the pool has none."""
RELEASE_TIMEOUT_S = 3.0
"""Deadline for giving leases back when a run stops: they expire anyway."""


class Source(Protocol[TaskT]):
    """`attempts`: how often a runner tries one sample before it reports the failure."""

    attempts: int

    async def take(self) -> Sample[TaskT] | None:
        """The next sample; None when there is none left."""
        ...

    async def completed(self, sample: Sample[TaskT], reward: float) -> None: ...

    async def failed(self, sample: Sample[TaskT], error: str) -> bool:
        """Returns whether the sample is given up; else it comes again."""
        ...

    async def returned(self, sample: Sample[TaskT]) -> None:
        """The run stops before the sample has ended. It must not raise."""
        ...

    async def close(self) -> None: ...


class OwnTasks:
    """The environment's stream of tasks, as `plan` has it. What the journal has an end of is left out."""

    def __init__(self, environment: Environment[TaskT], plan: Plan, journal: Journal | None = None) -> None:
        self.attempts = plan.attempts
        self._journal = journal
        self._samples = _samples(environment, plan, journal)

    async def take(self) -> Sample[Any] | None:
        return next(self._samples, None)

    async def completed(self, sample: Sample[Any], reward: float) -> None:
        if self._journal is not None:
            self._journal.ended((sample.group_id, sample.sample_index), reward)

    async def failed(self, sample: Sample[Any], error: str) -> bool:
        if self._journal is not None:
            self._journal.ended((sample.group_id, sample.sample_index), None)
        return True

    async def returned(self, sample: Sample[Any]) -> None:
        pass  # the next life finds it without an end

    async def close(self) -> None:
        pass


def _samples(environment: Environment[TaskT], plan: Plan, journal: Journal | None) -> Iterator[Sample[TaskT]]:
    past = None if journal is None else journal.past
    for index, task in enumerate(environment.tasks(plan.seed)):
        if plan.groups and index >= plan.groups:
            return
        group_id = f"{environment.name}-{plan.run_id}-{index}"
        for sample_index in range(plan.group_size):
            place = (group_id, sample_index)
            if past is None or place not in past.ended:
                first = 1 if past is None else past.attempts.get(place, 0) + 1
                yield Sample(task, group_id, sample_index, plan.group_size, first)


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """`follow`: wait for further tasks when the pool is drained."""

    name: str = "default"
    lease_s: float = 120.0
    follow: bool = False


class PoolTasks:
    """Samples leased from a gateway's prompt pool; `async with` it."""

    attempts = 1  # further ones are the pool's matter: perhaps another runner's

    def __init__(
        self, environment: Environment[TaskT], server: Server, options: PoolOptions, journal: Journal | None = None
    ) -> None:
        if not isinstance(environment, PooledEnvironment):
            raise RunFailed(
                f"environment {environment.name} cannot read tasks of a prompt pool: it has no `task_of(task_id, data)`"
            )
        self._task_of = environment.task_of
        self._server, self._options, self._journal = server, options, journal
        self._runner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._held: set[str] = set()
        self._asked: set[str] = set()  # requests whose answer has not come
        self._found = False  # a sample, in this life
        self._renewing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._journal is not None and (left := list(self._journal.past.leases.values())):
            log.info("gives back %d leases of the run's earlier life", len(left))
            await self._release(left)
        self._renewing = asyncio.create_task(self._renew(), name="renew-leases")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def take(self) -> Sample[Any] | None:
        while True:
            name = f"{self._runner}-{secrets.token_hex(6)}"
            self._asked.add(name)
            answer = await self._lease(name, WAIT_S)
            self._asked.discard(name)  # not when it is cancelled: `close` asks what became of it
            if answer["leases"]:
                self._found = True
                return self._sample(answer["leases"][0])
            if answer["drained"]:
                if not self._options.follow:
                    if not self._found:
                        await self._check_name()
                    return None
                await asyncio.sleep(1.0)  # a drained pool answers at once

    async def _check_name(self) -> None:
        """RunFailed where the pool has no tasks: its name may be misspelt, and nothing was rolled out."""
        if not (await self._server.get(f"/tasks?pool={quote(self._options.name, safe='')}", Usage()))["tasks"]:
            raise RunFailed(
                f"prompt pool {self._options.name!r} has no tasks; add some before, or with --follow later, or give "
                "another --pool NAME"
            )

    async def _lease(self, name: str, wait_s: float) -> dict[str, Any]:
        body = {
            "runner": self._runner,
            "pool": self._options.name,
            "lease_s": self._options.lease_s,
            "wait_s": wait_s,
            "request": name,
        }
        return await self._post("/tasks/lease", body)

    def _sample(self, lease: Mapping[str, Any]) -> Sample[Any]:
        """A task that the environment cannot read is a failure of that sample alone."""
        self._held.add(lease["lease_id"])
        task: Any
        try:
            task = self._task_of(lease["task_id"], lease["data"])
        except Exception as error:  # noqa: BLE001 (whatever the environment raises of foreign data)
            why = f"task {lease['task_id']} does not fit: {error}; `agents-env tasks` prints rows that do"
            task = UnfitTask(lease["task_id"], type(error).__name__, why)
        return Sample(
            task,
            lease["group_id"],
            lease["sample_index"],
            lease["group_size"],
            lease["attempt"],
            lease["lease_id"],
        )

    async def completed(self, sample: Sample[Any], reward: float) -> None:
        await self._end("/tasks/finish", sample.lease_id, {"reward": reward})
        self._note(sample)

    async def failed(self, sample: Sample[Any], error: str) -> bool:
        answer = await self._end("/tasks/fail", sample.lease_id, {"error": error[:1000]})
        self._note(sample)
        return answer is not None and not answer["retried"]

    async def returned(self, sample: Sample[Any]) -> None:
        if sample.lease_id in self._held:
            self._held.discard(sample.lease_id)
            await self._release([sample.lease_id])
            self._note(sample)

    def _note(self, sample: Sample[Any]) -> None:
        if self._journal is not None:
            self._journal.returned((sample.group_id, sample.sample_index))

    async def close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait({self._renewing})
        for name in list(self._asked):  # asked before the stop: perhaps leased, and the answer was not awaited
            with contextlib.suppress(RolloutFailed, TimeoutError):
                async with asyncio.timeout(RELEASE_TIMEOUT_S):
                    self._held.update(lease["lease_id"] for lease in (await self._lease(name, 0.0))["leases"])
        self._asked.clear()
        if self._held:
            await self._release(list(self._held))
            self._held.clear()

    async def _end(self, path: str, lease_id: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """None when the lease was lost, or the gateway is away for too long: then the sample becomes another runner's,
        who finds the session that was finished here."""
        try:
            return await self._post(path, {"lease_id": lease_id, **body})
        except RolloutFailed as error:
            log.warning("the end of lease %s was not taken: %s", lease_id, error)
            return None
        finally:
            self._held.discard(lease_id)

    async def _release(self, lease_ids: list[str]) -> None:
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await self._post("/tasks/release", {"lease_ids": lease_ids})
        except (RolloutFailed, TimeoutError) as error:
            log.warning("%d leases come back when they expire: %s", len(lease_ids), error or type(error).__name__)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._options.lease_s / 3)
            held = sorted(self._held)
            if not held:
                continue
            try:
                answer = await self._post("/tasks/renew", {"lease_ids": held, "lease_s": self._options.lease_s})
            except RolloutFailed as error:
                log.warning("%d leases are not renewed, and tried again: %s", len(held), error)
                continue
            lost = self._held.intersection(answer["lost"])
            if lost:
                log.warning("%d leases were lost: their samples are other runners' now", len(lost))

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._server.post(path, body, Usage(), repeatable=True)
