"""The answering of model calls: from a parsed request to its turns, or those of the request that it repeats.

Invariants:
- a call without a session that is refused leaves no session behind;
- the `n` answers to a request are separate turns, side by side in the session's tree.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from gateway.api.access import caller_of
from gateway.api.bodies import AT_ONCE_BYTES
from gateway.api.calls.answer import AnswerHead, AnswerShape, Api, Choice, Form, PreparedRequest, Responder
from gateway.api.calls.history import Prompt
from gateway.api.calls.identity import SESSION_HEADERS, call_of, identify
from gateway.api.calls.turn_view import Reader
from gateway.api.errors import BadField
from gateway.core.access import CALL, Caller, SessionKey, Target, require
from gateway.core.retries import Call, choice_id
from gateway.core.tree import TurnTree
from gateway.core.types import SamplingParams, SessionId, TurnId, TurnOrigin, TurnRequest
from gateway.ports import Message, ModelInfo, SessionIdentity, SessionView, TurnHandle, Turns
from gateway.runtime.aside import aside
from gateway.tokens import AnswerParser, Codec
from gateway.tokens.bridge import content_text
from protos.errors import OutOfCapacity, Unavailable
from protos.telemetry.context import TRACEPARENT, TraceContext, parse_traceparent

TOKENISING_MAX = 4
"""Threads that tokenise, so that large prompts wait for each other and for nothing else."""


@dataclass(frozen=True, slots=True)
class BodyIdentity:
    """What a body has to name its session with."""

    metadata: Mapping[str, Any] | None = None
    session_id: str | None = None
    user: str | None = None
    previous: SessionId | None = None  # that of the answer which the call continues: its own, unless another is named


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A valid request, before its session is known. `messages`: none where the prompt is a text or token ids."""

    api: Api
    form: Form
    model: ModelInfo
    shape: AnswerShape
    named: BodyIdentity
    record_head: Message
    messages: Sequence[Message]
    make_prompts: Callable[[SessionView], list[Prompt]]
    is_long: Callable[[SessionView], bool]  # making the prompts would hold the event loop
    make_sampling: Callable[[Sequence[int], SessionView], SamplingParams]  # of a prompt's token ids
    parses_tools: bool = False
    parses_reasoning: bool = False
    show_special: bool = False
    num_prompts: int = 1
    one_call: bool = False  # no more than one tool call
    continued: bool = False  # the answer continues the last message
    kept: bool = False  # without a session it makes one that others may continue
    without_effect: Sequence[str] = ()  # fields that were accepted and change nothing, although they ask for something
    max_tokens: int | None = None  # that the request asks for


NOBODY = SessionView(SessionId(""), TurnTree(), ephemeral=True)
"""The session that a call without one extends: an empty one."""


