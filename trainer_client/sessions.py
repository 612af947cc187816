"""Sessions at a gateway, for programs of agents: `Sessions` for threads, `AsyncSessions` for asyncio.

    with Sessions("http://127.0.0.1:8080") as sessions, sessions.open(group_id="task-17", group_size=8) as session:
        answer = session.openai.chat.completions.create(model="policy", messages=[...])
        session.finish(1.0)

Invariants:
- a session whose block ends is finished or abandoned: an exception abandons it, and so does an end without `finish`;
- a request is sent again while the gateway is away or has no room, for `patience_s`; one that it refuses is not, nor is
  one that another server answers. So a session outlives the restart of a gateway with `--data`, its model calls
  included;
- a request that was carried out, and whose answer was lost, has no second effect: the gateway answers a repeated finish
  or abandon as the first one, and a model call as its key's; a session or group whose name was drawn here is abandoned
  and opened anew. For a name that the caller chose nothing proves whose it is: the Conflict is raised, and what has it
  left alone;
- a session's model calls go where its `base_url` leads, which may be a place that only agents reach; finish and abandon
  go to the client's own URL. Each goes on once where a 421 says, to the gateway that has the session;
- what is sent, and when again, is written once, as generators of steps (`_Gateway`): the two clients carry steps out.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from protos.access.bearer import bearer
from protos.decoding import decode_json
from protos.errors import (
    Conflict,
    InvalidRequest,
    LaminarError,
    Misdirected,
    NotFound,
    OutOfCapacity,
    Unavailable,
    WrongServer,
)
from trainer_client.gateway_http import (
    PATIENCE_S,
    WRONG_SERVER,
    Presence,
    Retry,
    error_of,
    named_errors,
    our_transport,
    request,
    root_of,
)
from trainer_client.rewards import number

if TYPE_CHECKING:  # of the extra `envs`: imported where a session's client is asked for
    from openai import AsyncOpenAI, OpenAI

log = logging.getLogger(__name__)

ABANDON_PATIENCE_S = 20.0
"""For an abandon, which the gateway's idle limit does as well."""
CALL_TIMEOUT_S = 1800.0
"""Of one request; a long answer on a busy fleet takes minutes."""
OPENAI_RETRIES = 20
"""Of OpenAI's client, whose pauses grow to 8 s: it tries again for some two minutes. Where each try waits for room in
the gateway, it takes twenty."""
REASON_CHARS = 300
LOST = "the answer to its creation was lost"

REWARDED_BY_TRAINER = "rewarded_by_trainer"
"""The metric of a session whose reward the trainer computes: the gateway's record has 0."""

Status = Literal["completed", "truncated"]
T = TypeVar("T")


class Stopped(LaminarError):
    """The client was stopped meanwhile."""

    code = "stopped"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A session's end. `reward` None: the trainer computes it, and the record has the metric `rewarded_by_trainer`."""

    reward: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    status: Status = "completed"

    def body(self, giver: str) -> dict[str, Any]:
        """As `POST /sessions/ID/finish` takes it. NoNumber for what is no finite number, with the name of `giver`."""
        metrics = {name: number(value, f"the metric {name!r}", giver) for name, value in self.metrics.items()}
        if self.reward is None:
            metrics[REWARDED_BY_TRAINER] = 1.0
        reward = 0.0 if self.reward is None else number(self.reward, "the reward", giver)
        return {"reward": reward, "status": self.status, "metrics": metrics}


