"""The OpenAI endpoints: from a request to its session, prompt and turns, which `openai_answering` answers with.

Every path is served at the root and below `/sessions/{sid}` and `/s/{sid}`. `X-Session-ID` is in every answer;
`X-Laminar-Session-From` says what named it ("none": nothing did), `X-Laminar-History` how the prompt came from the
session's record (`gateway.api.openai_history`).

Invariants:
- a call without a session that is refused leaves none behind;
- the `n` answers to a request are turns of their own, side by side in the session's tree.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aiohttp import web

from gateway.api import openai_history as history
from gateway.api import openai_requests as requests
from gateway.api.answers import answer_json
from gateway.api.openai_answering import Answering, Asked, Choice
from gateway.api.openai_answers import Model, Models
from gateway.api.openai_history import Prompt
from gateway.api.openai_identity import call_of, identify
from gateway.api.openai_relay import TextDoor
from gateway.api.openai_requests import AnswerShape
from gateway.api.openai_shapes import AnswerHead, Api
from gateway.api.openai_turn import Reader
from gateway.api.openai_types import ChatRequest, CompletionRequest
from gateway.core.joining import Call
from gateway.core.tree import TurnTree
from gateway.core.types import SessionId, TurnId, TurnOrigin, TurnRequest
from gateway.ports import Message, ModelInfo, SessionIdentity, SessionView, TurnRun, Turns
from gateway.tokens import Codec, ReasoningParser, ToolCallParser
from gateway.tokens.toolcalls import ToolFormat

PREFIXES = ("", "/sessions/{sid}", "/s/{sid}")
BODY_BYTES_MAX = 1 << 30
"""For the application's `client_max_size`: long histories with logprobs outgrow aiohttp's 1 MiB."""
LONG_BODY_BYTES = 200_000
"""Above this, tokenising would hold the event loop for milliseconds: it goes to a thread."""


@dataclass(frozen=True, slots=True)
class OpenAIDeps:
    turns: Turns
    codec: Codec
    text: TextDoor | None = None  # None: every request takes the token path
    session_from_user: bool = True  # the body's `user` names a session, where nothing else does


@dataclass(frozen=True, slots=True)
class _Call:
    """A request that was found right: what to do, before its session is known. `messages`: none for a completion."""

    api: Api
    body: ChatRequest | CompletionRequest
    model: ModelInfo
    shape: AnswerShape
    record_head: Message
    messages: Sequence[Message]
    parses_tools: bool
    parses_reasoning: bool
    make_prompt: Callable[[SessionView], Prompt]


NOBODY = SessionView(SessionId(""), TurnTree(), ephemeral=True)
"""What a call without a session extends: nothing."""


def add_openai_routes(app: web.Application, deps: OpenAIDeps) -> None:
    """Run the application with `handler_cancellation=True`: that is how a turn hears that its client left."""
    handlers = _Handlers(deps)
    for prefix in PREFIXES:
        app.router.add_post(f"{prefix}/v1/chat/completions", handlers.chat)
        app.router.add_post(f"{prefix}/v1/completions", handlers.completions)
        app.router.add_get(f"{prefix}/v1/models", handlers.models)
        app.router.add_get(f"{prefix}/v1/models/{{model:.+}}", handlers.model)


class _Handlers:
    def __init__(self, deps: OpenAIDeps) -> None:
        self._turns = deps.turns
        self._codec = deps.codec
        self._text, self._session_from_user = deps.text, deps.session_from_user
        self._answering = Answering(deps.turns, deps.codec)
        reasons = deps.codec.reasoning_format == "think"  # before it calls: a grammar would forbid that
        self._forced_format: ToolFormat = "none" if reasons else deps.codec.tool_format

    async def models(self, request: web.Request) -> web.Response:
        return answer_json(Models("list", [_model(m) for m in self._turns.models()]))

    async def model(self, request: web.Request) -> web.Response:
        return answer_json(_model(requests.find_model(request.match_info["model"], self._turns.models())))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        if self._text is not None and (seen := self._text.glance(request, raw)) is not None:
            return await self._text.answer(request, raw, "chat", seen)
        body = requests.decode_chat(raw)
        model = requests.find_model(body.model, self._turns.models())
        messages = requests.chat_messages(body.messages)
        tools = requests.chat_tools(body, self._codec.tool_format)
        kwargs = body.chat_template_kwargs
        call = _Call(
            "chat",
            body,
            model,
            requests.chat_shape(body),
            record_head=history.head(api="chat", tools=tools, template_kwargs=kwargs),
            messages=messages,
            parses_tools=tools is not None and body.tool_choice != "none",
            parses_reasoning=body.separate_reasoning and self._codec.reasoning_format == "think",
            make_prompt=lambda view: history.chat_prompt(self._codec, view, messages, tools, kwargs, body.history),
        )
        return await self._answering.answer(request, await self._prepare(request, raw, call))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        if self._text is not None and (seen := self._text.glance(request, raw)) is not None:
            return await self._text.answer(request, raw, "completion", seen)
        body = requests.decode_completion(raw)
        model = requests.find_model(body.model, self._turns.models())
        text = requests.completion_prompt(body, self._codec.vocab_size)
        special = body.add_special_tokens
        call = _Call(
            "completion",
            body,
            model,
            requests.completion_shape(body),
            record_head=history.head(api="completion"),
            messages=(),
            parses_tools=False,
            parses_reasoning=False,
            make_prompt=lambda view: history.completion_prompt(self._codec, view, text, add_special_tokens=special),
        )
        return await self._answering.answer(request, await self._prepare(request, raw, call))

    async def _prepare(self, request: web.Request, raw: bytes, call: _Call) -> Asked:
        body = call.body
        user = body.user if self._session_from_user else None
        identity = identify(request, self._turns, metadata=body.metadata, session_id=body.session_id, user=user)
        asked = call_of(request, raw, identity.session_id)
        runs = await self._turns.join(asked, call.shape.choices)
        joined = runs is not None
        if runs is None:
            wanted = await self._new_turns(identity, asked, call, long=len(raw) > LONG_BODY_BYTES)
            runs = [self._turns.start(turn) for turn in wanted]
        first = runs[0].request
        origin = first.origin
        added = call.messages[len(call.messages) - origin.messages_added :]
        prompt = Prompt(
            list(first.prompt_ids), origin.history, first.parent, added, first.turn_index, origin.history_reason
        )
        head = AnswerHead(
            call.api,
            first.turn_id,
            first.session_id,
            call.model.name,
            call.shape,
            first.prompt_ids,
            origin.history,
            origin.created_unix_s,
        )
        choices = [self._choice(call, run) for run in runs]
        return Asked(head, call.record_head, prompt, choices, identity.source, joined)

    async def _new_turns(
        self, identity: SessionIdentity, asked: Call, call: _Call, *, long: bool
    ) -> Sequence[TurnRequest]:
        """Session, prompt and sampling. A call without a session gets its own last: refused, it leaves none behind."""
        named = identity.session_id is not None
        view = await self._turns.open_session(identity) if named else NOBODY
        prompt = await asyncio.to_thread(call.make_prompt, view) if long else call.make_prompt(view)
        ids, top = tuple(prompt.token_ids), call.shape.logprobs or 0
        each = self._turns.tokens_per_event(streamed=call.shape.stream)
        sampling = requests.sampling(
            call.body,
            prompt_tokens=len(ids),
            model=requests.within(call.model, view),
            top=top,
            tokens_per_event=each,
            tool_format=self._forced_format,
        )
        requests.check_trainable(sampling, view)
        if not named:
            view = await self._turns.open_session(identity)
        name = secrets.token_hex(12)
        origin = TurnOrigin(
            asked.digest,
            not named,
            asked.idempotency_key,
            prompt.history,
            prompt.reason,
            messages_added=len(prompt.added),
            created_unix_s=int(time.time()),
        )
        return [
            TurnRequest(
                TurnId(f"{name}-{i}" if i else name),
                view.session_id,
                prompt.turn,
                ids,
                sampling,
                prompt.parent,
                i,
                origin,
            )
            for i in range(call.shape.choices)
        ]

    def _choice(self, call: _Call, run: TurnRun) -> Choice:
        sampling = run.request.sampling
        decoder = self._codec.stream_decoder(
            run.request.prompt_ids,
            stop=sampling.stop,
            min_tokens=sampling.min_tokens,
            show_special=not call.body.skip_special_tokens,
            markers=call.parses_tools or call.parses_reasoning,
        )
        reasoning = None
        if call.parses_reasoning:
            reasoning = ReasoningParser(begun=self._codec.opens_reasoning(run.request.prompt_ids))
        tools = ToolCallParser(self._codec.tool_format) if call.parses_tools else None
        return Choice(run, Reader(decoder, reasoning, tools, sampling.stop_token_ids, run.request.turn_id))


def _model(model: ModelInfo) -> Model:
    return Model(model.name, "model", model.created_unix_s, "laminar", model.context_tokens)
