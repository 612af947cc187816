"""Sessions that a trainer starts itself, driven over the gateway's HTTP API from threads.

An *agent* is a function that plays one session and returns its reward. It either calls `Session.chat`, or hands
`session.base_url` to any OpenAI client.

Invariants:
- a session that was opened is finished or abandoned, whatever its agent does;
- a session whose agent failed is abandoned and played again in a new one, `attempts` times in all;
- a request is sent again while the gateway is away or has no room, for `patience_s`; one that it refuses is not.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import quote

import httpx

from protos.access.bearer import bearer
from protos.errors import Conflict, InvalidRequest, LaminarError, NotFound, OutOfCapacity, Unavailable
from trainer_client.gateway_http import ADDRESS, error_of
from trainer_client.integrations.rows import REWARDED_BY_TRAINER

log = logging.getLogger(__name__)

PATIENCE_S = 120.0
CALL_TIMEOUT_S = 1800.0
"""Of one request; a long answer on a busy fleet takes minutes."""
RETRY_FIRST_S, RETRY_MAX_S = 0.2, 5.0
ATTEMPT_PAUSE_S = 0.25
"""Before a session is played again, times the attempts made: a gateway that fails fast is not flooded."""


class RolloutFailed(LaminarError):
    """A session failed in every attempt; the cause is the last one's error."""

    code = "rollout_failed"


