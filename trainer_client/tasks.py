"""The trainer's side of the prompt pool: `PromptPool` for a synchronous training loop, `AsyncPromptPool` for asyncio.

with PromptPool("http://127.0.0.1:8080") as pool:
    pool.add_jsonl("prompts.jsonl", group_size=8, repeats=0)
    for step in range(steps):
        train(...)
        pool.curriculum(lambda result: -abs(result.mean_reward - 0.5))

Invariants:
- every request may be sent again, so each is, while the gateway is away;
- tasks are added in batches, in the order of the source, without holding more than one batch;
- the curriculum's function runs in the trainer's process; the gateway gets numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

import httpx
import msgspec

from protos.access.bearer import bearer
from protos.decoding import decode_json
from protos.errors import InvalidRequest, WrongServer
from trainer_client.gateway_http import WRONG_SERVER, Presence, our_transport, patiently, request, root_of
from trainer_client.loop import AsyncClient, SyncClient
from trainer_client.rewards import number

BATCH_TASKS = 1000
BATCH_BYTES = 4 << 20
"""One request has at most so many tasks, and ends after the task that reaches so many bytes."""
RESULTS_LIMIT = 1000

Answer = TypeVar("Answer")


class TaskOptions(TypedDict, total=False):
    """How the tasks of one `add` are rolled out."""

    group_size: int  # samples of a round; default 1
    repeats: int  # rounds; 0: endless; default 1
    priority: float  # the highest first; default 0
    attempts_max: int  # failures of a sample before it is given up; default 3
    id_column: str  # the column with the task's id; default: a digest of the row is the id


@dataclass(frozen=True, slots=True)
class Added:
    """`existing`: tasks that the pool had before; they stay as they are."""

    added: int = 0
    existing: int = 0


class TaskResult(msgspec.Struct, frozen=True):
    """A task's newest ended round: its rewards by sample, None for a sample that was given up (`errors` says why)."""

    number: int
    task_id: str
    group_id: str
    round: int
    priority: float
    rewards: list[float | None]
    errors: list[str]

    @property
    def mean_reward(self) -> float:
        """Of the samples that have a reward; nan when none has."""
        found = [reward for reward in self.rewards if reward is not None]
        return sum(found) / len(found) if found else math.nan


class PoolStatus(msgspec.Struct, frozen=True):
    """`ready`: tasks that can begin a round; `open_groups`: rounds that have not ended; `free` and `leased`: samples of
    those. The pool is drained when `drained` equals `tasks`."""

    pool: str
    tasks: int
    ready: int
    drained: int
    open_groups: int
    free: int
    leased: int


class _Added(msgspec.Struct):
    added: int
    existing: int


class _Results(msgspec.Struct):
    results: list[TaskResult]
    next: int


class _Prioritized(msgspec.Struct):
    changed: int
    unknown: list[str]


class _Removed(msgspec.Struct):
    removed: int


Curriculum = Callable[[TaskResult], float | None]
"""A task's new priority by its last rewards; None leaves it as it is."""


class PoolOptions(TypedDict, total=False):
    """The keyword arguments of a client."""

    pool: str  # the pool's name; default "default"
    timeout_s: float  # of one request; default 30
    api_key: str | None  # of the gateway's key file, with the role trainer; default: LAMINAR_API_KEY, if that is set


