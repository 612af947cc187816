"""The OpenAI endpoints: from a request to its session, prompt, turn and answer.

Every path is served at the root and below `/sessions/{sid}` and `/s/{sid}`. `X-Session-ID` is in every answer;
`X-Laminar-History` says how the prompt came from the session's record (`gateway.api.openai_history`).

Invariants:
- the turn has left its engine and the record holds its answer before the client sees the finish: its next request,
  sent at once, finds both;
- a client that goes away gives its turn up.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from gateway.api import openai_history as history
from gateway.api import openai_requests as requests
from gateway.api import openai_shapes as shapes
from gateway.api.openai_errors import error_body
from gateway.api.openai_events import EventStream
from gateway.api.openai_history import Prompt
from gateway.api.openai_identity import identify
from gateway.api.openai_requests import AnswerShape
from gateway.api.openai_shapes import AnswerHead, Api
from gateway.api.openai_turn import Answer, Piece, pieces
from gateway.api.openai_types import ChatRequest, CompletionRequest
from gateway.core.types import SessionId, TurnId, TurnRequest
from gateway.ports import Message, ModelInfo, SessionView, TurnRun, Turns
from gateway.tokens import Codec, StreamDecoder, ToolCallParser
from protos.errors import LaminarError

PREFIXES = ("", "/sessions/{sid}", "/s/{sid}")
BODY_BYTES_MAX = 1 << 30
"""For the application's `client_max_size`: long histories with logprobs outgrow aiohttp's 1 MiB."""
LONG_BODY_BYTES = 200_000
"""Above this, tokenising would hold the event loop for milliseconds: it goes to a thread."""


@dataclass(frozen=True, slots=True)
class OpenAIDeps:
    turns: Turns
    codec: Codec


@dataclass(frozen=True, slots=True)
class _Call:
    """A request that was found right: what to do, before its session is known.

    `messages` is empty for a completion: no chat can extend its record.
    """

    api: Api
    body: ChatRequest | CompletionRequest
    model: ModelInfo
    shape: AnswerShape
    record_head: Message
    messages: Sequence[Message]
    parses_tools: bool
    make_prompt: Callable[[SessionView], Prompt]


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn ready to run, and how to read and answer it."""

    call: _Call
    request: TurnRequest
    head: AnswerHead
    prompt: Prompt
    decoder: StreamDecoder
    parser: ToolCallParser | None
    ephemeral: bool


NOBODY = SessionView(SessionId(""), 0, (), (), ephemeral=True)
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

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [_model_body(m) for m in self._turns.models()]})

    async def model(self, request: web.Request) -> web.Response:
        return web.json_response(_model_body(requests.find_model(request.match_info["model"], self._turns.models())))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
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
            make_prompt=lambda view: history.chat_prompt(self._codec, view, messages, tools, kwargs),
        )
        return await self._answer(request, await self._prepare(request, raw, call))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
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
            make_prompt=lambda view: history.completion_prompt(self._codec, view, text, add_special_tokens=special),
        )
        return await self._answer(request, await self._prepare(request, raw, call))

    async def _prepare(self, request: web.Request, raw: bytes, call: _Call) -> _Turn:
        """Session, prompt and sampling. A call without a session gets its own last: refused, it leaves none behind."""
        body = call.body
        identity = identify(request, self._turns, metadata=body.metadata, session_id=body.session_id, user=body.user)
        named = identity.session_id is not None
        view = await self._turns.open_session(identity) if named else NOBODY
        if len(raw) > LONG_BODY_BYTES:
            prompt = await asyncio.to_thread(call.make_prompt, view)
        else:
            prompt = call.make_prompt(view)
        ids, top = prompt.token_ids, call.shape.logprobs or 0
        sampling = requests.sampling(body, prompt_tokens=len(ids), model=call.model, top=top)
        if not named:
            view = await self._turns.open_session(identity)
        turn_id = TurnId(secrets.token_hex(12))
        return _Turn(
            call=call,
            request=TurnRequest(turn_id, view.session_id, view.turn_index, tuple(ids), sampling),
            head=AnswerHead(call.api, turn_id, view.session_id, call.model.name, call.shape, ids, prompt.history),
            prompt=prompt,
            decoder=self._codec.stream_decoder(
                ids,
                stop=sampling.stop,
                min_tokens=sampling.min_tokens,
                show_special=not body.skip_special_tokens,
                tools=call.parses_tools,
            ),
            parser=ToolCallParser(self._codec.tool_format) if call.parses_tools else None,
            ephemeral=view.ephemeral,
        )

    async def _answer(self, request: web.Request, turn: _Turn) -> web.StreamResponse:
        run = self._turns.start(turn.request)
        if turn.call.shape.stream:
            return await self._stream(request, turn, run)
        return await self._whole(turn, run)

    async def _whole(self, turn: _Turn, run: TurnRun) -> web.Response:
        answer = Answer()
        async with run, aclosing(_pieces(run, turn, answer)) as reading:
            async for _ in reading:
                pass
        await self._record(turn, answer)
        body = shapes.body(self._codec, turn.head, answer, run.segments)
        return web.Response(body=body, content_type="application/json", headers=_headers(turn))

    async def _stream(self, request: web.Request, turn: _Turn, run: TurnRun) -> web.StreamResponse:
        answer, chunks = Answer(), shapes.Chunks(self._codec, turn.head)
        async with EventStream(request, _headers(turn)) as events:
            try:
                await self._send_pieces(events, turn, run, answer, chunks)
                await self._record(turn, answer)
                await events.send(chunks.last(answer, run.segments))
                return await events.end()
            except ConnectionError:  # the client is gone: there is nobody to tell
                return events.response
            except LaminarError as e:
                if not events.started:
                    raise
                await events.send(b"data: " + msgspec.json.encode(error_body(e)) + b"\n\n")
                return await events.end()

    async def _send_pieces(
        self, events: EventStream, turn: _Turn, run: TurnRun, answer: Answer, chunks: shapes.Chunks
    ) -> None:
        first = True
        async with run, aclosing(_pieces(run, turn, answer)) as reading:
            async for piece in reading:
                event = chunks.piece(piece)
                if first:
                    first, event = False, chunks.first() + event
                if event:
                    await events.send(event)

    async def _record(self, turn: _Turn, answer: Answer) -> None:
        if turn.ephemeral:
            return
        said = [*turn.call.messages, answer.message()] if turn.call.messages else []
        await self._turns.record_turn(turn.request, [turn.call.record_head, *said])


def _pieces(run: TurnRun, turn: _Turn, answer: Answer) -> AsyncGenerator[Piece, None]:
    return pieces(run, turn.decoder, turn.parser, answer, turn.request.sampling.stop_token_ids)


def _headers(turn: _Turn) -> dict[str, str]:
    headers = {
        "X-Session-ID": turn.head.session_id,
        "X-Request-Id": turn.head.answer_id,
        "X-Laminar-History": turn.prompt.history,
    }
    if turn.prompt.reason:
        headers["X-Laminar-History-Reason"] = turn.prompt.reason
    return headers


def _model_body(model: ModelInfo) -> Mapping[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_unix_s,
        "owned_by": "laminar",
        "max_model_len": model.context_tokens,
    }
