"""The client of the server that has the model: a gateway with sessions, or any OpenAI-compatible server without.

Invariants:
- the client chooses the id of a session, so that it can abandon one whose opening was interrupted;
- every session is finished or abandoned; a failure to abandon one is only logged, because the server's idle limit
  ends that session as well.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, cast

import httpx
import openai
from msgspec import Meta
from openai.types.chat import (
    ChatCompletionFunctionToolParam,
    ChatCompletionMessage,
    ChatCompletionMessageFunctionToolCallParam,
    ChatCompletionMessageParam,
)
from openai.types.shared_params import FunctionDefinition

from agents_env.environment import Access, Message, Outcome, Reply, Tool, ToolCall
from agents_env.failures import Boundary, RolloutFailed, RunFailed
from agents_env.retries import not_begun, with_retries
from protos.foreign_text import one_line

log = logging.getLogger("agents-env")

ABANDON_TIMEOUT_S = 3.0
"""Deadline for abandoning a session when a run is stopped."""
CONNECT_TIMEOUT_S = 5.0
REFUSED_STATUSES = frozenset({400, 413, 422})
"""Of a request that is wrong in itself."""
MESSAGE_MAX = 300
"""Characters kept of an error's message."""
GATEWAY_HEADER = "X-Laminar-Gateway"
"""Of a 421: the URL of the gateway that has the session."""


WAIT_SHOWN_S = 10.0
"""How long the reason of a wait is shown after its next try: as long as a line of progress takes to come."""
OnRetry = Callable[[openai.APIError, float], None]
Tell = Callable[[str], None]
Send = Callable[[], Awaitable[openai.types.chat.ChatCompletion]]
Retries = Callable[[Send], Awaitable[openai.types.chat.ChatCompletion]]

GATEWAY_KEY, SERVER_KEY = "LAMINAR_API_KEY", "OPENAI_API_KEY"
"""Variables with the key of a gateway, and of any other server."""
NO_KEY = "none"


def api_key(*, sessions: bool = True) -> str:
    """The key to send: a gateway's own, else OpenAI's; to a server without sessions, which may be anybody's, the latter
    alone."""
    return (os.environ.get(GATEWAY_KEY, "").strip() if sessions else "") or os.environ.get(SERVER_KEY) or NO_KEY


def programs_environment() -> dict[str, str]:
    """The variables that programs of a rollout inherit: without the key of the gateway, by which an agent could reward
    itself."""
    return {name: value for name, value in os.environ.items() if name != GATEWAY_KEY}


def certificates() -> ssl.SSLContext:
    """Those of the CAs to trust. RunFailed where they cannot be read."""
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        raise RunFailed(
            f"SSL_CERT_FILE cannot be read: {error}; it names a file with the certificates of the CAs to trust"
        ) from error


@dataclass(frozen=True, slots=True)
class Sampling:
    model: Annotated[str, "The model's name at the gateway."] = "policy"
    temperature: Annotated[float, Meta(ge=0), "Temperature of sampling; 0: greedy."] = 1.0
    top_p: Annotated[
        float, Meta(gt=0, le=1), "Sample from the likeliest tokens that have this probability together; 1: from all."
    ] = 1.0


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """The fields with which a session is opened at the gateway."""

    session_id: str
    group_id: str
    sample_index: int
    group_size: int
    split: Literal["train", "eval"] = "train"
    tags: Mapping[str, str] = field(default_factory=dict)
    version: int | None = None  # the weight version it is pinned to
    train: bool = True
    parent_session_id: str | None = None  # which waits for this one


@dataclass(slots=True)
class Usage:
    """Counts of one rollout's requests and tokens; updated while it runs."""

    turns: int = 0
    prompt_tokens: int | None = 0  # None: not known
    completion_tokens: int = 0
    retries: int = 0


@dataclass(frozen=True, slots=True)
class Session:
    session_id: str
    client: openai.AsyncOpenAI
    usage: Usage