class Stopped(LaminarError):
    """The rollouts were stopped meanwhile."""

    code = "stopped"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A session's end. `reward` None: the trainer computes it, and the gateway's record has 0 and the metric
    `rewarded_by_trainer`."""

    reward: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    status: Literal["completed", "truncated"] = "completed"


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of the model: the `message` as OpenAI's API has it."""

    message: Mapping[str, Any]
    finish_reason: str

    @property
    def text(self) -> str:
        return self.message.get("content") or ""


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """A live session. `base_url` and `api_key` are for an agent's own client; either names the session."""

    session_id: str
    base_url: str
    api_key: str
    client: GatewayClient
    sampling: Mapping[str, Any]

    def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Reply:
        """One turn. `fields` are added to the body, and go before the session's `sampling`."""
        choice = self._call("chat/completions", {"messages": list(messages), **fields})
        return Reply(choice["message"], choice["finish_reason"])

    def complete(self, prompt: str | Sequence[int], **fields: Any) -> Reply:
        """One turn without a chat template: `prompt` is text or token ids."""
        choice = self._call("completions", {"prompt": prompt, **fields})
        return Reply({"role": "assistant", "content": choice["text"]}, choice["finish_reason"])

    def _call(self, route: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        answer = self.client.post(f"{self.base_url}/{route}", {"model": self.client.model, **self.sampling, **body})
        choice: Mapping[str, Any] = answer["choices"][0]
        return choice


Agent = Callable[[Session, Mapping[str, Any]], Outcome | float | None]
"""Plays one session of a task (a row of the data set) and returns its reward."""


def single_turn(score: Callable[[str, Mapping[str, Any]], float] | None = None) -> Agent:
    """An agent of one turn: the answer to the task's `prompt` (messages or text), rewarded by `score(text, task)`."""

    def play(session: Session, task: Mapping[str, Any]) -> Outcome:
        prompt = task["prompt"]
        reply = session.complete(prompt) if isinstance(prompt, str) else session.chat(prompt)
        reward = None if score is None else score(reply.text, task)
        return Outcome(reward, status="truncated" if reply.finish_reason == "length" else "completed")

    return play


class GatewayClient:
    """A synchronous client of one gateway, for many threads. `stop` ends every wait for a retry."""

    def __init__(
        self,
        gateway: str,
        model: str = "policy",
        *,
        connections: int = 16,
        patience_s: float = PATIENCE_S,
        timeout_s: float = CALL_TIMEOUT_S,
        api_key: str | None = None,
    ) -> None:
        """`api_key`: of the gateway's key file, of a trainer or an agent; None: LAMINAR_API_KEY, if that is set."""
        self.url = gateway.rstrip("/").removesuffix("/v1")
        self.model = model
        self.stop = threading.Event()
        self._patience_s = patience_s
        self._jitter = random.Random()  # of pauses only
        limits = httpx.Limits(max_connections=connections + 4, max_keepalive_connections=connections + 4)
        timeout = httpx.Timeout(timeout_s, connect=10.0)
        credentials = bearer(api_key)
        self._has_key = bool(credentials)
        self._http = httpx.Client(timeout=timeout, limits=limits, trust_env=False, headers=credentials)

    def close(self) -> None:
        self.stop.set()
        self._http.close()

    def open(self, sampling: Mapping[str, Any], **fields: Any) -> Session:
        """A new session; `fields` are those of `POST /sessions`."""
        name = str(fields.setdefault("session_id", _new_name()))
        try:
            made = self.post(f"{self.url}/sessions", fields)
        except Conflict:  # the response to an earlier try was lost
            if self._has_key:  # and with it the session's key, which its agent needs: another session
                self.abandon(Session(name, "", "", self, sampling), "its key was lost on the way")
                name = fields["session_id"] = _new_name()
                made = self.post(f"{self.url}/sessions", fields)
            else:
                made = {"base_url": f"{self._of(name)}/v1", "api_key": "unused"}
        return Session(name, made["base_url"], made["api_key"], self, sampling)

    def open_group(self, size: int, sampling: Mapping[str, Any], **fields: Any) -> tuple[str, list[Session]]:
        """A new group and its sessions; `fields` are those of `POST /groups`."""
        made = self.post(f"{self.url}/groups", {"group_size": size, **fields})
        return made["group_id"], [self._session(member, sampling) for member in made["sessions"]]

    def finish(self, session: Session, outcome: Outcome) -> None:
        """Ends a session. When this returns its trajectories are in the experience buffer."""
        unrewarded = {REWARDED_BY_TRAINER: 1.0} if outcome.reward is None else {}
        body = {
            "reward": outcome.reward or 0.0,
            "status": outcome.status,
            "metrics": {**outcome.metrics, **unrewarded},
        }
        self.post(f"{self._of(session.session_id)}/finish", body)

    def abandon(self, session: Session, reason: str) -> Session | None:
        """Ends a session without a trajectory. Returns the one that takes its place in its group, if one does."""
        try:
            answer = self._send(f"{self._of(session.session_id)}/abandon", {"reason": reason[:300]})
        except (NotFound, Conflict) as error:
            log.debug("session %s has ended: %s", session.session_id, error)
            return None
        except (Unavailable, OutOfCapacity) as error:  # the gateway's idle limit ends it as well
            log.warning("session %s could not be abandoned: %s", session.session_id, error)
            return None
        made = answer.get("replacement")
        return None if made is None else self._session(made, session.sampling)

    def abandon_group(self, group_id: str, reason: str) -> None:
        """Ends a group and its sessions; one that is not there any more is left alone."""
        try:
            self._send(f"{self.url}/groups/{quote(group_id, safe='')}/abandon", {"reason": reason})
        except LaminarError as error:
            log.warning("group %s could not be abandoned: %s", group_id, error)

    def post(self, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer, after as many tries as it takes within `patience_s`. Raises LaminarError."""
        deadline, pause_s = time.monotonic() + self._patience_s, RETRY_FIRST_S
        while True:
            if self.stop.is_set():
                raise Stopped(f"{url} was not sent", hint="the rollouts are being stopped")
            try:
                return self._send(url, body)
            except (Unavailable, OutOfCapacity) as error:
                wait_s = max(pause_s, getattr(error, "retry_after_s", 0.0)) * (1 + 0.25 * self._jitter.random())
                if time.monotonic() + wait_s > deadline:
                    raise
                log.debug("%s is sent again in %.1f s: %s", url, wait_s, error)
            self.stop.wait(wait_s)
            pause_s = min(2 * pause_s, RETRY_MAX_S)

    def _send(self, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            answer = self._http.post(url, json=body)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise InvalidRequest(f"gateway address {self.url!r}: {error}", hint=ADDRESS) from error
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            raise Unavailable(f"no answer from the gateway at {self.url}: {reason}", hint=ADDRESS) from error
        if answer.is_error:
            raise error_of(answer, self.url)
        found: dict[str, Any] = answer.json()
        return found

    def _session(self, made: Mapping[str, Any], sampling: Mapping[str, Any]) -> Session:
        return Session(made["session_id"], made["base_url"], made["api_key"], self, sampling)

    def _of(self, session_id: str) -> str:
        return f"{self.url}/sessions/{quote(session_id, safe='')}"


def _new_name() -> str:
    return f"s-{secrets.token_hex(8)}"


def play(client: GatewayClient, session: Session, agent: Agent, task: Mapping[str, Any]) -> None:
    """Plays one session to its end. Whatever the agent raises comes out of here, the session still open."""
    outcome = agent(session, task)
    client.finish(session, outcome if isinstance(outcome, Outcome) else Outcome(outcome))


@dataclass(frozen=True, slots=True)
class Planned:
    """A session to play: its task, and the fields of `POST /sessions`."""

    task: Mapping[str, Any]
    fields: Mapping[str, Any] = field(default_factory=dict)


class Rollouts:
    """Plays sessions, `concurrency` at once."""

    def __init__(self, client: GatewayClient, agent: Agent, *, concurrency: int = 16, attempts: int = 3) -> None:
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
            session = self._client.open(sampling, **planned.fields)
            with self._lock:
                self._under_way.add(session)
            try:
                play(self._client, session, self._agent, planned.task)
            except BaseException as error:
                self._client.abandon(session, f"{type(error).__name__}: {error}")
                if not isinstance(error, Exception) or isinstance(error, Stopped | InvalidRequest):
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
