"""Sessions that a trainer starts itself, played from threads.

An *agent* is a function that plays one session and returns its reward. It either calls `Session.chat`, or hands
`session.base_url` to any OpenAI client (`session.openai` is one).

Invariants:
- a session that was opened is finished or abandoned, whatever its agent does;
- a session whose agent failed is abandoned and played again in a new one, `attempts` times in all; so is one whose
  agent gave no finite number as its reward.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from protos.errors import InvalidRequest, LaminarError
from trainer_client.rewards import NoNumber, name_of
from trainer_client.sessions import Outcome, Session, Sessions, Stopped

log = logging.getLogger(__name__)

ATTEMPT_PAUSE_S = 0.25
"""Before a session is played again, times the attempts made: a gateway that fails fast is not flooded."""


class RolloutFailed(LaminarError):
    """A session failed in every attempt; the cause is the last one's error."""

    code = "rollout_failed"


Agent = Callable[[Session, Mapping[str, Any]], Outcome | float | None]
"""Plays one session of a task (a row of the data set) and returns its reward."""


def single_turn(score: Callable[[str, Mapping[str, Any]], float] | None = None) -> Agent:
    """An agent of one turn: the answer to the task's `prompt` (messages or text), rewarded by `score(text, task)`."""

    def play(session: Session, task: Mapping[str, Any]) -> Outcome:
        prompt = task["prompt"]
        reply = session.complete(prompt) if isinstance(prompt, str) else session.chat(prompt)
        reward = None if score is None else score(reply.text, task)
        return Outcome(reward, status="truncated" if reply.finish_reason == "length" else "completed")

    if score is not None:
        play.__qualname__ = f"single_turn({name_of(score)})"
    return play


def play(client: Sessions, session: Session, agent: Agent, task: Mapping[str, Any]) -> None:
    """Plays one session to its end. Whatever the agent raises comes out of here, the session still open."""
    outcome = agent(session, task)
    client.finish(session, outcome if isinstance(outcome, Outcome) else Outcome(outcome), f"agent {name_of(agent)}")


@dataclass(frozen=True, slots=True)
class Planned:
    """A session to play: its task, and the fields of `POST /sessions`."""

    task: Mapping[str, Any]
    fields: Mapping[str, Any] = field(default_factory=dict)


class Rollouts:
    """Plays sessions, `concurrency` at once."""

    def __init__(self, client: Sessions, agent: Agent, *, concurrency: int = 16, attempts: int = 3) -> None:
        if concurrency < 1 or attempts < 1:
            raise InvalidRequest(f"concurrency={concurrency}, attempts={attempts}", hint="both are 1 at least")
        self._client, self._agent, self._attempts = client, agent, attempts
        self._under_way: set[Session] = set()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="laminar-rollout")

    def play(self, planned: Sequence[Planned], sampling: Mapping[str, Any]) -> list[str]:
        """The id of the session that each of `planned` ended in. Raises RolloutFailed for the first that failed in
        every attempt, once the others have ended."""
        running = self.start(planned, sampling)
        errors = [error for done in running if (error := done.exception()) is not None]
        if errors:
            raise errors[0]
        return [done.result() for done in running]

    def start(self, planned: Sequence[Planned], sampling: Mapping[str, Any]) -> list[Future[str]]:
        """As `play`, without waiting: the future of each has the id of its session, or its error."""
        return [self._pool.submit(self._play, one, sampling) for one in planned]

    def close(self) -> None:
        """Abandons the sessions under way, so that their agents' calls end, and waits for the agents."""
        self._client.stop.set()
        with self._lock:
            under_way = list(self._under_way)
        for session in under_way:
            self._client.abandon(session, "the rollouts were stopped")
        self._pool.shutdown(cancel_futures=True)

    def _play(self, planned: Planned, sampling: Mapping[str, Any]) -> str:
        for attempt in range(1, self._attempts + 1):
            session = self._client.open(sampling=sampling, **planned.fields)
            with self._lock:
                self._under_way.add(session)
            try:
                play(self._client, session, self._agent, planned.task)
            except BaseException as error:
                self._client.abandon(session, f"{type(error).__name__}: {error}")
                if not isinstance(error, Exception) or _ends_all(error):
                    raise
                log.warning("session %s failed (%d of %d): %s", session.session_id, attempt, self._attempts, error)
                if attempt == self._attempts:
                    raise RolloutFailed(f"a rollout failed {attempt} times; the last time: {error}") from error
            else:
                return session.session_id
            finally:
                with self._lock:
                    self._under_way.discard(session)
            self._client.stop.wait(ATTEMPT_PAUSE_S * attempt)
        raise AssertionError("unreachable: the last attempt returns or raises")


def _ends_all(error: Exception) -> bool:
    """Playing again does not help: a request that the gateway refuses is refused again."""
    return isinstance(error, Stopped | InvalidRequest) and not isinstance(error, NoNumber)