class Server:
    """A server at one base URL. With `sessions=False`, a plain OpenAI server: sessions are not opened or ended."""

    def __init__(
        self,
        url: str,
        sampling: Sampling,
        *,
        sessions: bool = True,
        api_key: str = NO_KEY,
        patience_s: float = 60.0,
        timeout_s: float = 600.0,
    ) -> None:
        self.root = url.rstrip("/").removesuffix("/v1")
        self.sampling = sampling
        self._sessions = sessions
        self._has_opened = False
        self._patience_s = patience_s
        self._wait = (0.0, "")  # until when the last reason for a wait counts
        certificates()  # else OpenAI's client, which reads them by itself, fails half made and names no file
        self._openai = openai.AsyncOpenAI(
            base_url=f"{self.root}/v1",
            api_key=api_key,
            max_retries=0,  # `retries` decides which requests are sent again
            timeout=openai.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
        )
        self._root = self._openai.with_options(base_url=self.root)

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._openai.close()

    def waits_for(self) -> str:
        """Why a request was told to wait lately; empty where none was."""
        until, reason = self._wait
        return reason if time.monotonic() < until else ""

    def _waits_of(self, usage: Usage, tell: Tell | None = None) -> OnRetry:
        def note(error: openai.APIError, wait_s: float) -> None:
            usage.retries += 1
            reason = ": ".join(_describe(error))
            self._wait = (time.monotonic() + wait_s + WAIT_SHOWN_S, reason)
            if tell is not None:
                tell(reason)

        return note

    async def check(self) -> None:
        """Waits until the server answers and serves the model. RunFailed when it does not."""
        waited = False

        async def models() -> Any:
            nonlocal waited
            try:
                return await self._openai.models.list()
            except openai.APIError as error:
                if not waited and self._patience_s and not_begun(error):
                    log.info("waiting for %s, up to %g s: %s", self.root, self._patience_s, _describe(error)[1])
                    waited = True
                raise

        try:
            answer = await with_retries(models, patience_s=self._patience_s, on_retry=lambda _, __: None)
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            what = "asks for an API key" if self._openai.api_key == NO_KEY else "refuses the key"
            raise RunFailed(
                f"{self.root} {what}: {_describe(error)[1]}; a gateway's is read from {GATEWAY_KEY}, another "
                f"server's from {SERVER_KEY}"
            ) from error
        except openai.APIConnectionError as error:
            raise RunFailed(
                f"{self.root} cannot be reached: {_describe(error)[1]}; "
                "--gateway takes the URL that `gateway serve` prints"
            ) from error
        except openai.APIError as error:
            raise RunFailed(
                f"{self.root}/v1/models does not answer as an OpenAI server does: {_describe(error)[1]}; "
                "--gateway takes the URL that `gateway serve` prints"
            ) from error
        served = [model.id for model in answer.data]
        if self.sampling.model not in served:
            raise RunFailed(f"{self.root} has no model {self.sampling.model!r}; --model may be {', '.join(served)}")

    async def open(self, spec: SessionSpec) -> Session:
        usage = Usage()
        if not self._sessions:
            return Session(spec.session_id, self._openai, usage)
        body: dict[str, Any] = {
            "session_id": spec.session_id,
            "group_id": spec.group_id,
            "sample_index": spec.sample_index,
            "group_size": spec.group_size,
            "split": spec.split,
            "tags": dict(spec.tags),
        }
        if spec.version is not None:
            body["version"] = spec.version
        if spec.parent_session_id is not None:
            body |= {"parent_session_id": spec.parent_session_id, "blocks_parent": True, "train": spec.train}
        try:
            answer = await self.post("/sessions", body, usage)
        except RolloutFailed as error:
            if spec.parent_session_id is None:  # else it is the parent that may be refused
                self._check_sessions(error)
            raise
        try:
            client = self._openai.with_options(base_url=answer["base_url"], api_key=answer["api_key"])
        except KeyError as error:
            raise RolloutFailed("session", "answer", f"POST /sessions answered without {error}") from error
        self._has_opened = True
        return Session(spec.session_id, client, usage)

    def _check_sessions(self, error: RolloutFailed) -> None:
        """RunFailed where no session can be opened at all. Once one was, a proxy may answer for a gateway that is away,
        or a key may be exchanged: that is a failed try."""
        if self._has_opened:
            return
        if error.kind == "http 404":
            raise RunFailed(
                f"{self.root} has a model and no sessions: it is no gateway (--gateway takes the URL that "
                "`gateway serve` prints; --no-sessions is for other servers)"
            ) from error
        if error.kind in ("http 401", "http 403"):
            raise RunFailed(f"{self.root} refuses sessions to the key in {GATEWAY_KEY}: {error.message}") from error

    async def finish(self, session: Session, outcome: Outcome) -> None:
        if not self._sessions:
            return
        body = {"reward": outcome.reward, "status": outcome.status, "metrics": dict(outcome.metrics)}
        # The gateway answers a repeated finish as the first: a lost answer does not have the sample played twice.
        answer = await self.post(f"/sessions/{session.session_id}/finish", body, session.usage, repeatable=True)
        if not session.usage.turns:  # calls that did not go through `chat`: the gateway has counted them
            session.usage.turns = int(answer.get("turns", 0))
            session.usage.completion_tokens = int(answer.get("sampled_tokens", 0))
            session.usage.prompt_tokens = None

    def access(self, session: Session, sample_index: int) -> Access:
        return Access(
            str(session.client.base_url).rstrip("/"),
            session.client.api_key,
            self.sampling.model,
            session.session_id,
            sample_index,
        )

    async def abandon(self, session_id: str, reason: str) -> None:
        if not self._sessions:
            return
        try:
            async with asyncio.timeout(ABANDON_TIMEOUT_S):
                await self._asked(f"/sessions/{session_id}/abandon", {"reason": reason[:MESSAGE_MAX]})
        except (openai.NotFoundError, openai.ConflictError) as error:
            log.debug("session %s never began or has ended: %s", session_id, error)
        except (openai.APIError, TimeoutError) as error:
            log.warning("session %s could not be abandoned: %s", session_id, str(error) or type(error).__name__)

    async def look(self, session_id: str) -> Mapping[str, Any] | None:
        """What the gateway says of a session; None when it has none of that name."""
        if not self._sessions:
            return None
        try:
            return await self.get(f"/sessions/{session_id}", Usage())
        except RolloutFailed as error:
            if error.kind == "http 404":
                return None
            raise

    def chat(self, session: Session, tell: Tell | None = None) -> SessionChat:
        """Its calls have to be made within a time limit: a gateway that is full is waited for without another one. What
        a server without sessions means by 429 may last, such as a quota that is used up: its patience is as for others.
        `tell` gets the reason of each wait."""
        retries = partial(
            with_retries,
            patience_s=self._patience_s,
            on_retry=self._waits_of(session.usage, tell),
            repeatable=self._sessions,
            limited=self._sessions,
        )
        return SessionChat(session, self.sampling, retries, keyed=self._sessions)

    async def post(
        self, path: str, body: Mapping[str, Any], usage: Usage, *, repeatable: bool = False
    ) -> dict[str, Any]:
        """A request to the gateway itself. `repeatable`: sent twice it has the effect of once."""

        async def send() -> object:
            return await self._asked(path, body)

        return await self._sent(f"POST {path}", send, usage, repeatable=repeatable)

    async def get(self, path: str, usage: Usage) -> dict[str, Any]:
        async def send() -> object:
            return await self._asked(path)

        return await self._sent(f"GET {path}", send, usage, repeatable=True)

    async def _asked(self, path: str, body: Mapping[str, Any] | None = None) -> object:
        """Follows one 421 to the gateway that has the session, where several share a store."""

        async def ask(url: str) -> object:
            if body is None:
                return await self._root.get(url, cast_to=object)
            return await self._root.post(url, cast_to=object, body=body)

        try:
            return await ask(path)
        except openai.APIStatusError as error:
            if (gateway := error.response.headers.get(GATEWAY_HEADER)) is None:
                raise
            return await ask(gateway + path)

    async def _sent(
        self, what: str, send: Callable[[], Awaitable[object]], usage: Usage, *, repeatable: bool
    ) -> dict[str, Any]:
        try:
            answer = await with_retries(
                send,
                patience_s=self._patience_s,
                on_retry=self._waits_of(usage),
                repeatable=repeatable,
            )
        except openai.APIError as error:
            raise _failure("session", error, usage) from error
        if not isinstance(answer, dict):
            raise RolloutFailed("session", "answer", f"{what} did not answer with a JSON object")
        return answer


