"""The prompt pool: a trainer adds tasks (`POST /tasks`), runners lease them and say what came of them.

Every route but `GET /tasks` may be sent again after a lost answer: tasks that are there are not added again, `request`
names a lease request, and an end that is repeated gets the same answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from gateway.api.bodies import (
    AT_ONCE_BYTES,
    AtLeastOne,
    Count,
    answer_json,
    answer_pieces,
    decode,
    json_pieces,
    read,
    within,
)
from gateway.api.errors import BadField
from gateway.core.tasks import (
    ATTEMPTS_MAX,
    DATA_BYTES_MAX,
    ERROR_CHARS_MAX,
    GROUP_SIZE_MAX,
    LEASE_S,
    LEASES_PER_REQUEST_MAX,
    TASKS_PER_REQUEST_MAX,
    WAIT_S_MAX,
    NewTask,
    TaskLease,
    TaskResult,
)
from gateway.tasks import PromptPool

DEFAULT_POOL = "default"
NAME_MAX = 200
RESULTS_MAX = 10_000
RESULTS_AT_ONCE = 10_000
"""Rewards in one answer; more are encoded beside the event loop."""
DIGITS_MAX = 15
"""Digits of a number in a query."""
PoolName = Annotated[str, Meta(min_length=1, max_length=NAME_MAX, description="The prompt pool.")]
TaskName = Annotated[str, Meta(min_length=1, max_length=NAME_MAX)]
LeaseName = Annotated[str, Meta(max_length=NAME_MAX, description="The lease of a sample.")]
LeaseIds = Annotated[list[LeaseName], Meta(max_length=TASKS_PER_REQUEST_MAX, description="The leases.")]
LeaseSeconds = Annotated[
    float, Meta(ge=0.001, le=86_400, description="Seconds after which another runner may get the samples.")
]


class AddTask(msgspec.Struct, forbid_unknown_fields=True):
    data: Annotated[dict[str, Any], Meta(description="What the environment needs.")]
    task_id: Annotated[TaskName | None, Meta(description="Its id in the pool. Default: a digest of `data`.")] = None
    priority: Annotated[float, Meta(description="Tasks of the highest are leased first.")] = 0.0
    group_size: Annotated[int, Meta(ge=1, le=GROUP_SIZE_MAX, description="Samples of each round.")] = 1
    repeats: Annotated[Count, Meta(description="Rounds, each of them a group; 0: endless.")] = 1
    attempts_max: Annotated[AtLeastOne, Meta(description="Failures of a sample before it is given up.")] = ATTEMPTS_MAX


class AddTasksRequest(msgspec.Struct, forbid_unknown_fields=True):
    tasks: Annotated[list[AddTask], Meta(max_length=TASKS_PER_REQUEST_MAX, description="The tasks.")]
    pool: PoolName = DEFAULT_POOL


class TasksAdded(msgspec.Struct):
    """`existing`: tasks that the pool had before, by their id; they stay as they are."""

    added: int
    existing: int


class PoolAnswer(msgspec.Struct):
    """One pool. `ready`: tasks that can begin a round; `open_groups`: rounds that have not ended; `free` and `leased`:
    samples of those."""

    pool: str
    tasks: int
    ready: int
    drained: int
    open_groups: int
    free: int
    leased: int


class LeaseTasksRequest(msgspec.Struct, forbid_unknown_fields=True):
    runner: Annotated[
        str, Meta(min_length=1, max_length=NAME_MAX, description="The runner's name: its leases belong to it.")
    ]
    pool: PoolName = DEFAULT_POOL
    count: Annotated[int, Meta(ge=1, le=LEASES_PER_REQUEST_MAX, description="How many samples at most.")] = 1
    lease_s: LeaseSeconds = LEASE_S
    wait_s: Annotated[float, Meta(ge=0, le=WAIT_S_MAX, description="Seconds to wait until there is one.")] = 0.0
    request: Annotated[
        Annotated[str, Meta(min_length=1, max_length=NAME_MAX)] | None,
        Meta(description="The runner's name of this request: sent again, it gets the same leases."),
    ] = None


class LeasedTask(msgspec.Struct):
    """A sample of a task's group. `attempt` counts from 1, `round` from 0."""

    lease_id: str
    task_id: str
    data: dict[str, Any]
    group_id: str
    group_size: int
    sample_index: int
    round: int
    attempt: int
    until_unix_s: float