@dataclass(frozen=True, slots=True)
class Post:
    """Send this and go on with the answer, or with the LaminarError that it becomes. `gateway`: its URL."""

    gateway: str
    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait, and go on; with Stopped if the client is stopped by then."""

    seconds: float


Steps = Generator[Post | Pause, Any, T]


@dataclass(frozen=True, slots=True)
class Made:
    """A session as the gateway made it."""

    session_id: str
    base_url: str
    api_key: str

    @property
    def gateway(self) -> str:
        """Where its model calls go; the client itself may not reach it."""
        return self.base_url.rpartition("/sessions/")[0]

    @property
    def path(self) -> str:
        return f"/sessions/{quote(self.session_id, safe='')}"


class _Gateway:
    """What is sent to a gateway, and sent again; where several share a Redis, to the one that has the session, too."""

    def __init__(self, gateway: str, model: str, patience_s: float, api_key: str | None) -> None:
        self.url = root_of(gateway)
        self.model = model
        self.credentials = bearer(api_key)
        self._patience_s = patience_s
        self._presences: dict[str, Presence] = {}
        """By the URL of a gateway: no more than share a Redis."""

    def opened(self, fields: Mapping[str, Any]) -> Steps[Made]:
        """What was made and not answered is abandoned, and another is made in its place. All tries have one patience: a
        proxy may lose the answer each time."""
        chosen, retry = fields.get("session_id"), self._retry(self.url, self._patience_s)
        while True:
            name, retry.failed = str(chosen or _new_name("s")), False
            try:
                return _made((yield from self._sent(self.url, "/sessions", {**fields, "session_id": name}, retry)))
            except Conflict as error:
                if not retry.failed:
                    raise
                if chosen:
                    raise _taken(error, f"/sessions/{name}") from error
            # An earlier try made it: who else has its name? Its key, which its agent needs, was lost with the answer.
            yield from self.abandoned(Made(name, "", ""), LOST)
            retry.presence = self._presence(self.url)  # a 421 may have named another one

    def opened_group(self, size: int, fields: Mapping[str, Any]) -> Steps[tuple[str, list[Made]]]:
        """After a try that was not answered another name is drawn. Where gateways share a Redis, the one that made the
        first group may have been killed, and another one would send a next try of its name there."""
        chosen, names = fields.get("group_id"), list[str]()

        def body() -> Mapping[str, Any]:
            if not names or retry.failed:
                names.append(str(chosen or _new_name("g")))
            return {"group_size": size, **fields, "group_id": names[-1]}

        retry = self._retry(self.url, self._patience_s)
        try:
            made = yield from self._sent(self.url, "/groups", body, retry)
        except Conflict as error:
            if not retry.failed:
                raise
            raise _taken(error, f"/groups/{names[-1]}") from error
        for lost in names[:-1] if not chosen else ():
            yield from self.abandoned_group(lost, LOST)
        return made["group_id"], [_made(member) for member in made["sessions"]]

    def called(self, session: Made, path: str, body: Mapping[str, Any]) -> Steps[Any]:
        """A model call. Each has a key: the gateway may have answered a try whose answer did not come."""
        retry, key = self._retry(session.gateway, self._patience_s), secrets.token_hex(16)
        return self._sent(session.gateway, session.path + path, body, retry, headers={"Idempotency-Key": key})

    def finished(self, session: Made, outcome: Outcome, giver: str) -> Steps[None]:
        retry = self._retry(self.url, self._patience_s)
        yield from self._sent(self.url, f"{session.path}/finish", outcome.body(giver), retry)

    def abandoned(self, session: Made, reason: str) -> Steps[Made | None]:
        """The session that takes its place in its group, if one does."""
        try:
            answer = yield from self._given_up(self.url, session.path, reason)
        except (NotFound, Conflict) as error:
            log.debug("session %s has ended: %s", session.session_id, error)
            return None
        except (Unavailable, OutOfCapacity, Stopped, Misdirected) as error:
            log.warning(
                "session %s could not be abandoned, and stays live until it was idle for the gateway's "
                "--session-idle-s: %s",
                session.session_id,
                error.message,
            )
            return None
        replacement = answer.get("replacement")
        return None if replacement is None else _made(replacement)

    def abandoned_group(self, group_id: str, reason: str) -> Steps[None]:
        try:
            yield from self._given_up(self.url, f"/groups/{quote(group_id, safe='')}", reason)
        except NotFound as error:
            log.debug("group %s is not there: %s", group_id, error)
        except LaminarError as error:
            log.warning("group %s could not be abandoned: %s", group_id, error)

    def _given_up(self, gateway: str, path: str, reason: str) -> Steps[Any]:
        body, retry = {"reason": reason[:REASON_CHARS]}, self._retry(gateway, ABANDON_PATIENCE_S)
        return self._sent(gateway, f"{path}/abandon", body, retry, stops=False)

    def _sent(
        self,
        gateway: str,
        path: str,
        body: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        retry: Retry,
        *,
        headers: Mapping[str, str] | None = None,
        stops: bool = True,
    ) -> Steps[Any]:
        """`body`: a function makes that of each try. `stops`: a stopped client does not even try."""
        misdirected = False
        while True:
            if stops:
                yield Pause(0.0)
            try:
                answer = yield Post(gateway, path, body() if callable(body) else body, headers or {})
            except Misdirected as error:
                if misdirected or not error.url:
                    raise
                retry.presence.answered()
                misdirected, gateway = True, error.url
                retry.presence = self._presence(gateway)
                retry.presence.seen = True  # by the gateway that names it
                continue
            except (Unavailable, OutOfCapacity) as error:
                pause_s = retry.pause_s(error)
                log.debug("%s%s is sent again in %.1f s: %s", gateway, path, pause_s, error)
            else:
                retry.presence.answered()
                return answer
            yield Pause(pause_s)

    def refused(self, answer: httpx.Response) -> None:
        """The answer to a try by OpenAI's client, which says nothing of it while it tries again."""
        if isinstance(error := error_of(answer, self.url), OutOfCapacity):
            self._presence(self.url).full(error)

    def _retry(self, gateway: str, patience_s: float) -> Retry:
        return Retry(self._presence(gateway), patience_s)

    def _presence(self, gateway: str) -> Presence:
        return self._presences.setdefault(gateway, Presence(f"the gateway at {gateway}"))