class SessionChat:
    """The `Chat` of one session, over the official OpenAI client. `keyed`: the server answers a call that has the key
    of another one as that one, so a turn whose answer was lost is not made twice."""

    def __init__(self, session: Session, sampling: Sampling, retries: Retries, *, keyed: bool) -> None:
        self._session = session
        self._sampling = sampling
        self._retries = retries
        self._keyed = keyed

    async def reply(self, messages: list[Message], *, max_tokens: int, tools: Sequence[Tool] = ()) -> Reply:
        """Raises RolloutFailed."""
        conversation: list[ChatCompletionMessageParam] = [_as_param(message) for message in messages]
        usage = self._session.usage
        headers = {"Idempotency-Key": secrets.token_hex(16)} if self._keyed else {}

        async def send() -> openai.types.chat.ChatCompletion:
            return await self._session.client.chat.completions.create(
                model=self._sampling.model,
                messages=conversation,
                max_tokens=max_tokens,
                temperature=self._sampling.temperature,
                top_p=self._sampling.top_p,
                tools=[_as_tool(tool) for tool in tools] or openai.omit,
                extra_headers=headers,
            )

        try:
            answer = await self._retries(send)
        except openai.APIError as error:
            raise _failure("model", error, usage) from error
        if not answer.choices:
            raise RolloutFailed("model", "answer", "a completion without a choice")
        choice, used = answer.choices[0], answer.usage
        num_sampled = used.completion_tokens if used is not None else 0
        usage.turns += 1
        usage.completion_tokens += num_sampled
        usage.prompt_tokens = (usage.prompt_tokens or 0) + (used.prompt_tokens if used is not None else 0)
        truncated = choice.finish_reason == "length"
        return Reply(choice.message.content or "", truncated, num_sampled, _calls(choice.message))