class TasksLeased(msgspec.Struct):
    """`drained`: nothing is left and nothing can come back, unless tasks are added."""

    leases: Sequence[LeasedTask]
    drained: bool


class RenewTasksRequest(msgspec.Struct, forbid_unknown_fields=True):
    lease_ids: LeaseIds
    lease_s: LeaseSeconds = LEASE_S


class TasksRenewed(msgspec.Struct):
    """`lost`: leases that have ended, or whose sample another runner has."""

    renewed: Sequence[str]
    lost: Sequence[str]


class FinishTaskRequest(msgspec.Struct, forbid_unknown_fields=True):
    lease_id: LeaseName
    reward: Annotated[float, Meta(description="The sample's.")]


class FailTaskRequest(msgspec.Struct, forbid_unknown_fields=True):
    lease_id: LeaseName
    error: Annotated[
        str,
        Meta(
            max_length=ERROR_CHARS_MAX,
            description="What failed, its boundary first, such as `tool: no answer in 30 s`.",
        ),
    ] = ""


class TaskEnded(msgspec.Struct):
    """`retried`: the sample will be leased again. `group_ended`: it was its group's last."""

    retried: bool
    group_ended: bool


class ReleaseTasksRequest(msgspec.Struct, forbid_unknown_fields=True):
    lease_ids: LeaseIds


class TasksReleased(msgspec.Struct):
    released: int


class TaskResults(msgspec.Struct):
    """In the order in which the rounds ended. `next`: the `after` of the next request."""

    results: Sequence[TaskResult]
    next: int


class PrioritizeTasksRequest(msgspec.Struct, forbid_unknown_fields=True):
    priorities: Annotated[
        dict[Annotated[str, Meta(max_length=NAME_MAX)], float],
        Meta(max_length=TASKS_PER_REQUEST_MAX, description="Priorities by the ids of tasks."),
    ]
    pool: PoolName = DEFAULT_POOL


class TasksPrioritized(msgspec.Struct):
    changed: int
    unknown: Sequence[str]


class RemoveTasksRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Either `task_ids` or `drained`. Leases on removed tasks are lost."""

    pool: PoolName = DEFAULT_POOL
    task_ids: Annotated[
        Annotated[list[Annotated[str, Meta(max_length=NAME_MAX)]], Meta(max_length=TASKS_PER_REQUEST_MAX)] | None,
        Meta(description="The ids of the tasks to remove."),
    ] = None
    drained: Annotated[bool, Meta(description="Remove all tasks that have had their rounds.")] = False


class TasksRemoved(msgspec.Struct):
    removed: int


def add_task_routes(app: web.Application, pool: PromptPool) -> None:
    handlers = _Handlers(pool)
    app.router.add_post("/tasks", handlers.add)
    app.router.add_get("/tasks", handlers.show)
    app.router.add_post("/tasks/lease", handlers.lease)
    app.router.add_post("/tasks/renew", handlers.renew)
    app.router.add_post("/tasks/finish", handlers.finish)
    app.router.add_post("/tasks/fail", handlers.fail)
    app.router.add_post("/tasks/release", handlers.release)
    app.router.add_get("/tasks/results", handlers.results)
    app.router.add_post("/tasks/priorities", handlers.prioritize)
    app.router.add_post("/tasks/remove", handlers.remove)


_add = msgspec.json.Decoder(AddTasksRequest)
_lease = msgspec.json.Decoder(LeaseTasksRequest)
_renew = msgspec.json.Decoder(RenewTasksRequest)
_finish = msgspec.json.Decoder(FinishTaskRequest)
_fail = msgspec.json.Decoder(FailTaskRequest)
_release = msgspec.json.Decoder(ReleaseTasksRequest)
_prioritize = msgspec.json.Decoder(PrioritizeTasksRequest)
_remove = msgspec.json.Decoder(RemoveTasksRequest)


class _Handlers:
    def __init__(self, pool: PromptPool) -> None:
        self._pool = pool

    async def add(self, request: web.Request) -> web.Response:
        raw = await request.read()
        pool, tasks = await within(request, raw, lambda: _new_tasks(decode(_add, raw)))
        added = await self._pool.add(pool, tasks)
        return answer_json(TasksAdded(added, len(tasks) - added))

    async def show(self, request: web.Request) -> web.Response:
        name = _pool_name(request)
        counts = await self._pool.counts(name)
        return answer_json(
            PoolAnswer(name, counts.tasks, counts.ready, counts.drained, counts.open_groups, counts.free, counts.leased)
        )

    async def lease(self, request: web.Request) -> web.StreamResponse:
        wanted = await read(request, _lease)
        leased = await self._pool.lease(
            wanted.pool,
            wanted.runner,
            count=wanted.count,
            lease_s=wanted.lease_s,
            wait_s=wanted.wait_s,
            request=wanted.request,
        )
        long = sum(len(lease.data) for lease in leased.leases) > AT_ONCE_BYTES
        tasks = map(_leased_task, leased.leases)
        return await answer_pieces(request, json_pieces(TasksLeased([], leased.drained), "leases", tasks), long=long)

    async def renew(self, request: web.Request) -> web.Response:
        wanted = await read(request, _renew)
        return answer_json(TasksRenewed(*await self._pool.renew(wanted.lease_ids, wanted.lease_s)))

    async def finish(self, request: web.Request) -> web.Response:
        wanted = await read(request, _finish)
        ending = await self._pool.finish(wanted.lease_id, wanted.reward)
        return answer_json(TaskEnded(ending.retried, ending.group_ended))

    async def fail(self, request: web.Request) -> web.Response:
        wanted = await read(request, _fail)
        ending = await self._pool.fail(wanted.lease_id, wanted.error)
        return answer_json(TaskEnded(ending.retried, ending.group_ended))

    async def release(self, request: web.Request) -> web.Response:
        wanted = await read(request, _release)
        return answer_json(TasksReleased(await self._pool.release(wanted.lease_ids)))

    async def results(self, request: web.Request) -> web.StreamResponse:
        after, limit = _number(request, "after", 0), min(_number(request, "limit", 1000), RESULTS_MAX)
        found = await self._pool.results(_pool_name(request), after, limit)
        last = found[-1].number if found else after
        long = sum(len(result.rewards) for result in found) > RESULTS_AT_ONCE
        return await answer_pieces(request, json_pieces(TaskResults([], last), "results", found), long=long)

    async def prioritize(self, request: web.Request) -> web.Response:
        wanted = await read(request, _prioritize)
        unknown = await self._pool.prioritize(wanted.pool, wanted.priorities)
        return answer_json(TasksPrioritized(len(wanted.priorities) - len(unknown), unknown))

    async def remove(self, request: web.Request) -> web.Response:
        wanted = await read(request, _remove)
        if (wanted.task_ids is None) != wanted.drained:
            raise BadField("task_ids", "name either `task_ids` or `drained`", hint='such as {"drained": true}')
        return answer_json(TasksRemoved(await self._pool.remove(wanted.pool, wanted.task_ids)))


def _new_tasks(wanted: AddTasksRequest) -> tuple[str, list[NewTask]]:
    return wanted.pool, [_new_task(index, task) for index, task in enumerate(wanted.tasks)]


def _new_task(index: int, task: AddTask) -> NewTask:
    data = msgspec.json.encode(task.data)
    if len(data) > DATA_BYTES_MAX:
        raise BadField(
            f"tasks[{index}].data",
            f"`data` has {len(data)} bytes",
            hint=f"at most {DATA_BYTES_MAX}; name files instead",
        )
    name = task.task_id or hashlib.sha256(data).hexdigest()[:16]
    return NewTask(name, data, task.priority, task.group_size, task.repeats, task.attempts_max)


def _leased_task(lease: TaskLease) -> LeasedTask:
    return LeasedTask(
        lease.lease_id,
        lease.task_id,
        msgspec.json.decode(lease.data),
        lease.group_id,
        lease.group_size,
        lease.sample_index,
        lease.round,
        lease.attempt,
        lease.until_unix_s,
    )


def _pool_name(request: web.Request) -> str:
    name = request.query.get("pool", DEFAULT_POOL)
    if not 1 <= len(name) <= NAME_MAX:
        raise BadField("pool", "`pool` is empty or too long", hint=f"1 to {NAME_MAX} characters")
    return name


def _number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX):
        raise BadField(name, f"{name}={text!r} is not a number", hint=f"such as {name}={default}")
    return int(text)