def _taken(error: Conflict, path: str) -> Conflict:
    """The error of a name that is taken after a try that was not answered: perhaps by that one."""
    return Conflict(
        error.message,
        hint="an earlier try of this request was not answered and may have made it: look at it with "
        f"GET {path}, and abandon it if it is yours",
    )


def _made(answer: Mapping[str, Any]) -> Made:
    return Made(answer["session_id"], answer["base_url"], answer["api_key"])


def _decoded(answer: bytes, url: str) -> dict[str, Any]:
    try:
        return decode_json(answer, dict[str, Any])
    except msgspec.DecodeError as error:
        raise WrongServer(f"{url} answered with something else: {error}", hint=WRONG_SERVER) from error


def _new_name(kind: str) -> str:
    """Drawn here and not by the gateway, also where that costs a call of a shared Redis: a session whose answer was
    lost can be abandoned by its name, and does not stay live beside the one that is opened in its place."""
    return f"{kind}-{secrets.token_hex(8)}"


def _openai() -> Any:
    try:
        return importlib.import_module("openai")
    except ImportError as error:
        raise InvalidRequest(
            "a session's OpenAI client needs the package `openai`, which is not installed",
            hint="pip install openai, or give base_url and api_key of the session to a client of your own",
        ) from error


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of the model: the `message` as OpenAI's API has it."""

    message: Mapping[str, Any]
    finish_reason: str

    @property
    def text(self) -> str:
        return self.message.get("content") or ""


class _Session:
    """A live session. `base_url` and `api_key` are for an agent's own client; either names the session. `ended`: it was
    finished or abandoned here."""

    def __init__(self, made: Made) -> None:
        self.made = made
        self.session_id, self.base_url, self.api_key = made.session_id, made.base_url, made.api_key
        self.ended = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.session_id!r})"

    @property
    def _giver(self) -> str:
        return f"the agent of session {self.session_id}"

    def _outcome(self, reward: float, metrics: Mapping[str, float] | None, status: Status) -> Outcome:
        """A None is an agent's slip here: that a trainer computes the reward, `Outcome` says on purpose."""
        return Outcome(number(reward, "the reward", self._giver), metrics or {}, status)

    def _client_options(self) -> dict[str, Any]:
        return {
            "base_url": self.base_url,
            "api_key": self.api_key,
            "max_retries": OPENAI_RETRIES,
            "timeout": CALL_TIMEOUT_S,
        }

    def reason(self, error: BaseException | None) -> str:
        """Why its block abandons it."""
        if error is not None:
            return f"{type(error).__name__}: {error}"
        log.warning("session %s is abandoned: its block ended without finish(reward)", self.session_id)
        return "its block ended without a finish"