def _as_param(message: Message) -> ChatCompletionMessageParam:
    match message["role"]:
        case "system":
            return {"role": "system", "content": message["content"]}
        case "user":
            return {"role": "user", "content": message["content"]}
        case "assistant":
            calls = [_as_call(call) for call in message.get("tool_calls", ())]
            if calls:
                return {"role": "assistant", "content": message["content"] or None, "tool_calls": calls}
            return {"role": "assistant", "content": message["content"]}
        case "tool":
            return {"role": "tool", "content": message["content"], "tool_call_id": message["tool_call_id"]}


def _as_tool(tool: Tool) -> ChatCompletionFunctionToolParam:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": cast(FunctionDefinition, function)}


def _as_call(call: ToolCall) -> ChatCompletionMessageFunctionToolCallParam:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _calls(message: ChatCompletionMessage) -> tuple[ToolCall, ...]:
    calls = message.tool_calls or ()
    return tuple(ToolCall(c.id, c.function.name, c.function.arguments) for c in calls if c.type == "function")


def _failure(boundary: Boundary, error: openai.APIError, usage: Usage) -> RolloutFailed:
    """A request that is refused before the model has said anything would be refused in the next attempt, too; a later
    one has what the model said, such as a conversation that became too long."""
    refused = isinstance(error, openai.APIStatusError) and error.status_code in REFUSED_STATUSES and not usage.turns
    return RolloutFailed(boundary, *_describe(error), again=not refused)


def _describe(error: openai.APIError) -> tuple[str, str]:
    """The kind and the message of an error, the message in one line."""
    if isinstance(error, openai.APIStatusError):
        said = error.body.get("message") if isinstance(error.body, Mapping) else None
        return f"http {error.status_code}", _one_line(said if isinstance(said, str) else error.response.text)
    cause = error.__cause__ if isinstance(error, openai.APIConnectionError) and error.__cause__ is not None else error
    return type(cause).__name__, _one_line(str(cause) or str(error))


def _one_line(text: str) -> str:
    return one_line(" ".join(text.split()), MESSAGE_MAX)
