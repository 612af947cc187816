"""The machinery behind the HTTP handlers, scripted: sessions as the real one keeps them, answers chosen by the test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from aiohttp import web

from gateway.api.anthropic.routes import add_anthropic_routes
from gateway.api.calls.service import Calls
from gateway.api.errors import answer_errors
from gateway.api.generate import add_generate_route
from gateway.api.http_server import Admission, Bodies, Runner
from gateway.api.openai.routes import BODY_BYTES_MAX, OpenAIDeps, add_openai_routes
from gateway.api.responses.routes import add_responses_routes
from gateway.core.connections import Connections
from gateway.core.retries import Call
from gateway.core.tree import TurnTree
from gateway.core.types import (
    EngineName,
    FinishReason,
    SessionId,
    TokenDelta,
    TopLogprob,
    TurnId,
    TurnRecord,
    TurnRequest,
    Version,
)
from gateway.ports import Message, ModelInfo, SessionIdentity, SessionView
from gateway.tokens import Codec
from protos.errors import LaminarError
from protos.trajectories import Segment, VersionChange


@dataclass
class Script:
    """What a turn answers: ids (end-of-sequence token included where the model would write it), or an error.

    `gate`: awaited before each delta after the first `free` ones. `fails_after`: raises `error` after so many deltas.
    """

    token_ids: Sequence[int]
    finish: FinishReason = "stop"
    chunk: int = 1
    error: LaminarError | None = None
    fails_after: int = 0
    gate: asyncio.Event | None = None
    free: int = 0
    versions: Sequence[int] = (7,)  # the answer is divided evenly among them


@dataclass
class Kept:
    session_id: str
    tree: TurnTree = field(default_factory=TurnTree)
    running: set[str] = field(default_factory=set)


@dataclass
class ScriptedTurns:
    """Implements `gateway.ports.Turns`. `requests` and `outcomes` tell what happened."""

    script: Callable[[TurnRequest], Script]
    context_tokens: int = 2048
    keys: dict[str, str] = field(default_factory=dict)
    sessions: dict[str, Kept] = field(default_factory=dict)
    requests: list[TurnRequest] = field(default_factory=list)
    identities: list[SessionIdentity] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)
    early: list[int] = field(default_factory=list)
    version_changes: Sequence[VersionChange] = ()
    delivered: list[str] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)

    def models(self) -> Sequence[ModelInfo]:
        return [ModelInfo("policy", self.context_tokens, 1_700_000_000)]

    def session_of_key(self, api_key: str) -> SessionId | None:
        return SessionId(self.keys[api_key]) if api_key in self.keys else None

    async def open_session(self, identity: SessionIdentity, turns: int = 1) -> SessionView:
        self.identities.append(identity)
        name = identity.session_id or f"own-{len(self.identities)}"
        kept = self.sessions.setdefault(name, Kept(name))
        return SessionView(SessionId(name), kept.tree, identity.session_id is None and not identity.kept)

    def find_session(self, session_id: SessionId) -> SessionView | None:
        kept = self.sessions.get(session_id)
        return None if kept is None else SessionView(session_id, kept.tree, False)

    def tokens_per_event(self, *, streamed: bool) -> int:
        return 1

    async def join(self, call: Call, choices: int, *, again: bool = False) -> None:
        return None

    def session_of_turn(self, turn_id: TurnId) -> SessionView | None:
        found = [kept for kept in self.sessions.values() if turn_id in kept.tree]
        return SessionView(SessionId(found[0].session_id), found[0].tree, False) if found else None

    def refused(self, call: Call) -> None:
        return None

    def start(self, request: TurnRequest) -> ScriptedRun:
        self.requests.append(request)
        return ScriptedRun(self, request, self.script(request))

    async def record_turn(self, request: TurnRequest, head: Message, messages: Sequence[Message]) -> None:
        kept = self.sessions[request.session_id]
        turn = kept.tree.turns[request.turn_id]
        turn.head, turn.messages = head, tuple(messages)


class ScriptedRun:
    def __init__(self, turns: ScriptedTurns, request: TurnRequest, script: Script) -> None:
        self._turns, self._request, self._script = turns, request, script
        self.request = request
        self._kept = turns.sessions[request.session_id]
        self._sent: list[int] = []
        self._outcome = "aborted"

    async def __aenter__(self) -> Self:
        if self._script.error is not None and not self._script.fails_after:
            raise self._script.error
        self._kept.running.add(self._request.turn_id)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kept.running.discard(self._request.turn_id)
        self._turns.outcomes.append(self._outcome)

    async def read(self, take: Callable[[TokenDelta], Awaitable[object] | None], *, at_end: bool = False) -> None:
        async for delta in self._deltas():
            held = take(delta)
            if held is not None:
                await held
            if self._outcome != "aborted":
                finish: FinishReason = "length" if self._outcome == "length" else "stop"
                self._kept.tree.add(TurnRecord(self._request, self._sent, [-0.5] * len(self._sent), [], finish))
                return

    async def _deltas(self) -> AsyncIterator[TokenDelta]:
        ids = list(self._script.token_ids)[: self._request.sampling.max_tokens]
        cut_short = len(ids) < len(self._script.token_ids)
        starts = range(0, max(1, len(ids)), self._script.chunk)
        for number, start in enumerate(starts):
            if self._script.gate is not None and number >= self._script.free:
                await self._script.gate.wait()
            if self._script.error is not None and number == self._script.fails_after:
                raise self._script.error
            part = tuple(ids[start : start + self._script.chunk])
            self._sent += part
            last = number == len(starts) - 1
            finish: FinishReason | None = ("length" if cut_short else self._script.finish) if last else None
            if finish is not None:
                self._outcome = finish
            yield self._delta(part, start, len(ids), finish)

    def _delta(self, part: tuple[int, ...], start: int, total: int, finish: FinishReason | None) -> TokenDelta:
        which = min(len(self._script.versions) * start // max(1, total), len(self._script.versions) - 1)
        top = self._request.sampling.top_logprobs
        return TokenDelta(
            token_ids=part,
            logprobs=tuple(-0.5 - token / 1024 for token in part),
            version=Version(self._script.versions[which]),
            engine=EngineName(f"e{which}"),
            segment=which,
            top_logprobs=tuple(tuple(TopLogprob(5 + k, -1.0 - k) for k in range(top)) for _ in part) if top else None,
            finish_reason=finish,
        )

    async def give_up(self, why: str) -> None:
        self._turns.given_up.append(self._request.turn_id)

    def sent(self, num_tokens: int) -> None:
        self._turns.sent.append(num_tokens)

    def left(self) -> None:
        return None

    def delivered(self) -> None:
        self._turns.delivered.append(self._request.turn_id)

    async def finish_early(self, num_tokens: int) -> None:
        self._turns.early.append(num_tokens)
        del self._sent[num_tokens:]
        self._outcome = "stop"

    @property
    def version_changes(self) -> Sequence[VersionChange]:
        return self._turns.version_changes

    @property
    def segments(self) -> Sequence[Segment]:
        return [
            Segment(
                turn=self._request.turn_index,
                engine="e0",
                incarnation="i",
                version=7,
                start=0,
                end=len(self._sent),
                cause="start",
                started_unix_s=0.0,
                ended_unix_s=1.0,
            )
        ]


@contextlib.asynccontextmanager
async def serving(turns: ScriptedTurns, codec: Codec) -> AsyncIterator[str]:
    """The routes of model calls on a free port; yields the base URL without `/v1`."""
    app = web.Application(
        client_max_size=BODY_BYTES_MAX, middlewares=[answer_errors, Bodies(1 << 30, BODY_BYTES_MAX).in_time]
    )
    calls = Calls(turns, codec)
    add_openai_routes(app, OpenAIDeps(calls))
    add_generate_route(app, calls)
    add_responses_routes(app, calls)
    add_anthropic_routes(app, calls)
    async with serving_app(app) as url:
        yield url


@contextlib.asynccontextmanager
async def serving_app(app: web.Application) -> AsyncIterator[str]:
    """Any application on a free port."""
    runner = Runner(app, Admission(Connections(10_000, 10_000, 5.0), strangers=False), handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
