"""The `rollout_worker` of TRL's `AsyncGRPOTrainer`: groups of sessions, as rows with advantages and TRL's versions.

Invariants:
- a group's rows are put into the queue together, once all its sessions have ended; their lease is acknowledged when
  TRL has taken the last one, and given back if it never does;
- at most `groups_ahead` groups are under way or in the queue: this bounds the queue, too;
- the first error that no retry mends ends the worker, and `check_health` raises it;
- at SIGTERM leases are given back before the process ends. What a killed one had leased is taken back by the next
  worker of the same reader's name.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from protos.errors import InvalidRequest, LaminarError
from protos.trajectories import Trajectory
from trainer_client import Batch, ExperienceReader
from trainer_client.integrations.ending import at_sigterm, forget
from trainer_client.integrations.rollouts import Agent, Planned, RolloutFailed, Rollouts
from trainer_client.integrations.rows import Row, advantages_of, row_of
from trainer_client.integrations.trl.transfer import LaminarWeightTransfer
from trainer_client.integrations.versions import VersionMap
from trainer_client.sessions import Sessions, Stopped

log = logging.getLogger(__name__)

WAIT_S = 120.0
"""For the trajectories of sessions that have finished: they are in the buffer when `finish` returns."""
LEASE_S = 6 * 3600.0
"""Of rows in the queue, for steps of any length: a trainer that dies gives its leases back, or the next one does."""
FAILED_GROUPS_MAX = 8
"""In a row: a cause that playing again does not remove."""
METRICS_MAX = 1024
TICK_S = 0.5


@dataclass(frozen=True, slots=True)
class _Group:
    """One group under way: `number` is TRL's id of it."""

    number: int
    group_id: str
    task: Mapping[str, Any]