class AsyncPromptPool(AsyncClient):
    """One pool of the gateway at `gateway` (its base URL)."""

    def __init__(
        self, gateway: str, *, pool: str = "default", timeout_s: float = 30.0, api_key: str | None = None
    ) -> None:
        self.pool = pool
        self._url = root_of(gateway)
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(headers=bearer(api_key), **our_transport(self._url))
        self._presence = Presence(f"the gateway at {self._url}")
        self._seen = 0  # the number of the last result that the curriculum has used

    async def close(self) -> None:
        await self._http.aclose()

    async def add(self, rows: Iterable[Mapping[str, Any]], **options: Unpack[TaskOptions]) -> Added:
        """Adds each row as a task: dicts, a `datasets.Dataset`, anything that yields mappings.

        A row whose id the pool has is left out, so adding the same source again adds what is missing. InvalidRequest,
        with the row's number, for a row that JSON cannot hold; the batches before it were added.
        """
        total = Added()
        for batch in _batches(rows, options):
            found = await self._send("/tasks", _Added, {"pool": self.pool, "tasks": batch})
            total = Added(total.added + found.added, total.existing + found.existing)
        return total

    async def add_jsonl(self, path: str | Path, **options: Unpack[TaskOptions]) -> Added:
        """`add` for a file with a JSON object on each line; empty lines are left out."""
        return await self.add(_jsonl(Path(path)), **options)

    async def results(self, after: int = 0, limit: int = RESULTS_LIMIT) -> Sequence[TaskResult]:
        """Each task's newest ended round, in the order in which they ended, after the one numbered `after`."""
        return (await self._results(after, limit)).results

    async def _results(self, after: int, limit: int) -> _Results:
        query: dict[str, str | int] = {"pool": self.pool, "after": after, "limit": limit}
        return await self._send("/tasks/results", _Results, query=query)

    async def prioritize(self, priorities: Mapping[str, float]) -> Sequence[str]:
        """Sets priorities by task id; returns the ids that the pool does not have."""
        unknown: list[str] = []
        items = list(priorities.items())
        for start in range(0, len(items), BATCH_TASKS):
            batch = dict(items[start : start + BATCH_TASKS])
            body = {"pool": self.pool, "priorities": batch}
            unknown += (await self._send("/tasks/priorities", _Prioritized, body)).unknown
        return unknown

    async def curriculum(self, priority_of: Curriculum) -> int:
        """Gives each task that ended a round since the last call the priority that `priority_of` has for it; returns
        how many changed. Call it once a step. A new client begins with the last results of all tasks."""
        changed = 0
        while (found := await self._results(self._seen, RESULTS_LIMIT)).results:
            wanted = ((result, _priority(priority_of(result), result)) for result in found.results)
            fresh = {result.task_id: p for result, p in wanted if p is not None and p != result.priority}
            changed += len(fresh) - len(await self.prioritize(fresh))
            self._seen = found.next
        return changed

    async def remove(self, task_ids: Iterable[str] | None = None) -> int:
        """Removes tasks by id, or all drained ones; returns how many. Leases on them are lost."""
        if task_ids is None:
            body: dict[str, Any] = {"pool": self.pool, "drained": True}
            return (await self._send("/tasks/remove", _Removed, body)).removed
        ids, removed = list(task_ids), 0
        for start in range(0, len(ids), BATCH_TASKS):
            body = {"pool": self.pool, "task_ids": ids[start : start + BATCH_TASKS]}
            removed += (await self._send("/tasks/remove", _Removed, body)).removed
        return removed

    async def status(self) -> PoolStatus:
        return await self._send("/tasks", PoolStatus, query={"pool": self.pool})

    async def _send(
        self, path: str, answer: type[Answer], body: object = None, *, query: Mapping[str, str | int] | None = None
    ) -> Answer:
        encoded = None if body is None else msgspec.json.encode(body)

        async def send() -> Answer:
            raw = await request(self._http, self._url, path, body=encoded, query=query, timeout_s=self._timeout_s)
            try:
                return decode_json(raw, answer)
            except msgspec.DecodeError as error:
                raise WrongServer(
                    f"{self._url}{path} answered with something else: {error}", hint=WRONG_SERVER
                ) from error

        return await patiently(self._presence, send)


def _priority(found: float | None, result: TaskResult) -> float | None:
    if found is None:
        return None
    return number(
        found,
        f"the priority of task {result.task_id}",
        "the curriculum",
        hint="return a finite number, or None to leave it; `mean_reward` is nan when no sample has a reward",
    )