class Calls:
    """Answers parsed requests: what every API's routes share."""

    def __init__(
        self,
        turns: Turns,
        codec: Codec,
        *,
        session_from_user: bool = True,
        controlled: bool = False,
        traced: bool = False,
    ) -> None:
        """`session_from_user`: the body's `user` names a session, where nothing else does. `controlled`: requests have
        a caller, whom sessions belong to. `traced`: sessions and turns continue the traces of their clients."""
        self.turns, self.codec = turns, codec
        self._session_from_user, self._controlled, self._traced = session_from_user, controlled, traced
        self._responder = Responder(turns)
        self._threads = ThreadPoolExecutor(TOKENISING_MAX, "tokenising")

    async def answer(self, request: web.Request, raw: bytes, parsed: ParsedRequest) -> web.StreamResponse:
        """`raw` is the request's body, by which its retries are known."""
        return await self._responder.respond(request, await self._prepare(request, raw, parsed))

    def identify(self, request: web.Request, named: BodyIdentity) -> SessionIdentity:
        user = named.user if self._session_from_user and named.previous is None else None
        found = identify(request, self.turns, metadata=named.metadata, session_id=named.session_id, user=user)
        caller = caller_of(request) if self._controlled else None
        if caller is not None:
            found = dataclasses.replace(found, caller=caller)
            self._check_sessions(caller, request, found.session_id, named.previous)
        if named.previous is None or found.session_id == named.previous:
            return found
        if found.session_id is not None:
            raise BadField(
                "previous_response_id",
                f"the previous response is of session {named.previous}, and the request names {found.session_id}",
                hint="leave one of them out",
            )
        return SessionIdentity(named.previous, "body", caller=caller)

    def _check_sessions(self, caller: Caller, request: web.Request, *named: SessionId | None) -> None:
        """Raises Forbidden where the call names a session that is not the caller's. A header beside a session's own key
        names nothing, and coding agents send one of their own: it is refused only where it is another session's."""
        beside = [request.headers.get(header) for header in SESSION_HEADERS] if isinstance(caller, SessionKey) else []
        for session_id in (*named, *map(SessionId, filter(None, beside))):
            found = None if session_id is None else self.turns.find_session(session_id)
            if found is not None:
                require(CALL, caller, Target(found.session_id, found.owner))

    async def prompts(self, view: SessionView, parsed: ParsedRequest) -> tuple[list[Prompt], bool]:
        """The request's prompts in that session, and whether a thread made them: then others may have come since."""
        if not parsed.is_long(view):
            return parsed.make_prompts(view), False
        frozen = dataclasses.replace(view, tree=view.tree.snapshot())  # turns end meanwhile
        return await asyncio.get_running_loop().run_in_executor(self._threads, parsed.make_prompts, frozen), True

    async def _prepare(self, request: web.Request, raw: bytes, parsed: ParsedRequest) -> PreparedRequest:
        identity = self.identify(request, parsed.named)
        if identity.session_id is None:
            identity = dataclasses.replace(identity, kept=parsed.kept)
        if self._traced and (trace := parse_traceparent(request.headers.get(TRACEPARENT))) is not None:
            identity = dataclasses.replace(identity, trace=trace)
        call = await aside(lambda: call_of(request, raw, identity.session_id), long=len(raw) > AT_ONCE_BYTES)
        turns = await self.turns.join(call, parsed.shape.choices)
        joined = turns is not None
        if turns is None:
            turns, joined = await self._begin(identity, call, parsed)
        first = turns[0].request
        origin = first.origin
        added = parsed.messages[len(parsed.messages) - origin.messages_added :]
        prompt = Prompt(
            list(first.prompt_ids), origin.history, first.parent, added, first.turn_index, origin.history_reason
        )
        per_prompt = parsed.shape.choices // parsed.num_prompts
        head = AnswerHead(
            parsed.api,
            first.turn_id,
            first.session_id,
            parsed.model.name,
            parsed.shape,
            [turn.request.prompt_ids for turn in turns if turn.request.choice % per_prompt == 0],
            origin.history,
            origin.created_unix_s,
        )
        choices = [self._choice(parsed, turn) for turn in turns]
        return PreparedRequest(
            parsed.form,
            head,
            parsed.record_head,
            prompt,
            choices,
            identity.source,
            joined,
            has_messages=bool(parsed.messages),
            continued=parsed.continued,
            kept=parsed.kept,
            notes=[*parsed.without_effect, *_bounded(parsed, first.sampling)],
        )

    async def _begin(
        self, identity: SessionIdentity, call: Call, parsed: ParsedRequest
    ) -> tuple[Sequence[TurnHandle], bool]:
        """The turns of a new request, and whether they were joined after all.

        A refusal that a retry may get past is noted: else the same request, sent again, would count as the retry of
        another one.
        """
        try:
            return await self._new_turns(identity, call, parsed)
        except (OutOfCapacity, Unavailable):
            self.turns.refused(call)
            raise

    async def _new_turns(
        self, identity: SessionIdentity, call: Call, parsed: ParsedRequest
    ) -> tuple[Sequence[TurnHandle], bool]:
        """Session, prompt and sampling. A call without a session gets its own last: refused, it leaves none behind.

        While a thread makes a long prompt, a retry of the same request may arrive and begin: then its turns are joined.
        """
        named = identity.session_id is not None
        choices = parsed.shape.choices
        view = await self.turns.open_session(identity, choices) if named else NOBODY
        prompts, waited = await self.prompts(view, parsed)
        if waited and (joined := await self.turns.join(call, choices, again=True)) is not None:
            return joined, True
        sampled = [parsed.make_sampling(prompt.token_ids, view) for prompt in prompts]
        if not named:
            view = await self.turns.open_session(identity, choices)
        trace, name, per_prompt = identity.trace, secrets.token_hex(12), choices // len(prompts)
        new: list[TurnRequest] = []
        for prompt, sampling in zip(prompts, sampled, strict=True):
            ids, origin = self.codec.shared(prompt.token_ids), _origin(call, prompt, trace, named=named)
            for i in range(len(new), len(new) + per_prompt):
                turn_id = choice_id(TurnId(name), i)
                new.append(TurnRequest(turn_id, view.session_id, prompt.turn, ids, sampling, prompt.parent, i, origin))
        return [self.turns.start(turn) for turn in new], False

    def _choice(self, parsed: ParsedRequest, turn: TurnHandle) -> Choice:
        sampling, codec = turn.request.sampling, self.codec
        continues = content_text(parsed.messages[-1].get("content")) if parsed.continued else ""
        parser = AnswerParser(
            reasoning=codec.reasoning_format if parsed.parses_reasoning else "none",
            begun=False if continues else codec.opens_reasoning(turn.request.prompt_ids),
            continues=continues,
            calls=codec.tool_format,
            tools=(parsed.record_head.get("tools") or ()) if parsed.parses_tools else None,
            stop=sampling.stop,
            one_call=parsed.one_call,
        )
        decoder = codec.stream_decoder(
            turn.request.prompt_ids,
            show_special=parsed.show_special,
            markers=parsed.parses_tools or parsed.parses_reasoning,
            in_call=(lambda: parser.in_call) if parsed.parses_tools else None,
        )
        return Choice(turn, Reader(decoder, parser, sampling.stop_token_ids, turn.request.turn_id, sampling.min_tokens))


def _bounded(parsed: ParsedRequest, sampling: SamplingParams) -> list[str]:
    """The bound of the answer, where the context has less room than was requested."""
    if parsed.max_tokens is None or parsed.max_tokens <= sampling.max_tokens:
        return []
    return [f"max_tokens={sampling.max_tokens}"]


def _origin(call: Call, prompt: Prompt, trace: TraceContext | None, *, named: bool) -> TurnOrigin:
    return TurnOrigin(
        call.digest,
        not named,
        call.idempotency_key,
        prompt.history,
        prompt.reason,
        messages_added=len(prompt.added),
        created_unix_s=int(time.time()),
        trace=trace,
    )
