"""The runner: plays the samples of a source, `concurrency` at once, until there are none, or a time or a signal comes.

Invariants:
- at most `concurrency` rollouts run;
- every attempt at a sample ends in exactly one `Record`: completed, failed, or abandoned because the run ended;
- a sample that fails is retried in a new session, up to the source's `attempts` times; then its group stays incomplete;
- a session that was finished by a runner that died before it could report it is reported, not played again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, Generic, TextIO

from agents_env.environment import Environment, MatchEnvironment, Outcome, SelfCallingEnvironment, TaskT, outcome_of
from agents_env.failures import Boundary, RolloutFailed, RunFailed
from agents_env.runner.journal import Journal
from agents_env.runner.phases import Phases, PhaseTimedOut
from agents_env.runner.plan import Plan, Sample, UnfitTask
from agents_env.runner.records import Failure, Record, Statistics, Status, Tally
from agents_env.runner.seats import GatewaySeats
from agents_env.runner.sources import OwnTasks, Source
from agents_env.server import Server, Session, SessionSpec, Usage

log = logging.getLogger("agents-env")

ATTEMPT_PAUSE_S = 0.25
"""The pause before a retry, times the attempts made: a server that fails fast is not flooded."""


class Runner(Generic[TaskT]):
    """One run of one environment against one server. `source` None: the environment's own tasks."""

    def __init__(
        self,
        environment: Environment[TaskT],
        server: Server,
        plan: Plan,
        *,
        out: TextIO | None = None,
        source: Source[TaskT] | None = None,
        journal: Journal | None = None,
        on_record: Callable[[Record], None] | None = None,
    ) -> None:
        self.plan = plan
        self._environment = environment
        self._server = server
        self._out = out
        self._source: Source[TaskT] = OwnTasks(environment, plan, journal) if source is None else source
        self._journal = journal
        self._on_record = on_record
        self._tally = Tally()
        if journal is not None:
            self._resume(journal)

    def _resume(self, journal: Journal) -> None:
        for (group_id, _), reward in journal.past.ended.items():
            if reward is None:
                self._tally.give_up(group_id)
            else:
                self._tally.add_reward(group_id, self.plan.group_size, reward)
        if journal.past.ended:
            log.info("resumed: %s has the ends of %d samples", journal.path, len(journal.past.ended))

    async def run(self, stop: asyncio.Event) -> Statistics:
        """Runs until the source is empty, its time is over or `stop` is set; RunFailed after too many failures."""
        self._tally.began = time.monotonic()
        rolling = asyncio.create_task(self._roll_out(), name="rollouts")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        try:
            await asyncio.wait({rolling, stopping}, timeout=self.plan.duration_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            rolling.cancel()  # each rollout that still runs abandons its session
            await asyncio.wait({rolling, stopping})
        if not rolling.cancelled():
            rolling.result()
        return self.statistics()

    def statistics(self) -> Statistics:
        found = self._tally.statistics()
        return replace(found, waits_for=self._server.waits_for()) if found.running else found

    async def _roll_out(self) -> None:
        try:
            async with asyncio.TaskGroup() as workers:
                for number in range(self.plan.concurrency):
                    workers.create_task(self._work(), name=f"worker-{number}")
        except ExceptionGroup as failures:  # no `except*`: Python 3.11.2 wraps what is raised in it in a group again
            if failures.split(RunFailed)[1] is not None:
                raise
            raise failures.exceptions[0] from None

    async def _work(self) -> None:
        while (sample := await self._take()) is not None:
            try:
                await self._play(sample)
            except asyncio.CancelledError:
                await self._source.returned(sample)
                raise

    async def _take(self) -> Sample[TaskT] | None:
        try:
            return await self._source.take()
        except RolloutFailed as error:
            raise RunFailed(f"no sample can be had: {error}") from error

    async def _play(self, sample: Sample[TaskT]) -> None:
        if sample.first_attempt > 1 and await self._recovered(sample):
            return
        for number in range(self._source.attempts):
            failure = await self._attempt(sample, sample.first_attempt + number)
            if failure is None:
                return
            if self._tally.failed_in_a_row >= self.plan.failures_max:
                await self._source.returned(sample)
                raise RunFailed(f"{self._tally.failed_in_a_row} rollouts in a row failed: {self._tally.last_error}")
            if not failure.again:
                break
            if number + 1 < self._source.attempts:
                await asyncio.sleep(ATTEMPT_PAUSE_S * (number + 1))
        assert failure is not None  # there is one attempt at least
        if await self._source.failed(sample, str(failure)):
            self._tally.give_up(sample.group_id)
            log.log(
                logging.WARNING if failure.again else logging.DEBUG,  # else its only failure was told of
                "sample %d of %s given up after %d attempts",
                sample.sample_index,
                sample.group_id,
                sample.first_attempt + number,
            )

    async def _recovered(self, sample: Sample[TaskT]) -> bool:
        """Settles the newest session of earlier attempts: one that was finished counts, a live one is abandoned."""
        for attempt in range(sample.first_attempt - 1, 0, -1):
            session_id = sample.session_id(attempt)
            try:
                found = await self._server.look(session_id)
            except RolloutFailed as error:
                log.warning("session %s of an earlier attempt is not looked at: %s", session_id, error)
                return False
            if found is None:
                continue
            if found.get("state") == "finished" and (result := found.get("result")) is not None:
                record = self._recorder(sample, attempt)
                record(Usage(), status=result["status"], reward=float(result["reward"]), recovered=True)
                await self._source.completed(sample, float(result["reward"]))
                return True
            await self._server.abandon(session_id, "its runner died")
            return False
        return False

    async def _attempt(self, sample: Sample[TaskT], attempt: int) -> RolloutFailed | None:
        """Plays `sample` once and records its end; returns what it failed of."""
        spec = self._session_spec(sample, attempt)
        record = self._recorder(sample, attempt)
        usage = Usage()
        if isinstance(sample.task, UnfitTask):  # no session begins
            unfit = RolloutFailed("environment", sample.task.kind, sample.task.why, "reset")
            record(usage, status="failed", error=_failure(unfit))
            return unfit
        self._tally.running += 1
        if self._journal is not None:
            self._journal.began((sample.group_id, sample.sample_index), attempt, sample.lease_id)
        session: Session | None = None
        try:
            session = await self._server.open(spec)
            usage = session.usage
            outcome = await self._judge(sample, session, spec)
            if isinstance(self._environment, SelfCallingEnvironment):
                await self._check_called(spec.session_id, outcome)
            await self._server.finish(session, outcome)
        except asyncio.CancelledError:
            await self._server.abandon(spec.session_id, "the run was stopped")
            record(usage, status="abandoned")
            raise
        except RolloutFailed as error:
            if session is not None or error.kind != "http 409":  # else the name is that of somebody else's session
                await self._server.abandon(spec.session_id, str(error))
            record(usage, status="failed", error=_failure(error))
            return error
        finally:
            self._tally.running -= 1
        record(usage, status=outcome.status, reward=outcome.reward, metrics=dict(outcome.metrics))
        await self._source.completed(sample, outcome.reward)
        return None

    async def _check_called(self, session_id: str, outcome: Outcome) -> None:
        """RolloutFailed for a session without a turn, which has nothing to reward: it would be so the next time."""
        found = await self._server.look(session_id)
        if found is not None and found.get("turns") == found.get("running") == 0:
            status = outcome.metrics.get("exit_status")
            ended = "" if status is None else f", and ended with status {status:g}"
            raise RolloutFailed(
                "environment",
                "no call",
                f"the program made no model call by its session that was answered{ended}: it has to use "
                "$OPENAI_BASE_URL or $ANTHROPIC_BASE_URL, and $AGENTS_ENV_MODEL",
                "tool",
                again=False,
            )

    async def _judge(self, sample: Sample[TaskT], session: Session, spec: SessionSpec) -> Outcome:
        """The environment's outcome; other exceptions than RolloutFailed are attributed to the environment."""
        phases = Phases(self.plan.limits)
        chat = self._server.chat(session, phases.waits)
        try:
            async with phases.limited():
                outcome: object  # an environment may be anybody's, so its annotations prove nothing
                if isinstance(self._environment, SelfCallingEnvironment):
                    access = self._server.access(session, sample.sample_index)
                    outcome = await self._environment.play(sample.task, access)
                elif isinstance(self._environment, MatchEnvironment):
                    seats = GatewaySeats(self._server, spec, phases)
                    outcome = await self._environment.match(sample.task, phases.chat(chat), seats)
                else:
                    outcome = await self._environment.rollout(sample.task, phases.chat(chat))
                return outcome_of(outcome)
        except RolloutFailed as error:
            error.phase = phases.current
            raise
        except PhaseTimedOut as error:
            boundary: Boundary = "model" if error.phase == "model" else "environment"
            raise RolloutFailed(boundary, "timeout", str(error), error.phase) from error
        except Exception as error:
            log.exception("environment %s failed on task %s", self._environment.name, sample.task.task_id)
            raise RolloutFailed("environment", type(error).__name__, str(error), phases.current) from error

    def _session_spec(self, sample: Sample[TaskT], attempt: int) -> SessionSpec:
        return SessionSpec(
            sample.session_id(attempt),
            sample.group_id,
            sample.sample_index,
            sample.group_size,
            self.plan.split,
            {"environment": self._environment.name, "task_id": sample.task.task_id, "run_id": self.plan.run_id},
            self.plan.version,
        )

    def _recorder(self, sample: Sample[TaskT], attempt: int) -> Callable[..., None]:
        """The function that records the end of this attempt."""
        began = time.monotonic()

        def record(
            usage: Usage,
            *,
            status: Status,
            reward: float | None = None,
            metrics: dict[str, float] | None = None,
            error: Failure | None = None,
            recovered: bool = False,
        ) -> None:
            fields: dict[str, Any] = asdict(usage)
            self._add(
                Record(
                    t_unix_s=round(time.time(), 3),
                    run_id=self.plan.run_id,
                    environment=self._environment.name,
                    task_id=sample.task.task_id,
                    group_id=sample.group_id,
                    sample_index=sample.sample_index,
                    group_size=sample.group_size,
                    attempt=attempt,
                    session_id=sample.session_id(attempt),
                    status=status,
                    reward=reward,
                    metrics=metrics or {},
                    seconds=round(time.monotonic() - began, 3),
                    error=error,
                    recovered=recovered,
                    **fields,
                )
            )

        return record

    def _add(self, record: Record) -> None:
        told = self._tally.last_error if self._tally.failed_in_a_row else ""
        self._tally.add(record)
        if record.error is not None:
            level = logging.DEBUG if told == str(record.error) else logging.WARNING  # the progress counts them
            about = {"session": record.session_id}
            log.log(level, "rollout %s failed: %s", record.session_id, record.error, extra=about)
        if self._on_record is not None:
            self._on_record(record)
        if self._out is not None:
            self._out.write(record.line() + "\n")


def _failure(error: RolloutFailed) -> Failure:
    return Failure(error.boundary, error.kind, error.message, error.phase)