def _batches(rows: Iterable[Mapping[str, Any]], options: TaskOptions) -> Iterator[list[msgspec.Raw]]:
    """Rows as encoded tasks."""
    fields: dict[str, Any] = {name: value for name, value in options.items() if name != "id_column"}
    batch: list[msgspec.Raw] = []
    size = 0
    for index, row in enumerate(rows):
        encoded = _task(index, row, fields, options.get("id_column"))
        batch.append(msgspec.Raw(encoded))
        size += len(encoded)
        if len(batch) >= BATCH_TASKS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _task(index: int, row: Mapping[str, Any], fields: Mapping[str, Any], id_column: str | None) -> bytes:
    if not isinstance(row, Mapping):
        raise InvalidRequest(f"row {index} is {type(row).__name__}", hint='rows are mappings: {"prompt": "..."}')
    if (odd := _not_finite(row)) is not None:
        raise InvalidRequest(
            f"row {index} has {odd[1]} in {odd[0]}", hint="JSON has no such number: drop or convert it"
        )
    task = {"data": dict(row), **fields}
    if id_column is not None:
        if id_column not in row:
            raise InvalidRequest(f"row {index} has no column {id_column!r}", hint=f"it has {', '.join(map(str, row))}")
        if (task_id := row[id_column]) is None or task_id == "":
            raise InvalidRequest(
                f"row {index} has {task_id!r} in its id column {id_column!r}: all such rows would be one task",
                hint="give each row an id, or leave id_column out: a digest of the row is its id then",
            )
        task["task_id"] = str(task_id)
    try:
        return msgspec.json.encode(task)
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"row {index} is not JSON: {error}", hint="drop or convert the column") from error


def _not_finite(value: object, where: str = "") -> tuple[str, float] | None:
    """Where a row holds a number that JSON turns into null, and the number; None where it holds none."""
    if isinstance(value, float):
        return None if math.isfinite(value) else (where, value)
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    found = (_not_finite(item, f"{where}.{name}" if where else str(name)) for name, item in items)
    return next((one for one in found if one is not None), None)


def _jsonl(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise InvalidRequest(f"{path}, line {number}: {error}", hint="one JSON object on each line") from error


class PromptPool(SyncClient[AsyncPromptPool]):
    """`AsyncPromptPool` for a synchronous training loop; use it as a context manager, or call `close`."""

    def __init__(self, gateway: str, **options: Unpack[PoolOptions]) -> None:
        super().__init__(AsyncPromptPool(gateway, **options), "laminar-prompt-pool")

    def add(self, rows: Iterable[Mapping[str, Any]], **options: Unpack[TaskOptions]) -> Added:
        """See `AsyncPromptPool.add`. `rows` is read in the client's thread."""
        return self._loop.run(self._client.add(rows, **options))

    def add_jsonl(self, path: str | Path, **options: Unpack[TaskOptions]) -> Added:
        """See `AsyncPromptPool.add_jsonl`."""
        return self._loop.run(self._client.add_jsonl(path, **options))

    def results(self, after: int = 0, limit: int = RESULTS_LIMIT) -> Sequence[TaskResult]:
        """See `AsyncPromptPool.results`."""
        return self._loop.run(self._client.results(after, limit))

    def prioritize(self, priorities: Mapping[str, float]) -> Sequence[str]:
        """See `AsyncPromptPool.prioritize`."""
        return self._loop.run(self._client.prioritize(priorities))

    def curriculum(self, priority_of: Curriculum) -> int:
        """See `AsyncPromptPool.curriculum`. `priority_of` is called in the client's thread."""
        return self._loop.run(self._client.curriculum(priority_of))

    def remove(self, task_ids: Iterable[str] | None = None) -> int:
        """See `AsyncPromptPool.remove`."""
        return self._loop.run(self._client.remove(task_ids))

    def status(self) -> PoolStatus:
        """See `AsyncPromptPool.status`."""
        return self._loop.run(self._client.status())