class _RowQueue(queue.Queue[RolloutSample]):
    """Counts what TRL takes: `taken` gets the number of each row's group."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def clear(self) -> None:
        with self.mutex:
            self.queue.clear()
        self.taken = queue.SimpleQueue()

    def _get(self) -> RolloutSample:
        sample: RolloutSample = super()._get()
        self.taken.put(sample.group_id)
        return sample


class LaminarRolloutWorker:
    """Plays groups of `group_size` sessions of each task, and hands their trajectories to TRL.

    `tasks`: rows, each the second argument of `agent`; gone through again and again. `sampling`: fields of every call
    (`max_tokens`, `temperature`) that an agent makes by `Session.chat`. `groups_ahead`: how many groups are rolled out
    before TRL takes them, about `max_staleness` times the groups of one step. A group with less than `group_min`
    finished sessions is dropped. `reader`: this trainer's name at the gateway, the same at each start, and another one
    for each of several trainers.
    """

    def __init__(
        self,
        gateway: str,
        transfer: LaminarWeightTransfer,
        tasks: Iterable[Mapping[str, Any]],
        agent: Agent,
        *,
        group_size: int,
        group_min: int | None = None,
        groups_ahead: int = 8,
        model: str = "policy",
        sampling: Mapping[str, Any] | None = None,
        concurrency: int = 32,
        attempts: int = 3,
        reader: str = "trl-async",
    ) -> None:
        self.rollout_buffer = _RowQueue()
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue(METRICS_MAX)
        self.versions = VersionMap()
        self._gateway, self._model, self._transfer = gateway, model, transfer
        self._tasks, self._agent = tasks, agent
        self._size, self._min = group_size, group_size if group_min is None else group_min
        self._groups_ahead = groups_ahead
        self._ahead = threading.Semaphore(groups_ahead)
        self._sampling = {"temperature": 1.0, **(sampling or {})}
        self._concurrency, self._attempts = concurrency, attempts
        self._reader_name = reader
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._leases: dict[int, tuple[Batch, int]] = {}  # by group: its lease, and the rows that TRL has not taken
        self._error: BaseException | None = None
        self._failed_in_a_row = 0
        self._last_progress = time.monotonic()
        self._life: _Life | None = None
        if not 1 <= self._min <= group_size:
            raise InvalidRequest(f"group_min={self._min}, group_size={group_size}", hint="1 <= group_min <= group_size")

    # -- what TRL calls

    def start(self) -> None:
        if self._life is None:
            self._ahead, self._error = threading.Semaphore(self._groups_ahead), None
            self._life = _Life(self)
            at_sigterm(self.stop)

    def stop(self) -> None:
        """Gives back what TRL has not taken, and abandons the sessions under way."""
        forget(self.stop)
        life, self._life = self._life, None
        if life is not None:
            life.end()
            self._leases.clear()
            self.rollout_buffer.clear()

    def update_model_version(self, model_version: int) -> None:
        self.versions.synced(model_version, self._transfer.version)

    def check_health(self, stale_after_s: float) -> None:
        """Raises what ended the worker, and LaminarError when no session has ended for `stale_after_s`."""
        if self._error is not None:
            raise self._error
        idle_s = time.monotonic() - self._last_progress
        if self._life is not None and idle_s > stale_after_s:
            raise LaminarError(
                f"no session has ended for {idle_s:.0f} s", hint="`gateway status` says what they wait for"
            )

    # -- groups

    def _groups(self) -> Iterator[_Group]:
        run = secrets.token_hex(4)
        while True:
            empty = True
            for task in self._tasks:
                empty = False
                number = next(self._numbers)
                yield _Group(number, f"trl-{run}-{number}", task)
            if empty:
                raise InvalidRequest("there are no tasks left", hint="pass a list or a data set, not an iterator")

    def _planned(self, group: _Group) -> list[Planned]:
        fields = {"group_id": group.group_id, "group_size": self._size, "tags": {"trainer": "trl"}}
        return [Planned(group.task, {**fields, "sample_index": index}) for index in range(self._size)]

    def _deliver(self, group: _Group, batch: Batch) -> None:
        """Puts a group's rows into the queue; with none, its place is free again."""
        samples = self._samples(group, batch.trajectories)
        with self._lock:
            self._failed_in_a_row = 0
            self._last_progress = time.monotonic()
            self._leases[group.number] = (batch, len(samples))
        for sample in samples:
            self.rollout_buffer.put_nowait(sample)
        if not samples:
            self.rollout_buffer.taken.put(group.number)

    def _samples(self, group: _Group, trajectories: Sequence[Trajectory]) -> list[RolloutSample]:
        """The baseline is the mean over sessions, whatever number of branches each has; a branch with a reward of its
        own is compared with that."""
        first = {trajectory.session_id: trajectory.reward for trajectory in reversed(trajectories)}
        advantage_of = dict(zip(first, advantages_of(list(first.values())), strict=True))
        mean, deviation = float(np.mean(list(first.values()))), float(np.std(list(first.values())))
        rows = [(trajectory, row) for trajectory in trajectories if (row := row_of(trajectory)) is not None]
        return [
            self._sample(
                group,
                row,
                (trajectory.reward - mean) / (deviation + 1e-8)
                if trajectory.own_reward
                else advantage_of[row.session_id],
                {"reward": trajectory.reward, "reward_std": deviation},
            )
            for trajectory, row in rows
        ]

    def _sample(self, group: _Group, row: Row, advantage: float, metrics: dict[str, float]) -> RolloutSample:
        return RolloutSample(
            prompt=group.task.get("prompt", []),
            completion=[],
            input_ids=np.asarray(row.token_ids, dtype=np.int64),
            completion_mask=np.asarray(row.mask, dtype=np.int64),
            old_log_probs=np.asarray(row.logprobs, dtype=np.float32),
            advantage=advantage,
            model_version=self.versions.count_of(row.version),
            group_id=group.number,
            metrics={**metrics, "laminar/version": float(row.version)},
            enqueued_at=time.time(),
        )

    def _dropped(self, group: _Group, error: BaseException) -> None:
        with self._lock:
            self._failed_in_a_row += 1
            failed = self._failed_in_a_row
        log.warning("group %s is dropped: %s", group.group_id, error)
        self._metric({"laminar/groups_dropped_total": 1.0})
        if failed >= FAILED_GROUPS_MAX:
            self._end_with(error)
        self._ahead.release()

    def _end_with(self, error: BaseException) -> None:
        if not isinstance(error, Stopped) and self._error is None:
            self._error = error

    def _metric(self, values: dict[str, Any]) -> None:
        try:
            self.metrics_queue.put_nowait(values)
        except queue.Full:
            log.debug("TRL drains no metrics: %s", values)

    def _untaken(self, number: int) -> Batch | None:
        """One row of a group was taken. Returns the group's lease with the last one."""
        with self._lock:
            batch, rows = self._leases[number]
            if rows > 1:
                self._leases[number] = (batch, rows - 1)
                return None
            del self._leases[number]
        self._ahead.release()
        return batch