class Session(_Session):
    """A session of `Sessions`: a context manager that abandons it unless it was finished."""

    def __init__(self, made: Made, client: Sessions, sampling: Mapping[str, Any]) -> None:
        super().__init__(made)
        self.client, self.sampling = client, sampling

    @cached_property
    def openai(self) -> OpenAI:
        """A client of this session. InvalidRequest without the package `openai`."""
        client: OpenAI = _openai().OpenAI(**self._client_options(), http_client=self.client.for_models)
        return client

    def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Reply:
        """One turn. `fields` are added to the body, and go before the session's `sampling`."""
        choice = self._call("chat/completions", {"messages": list(messages), **fields})
        return Reply(choice["message"], choice["finish_reason"])

    def complete(self, prompt: str | Sequence[int], **fields: Any) -> Reply:
        """One turn without a chat template: `prompt` is text or token ids."""
        choice = self._call("completions", {"prompt": prompt, **fields})
        return Reply({"role": "assistant", "content": choice["text"]}, choice["finish_reason"])

    def finish(
        self, reward: float, *, metrics: Mapping[str, float] | None = None, status: Status = "completed"
    ) -> None:
        """Ends the session. When this returns its trajectories are in the experience buffer. NoNumber for a reward or
        a metric that is no finite number; the session is live then."""
        self.client.finish(self, self._outcome(reward, metrics, status), self._giver)

    def abandon(self, reason: str) -> None:
        """Ends the session without a trajectory."""
        self.client.abandon(self, reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not self.ended:
            self.abandon(self.reason(error))

    def _call(self, route: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        answer = self.client.post(self.made, f"/v1/{route}", {"model": self.client.model, **self.sampling, **body})
        choice: Mapping[str, Any] = answer["choices"][0]
        return choice


class Sessions:
    """A synchronous client of one gateway, for many threads. `stop` ends every wait for a retry.

    `model`, and `sampling` of a session: of the calls by `Session.chat` and `Session.complete`.
    """

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
        self._gateway = _Gateway(gateway, model, patience_s, api_key)
        self.url, self.model = self._gateway.url, model
        self.stop = threading.Event()
        limits = httpx.Limits(max_connections=connections + 4, max_keepalive_connections=connections + 4)
        timeout = httpx.Timeout(timeout_s, connect=10.0)
        ours = our_transport(self.url)
        self._http = httpx.Client(timeout=timeout, limits=limits, headers=self._gateway.credentials, **ours)
        hooks = {"response": [self._see_model_call]}
        self.for_models = httpx.Client(limits=httpx.Limits(max_connections=None), event_hooks=hooks, **ours)
        """What the sessions' OpenAI clients send by, without this client's own key."""

    def _see_model_call(self, answer: httpx.Response) -> None:
        if answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
            answer.read()
            self._gateway.refused(answer)

    def close(self) -> None:
        self.stop.set()
        self._http.close()
        self.for_models.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, *, sampling: Mapping[str, Any] | None = None, **fields: Any) -> Session:
        """A new session; `fields` are those of `POST /sessions`."""
        return Session(self._carry_out(self._gateway.opened(fields)), self, sampling or {})

    def open_group(
        self, size: int, *, sampling: Mapping[str, Any] | None = None, **fields: Any
    ) -> tuple[str, list[Session]]:
        """A new group and its sessions; `fields` are those of `POST /groups`."""
        group_id, members = self._carry_out(self._gateway.opened_group(size, fields))
        return group_id, [Session(made, self, sampling or {}) for made in members]

    def finish(self, session: Session, outcome: Outcome, giver: str) -> None:
        """As `Session.finish`; `giver` is the name of who gave the outcome, for errors."""
        self._carry_out(self._gateway.finished(session.made, outcome, giver))
        session.ended = True

    def abandon(self, session: Session, reason: str) -> Session | None:
        """Ends a session without a trajectory. Returns the one that takes its place in its group, if one does."""
        session.ended = True
        made = self._carry_out(self._gateway.abandoned(session.made, reason))
        return None if made is None else Session(made, self, session.sampling)

    def abandon_group(self, group_id: str, reason: str) -> None:
        """Ends a group and its sessions; one that is not there any more is left alone."""
        self._carry_out(self._gateway.abandoned_group(group_id, reason))

    def post(self, session: Made, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a session's call, after as many tries as it takes within `patience_s`. Raises LaminarError."""
        answer: dict[str, Any] = self._carry_out(self._gateway.called(session, path, body))
        return answer

    def _carry_out(self, steps: Steps[T]) -> T:
        try:
            step = next(steps)
            while True:
                try:
                    result = self._done(step)
                except LaminarError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(result)
        except StopIteration as end:
            found: T = end.value
            return found

    def _done(self, step: Post | Pause) -> Any:
        if isinstance(step, Pause):
            if self.stop.wait(step.seconds):
                raise Stopped("the request was not sent", hint="the client is being stopped")
            return None
        with named_errors(self._http, step.gateway):
            answer = self._http.post(step.gateway + step.path, json=step.body, headers=step.headers)
        if not answer.is_success:
            raise error_of(answer, step.gateway)
        return _decoded(answer.content, step.gateway)


class AsyncSession(_Session):
    """A session of `AsyncSessions`."""

    def __init__(self, made: Made, client: AsyncSessions) -> None:
        super().__init__(made)
        self._client = client

    @cached_property
    def openai(self) -> AsyncOpenAI:
        """See `Session.openai`."""
        client: AsyncOpenAI = _openai().AsyncOpenAI(**self._client_options(), http_client=self._client.for_models)
        return client

    async def finish(
        self, reward: float, *, metrics: Mapping[str, float] | None = None, status: Status = "completed"
    ) -> None:
        """See `Session.finish`."""
        outcome = self._outcome(reward, metrics, status)
        await self._client.carry_out(self._client.gateway.finished(self.made, outcome, self._giver))
        self.ended = True

    async def abandon(self, reason: str) -> None:
        """Ends the session without a trajectory."""
        self.ended = True
        await self._client.carry_out(self._client.gateway.abandoned(self.made, reason))


class AsyncSessions:
    """`Sessions` for asyncio. A wait ends when its task is cancelled."""

    def __init__(
        self,
        gateway: str,
        *,
        patience_s: float = PATIENCE_S,
        timeout_s: float = CALL_TIMEOUT_S,
        api_key: str | None = None,
    ) -> None:
        self.gateway = _Gateway(gateway, "", patience_s, api_key)
        self._timeout_s = timeout_s
        ours = {"limits": httpx.Limits(max_connections=None), **our_transport(self.gateway.url)}
        self._http = httpx.AsyncClient(headers=self.gateway.credentials, **ours)
        self.for_models = httpx.AsyncClient(event_hooks={"response": [self._see_model_call]}, **ours)
        """What the sessions' OpenAI clients send by, without this client's own key."""

    async def _see_model_call(self, answer: httpx.Response) -> None:
        if answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
            await answer.aread()
            self.gateway.refused(answer)

    async def close(self) -> None:
        await self._http.aclose()
        await self.for_models.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @asynccontextmanager
    async def open(self, **fields: Any) -> AsyncIterator[AsyncSession]:
        """A new session, which is abandoned at the block's end unless it was finished; `fields` are those of
        `POST /sessions`."""
        session = AsyncSession(await self.carry_out(self.gateway.opened(fields)), self)
        error: BaseException | None = None
        try:
            yield session
        except BaseException as raised:
            error = raised
            raise
        finally:
            if not session.ended:
                await session.abandon(session.reason(error))

    async def carry_out(self, steps: Steps[T]) -> T:
        try:
            step = next(steps)
            while True:
                try:
                    result = await self._done(step)
                except LaminarError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(result)
        except StopIteration as end:
            found: T = end.value
            return found

    async def _done(self, step: Post | Pause) -> Any:
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return None
        body = msgspec.json.encode(step.body)
        answer = await request(
            self._http, step.gateway, step.path, body=body, headers=step.headers, timeout_s=self._timeout_s
        )
        return _decoded(answer, step.gateway)