class _Life:
    """The threads and clients of a worker from `start` to `stop`."""

    def __init__(self, worker: LaminarRolloutWorker) -> None:
        self._worker = worker
        self._client = Sessions(worker._gateway, worker._model, connections=worker._concurrency)
        self._reader = ExperienceReader(worker._gateway, reader=worker._reader_name)
        self._rollouts = Rollouts(
            self._client, worker._agent, concurrency=worker._concurrency, attempts=worker._attempts
        )
        self._deliveries = ThreadPoolExecutor(4, thread_name_prefix="laminar-deliver")
        self._groups = threading.Thread(target=self._play_groups, name="laminar-groups", daemon=True)
        self._acks = threading.Thread(target=self._acknowledge, name="laminar-acks", daemon=True)
        worker._last_progress = time.monotonic()
        self._groups.start()
        self._acks.start()

    def end(self) -> None:
        self._client.stop.set()
        self._worker.rollout_buffer.taken.put(None)
        self._deliveries.shutdown(cancel_futures=True)
        self._acks.join()
        for batch, _ in self._worker._leases.values():  # what was taken is acknowledged by now
            try:
                self._reader.give_back(batch)
            except LaminarError as error:
                log.warning("a group of %d comes back when its lease ends: %s", len(batch), error)
        self._rollouts.close()  # after the leases: it waits for the agents
        self._reader.close()  # also ends the wait of `_take_back` for a gateway that is away
        self._groups.join()
        self._client.close()

    def _take_back(self) -> None:
        """What a worker of this name had leased when its process died."""
        if returned := self._reader.resume():
            log.warning("%d trajectories that an earlier worker had leased are given back", returned)

    def _play_groups(self) -> None:
        try:
            self._take_back()
            for group in self._worker._groups():
                while not self._worker._ahead.acquire(timeout=TICK_S):
                    if self._client.stop.is_set():
                        return
                if self._client.stop.is_set():
                    return
                self._play(group)
        except BaseException as error:  # noqa: BLE001 (check_health raises it in TRL's thread)
            if not self._client.stop.is_set():
                self._worker._end_with(error)

    def _play(self, group: _Group) -> None:
        running = self._rollouts.start(self._worker._planned(group), self._worker._sampling)
        left = itertools.count(len(running) - 1, -1)
        lock = threading.Lock()

        def ended(_: Future[str]) -> None:
            self._worker._last_progress = time.monotonic()
            with lock:
                last = next(left) == 0
            if last and not self._client.stop.is_set():
                with contextlib.suppress(RuntimeError):  # it is shut down since
                    self._deliveries.submit(self._collect, group, running)

        for one in running:
            one.add_done_callback(ended)

    def _collect(self, group: _Group, running: Sequence[Future[str]]) -> None:
        """All sessions of a group have ended: leases their trajectories, and hands them on if they are enough."""
        errors = [error for one in running if (error := one.exception()) is not None]
        names = [one.result() for one in running if one.exception() is None]
        try:
            if fatal := [error for error in errors if not isinstance(error, RolloutFailed)]:
                raise fatal[0]
            self._reader.trainer_version = self._worker._transfer.version
            batch = self._reader.sample(session_ids=names, wait_s=WAIT_S, lease_s=LEASE_S) if names else None
            found = 0 if batch is None else len({trajectory.session_id for trajectory in batch.trajectories})
            if batch is not None and found >= self._worker._min:
                self._worker._deliver(group, batch)
                return
            if batch is not None:
                self._reader.ack(batch)
            raise errors[0] if errors else RolloutFailed(f"{len(names) - found} of its sessions did not come back")
        except RolloutFailed as error:
            self._worker._dropped(group, error)
        except BaseException as error:  # noqa: BLE001 (check_health raises it in TRL's thread)
            self._worker._end_with(error)

    def _acknowledge(self) -> None:
        while (number := self._worker.rollout_buffer.taken.get()) is not None:
            if (batch := self._worker._untaken(number)) is not None:
                try:
                    self._reader.ack(batch)
                except LaminarError as error:
                    log.warning("a group that TRL took may be sampled again: %s", error)
