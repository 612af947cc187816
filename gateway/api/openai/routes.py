"""The OpenAI endpoints: from a request to its session, prompt and turns, which `answer` then reads and sends.

Every path is served at the root and below `/sessions/{sid}` and `/s/{sid}`. Every response has `X-Session-ID`,
`X-Laminar-Session-From` (what named the session; "none": nothing did) and `X-Laminar-History` (how the prompt came from
the session's record: `gateway.api.openai.history`).

Invariants:
- a call without a session that is refused leaves no session behind;
- the `n` answers to a request are separate turns, side by side in the session's tree.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from aiohttp import web

from gateway.api.bodies import answer_json
from gateway.api.openai import history, requests
from gateway.api.openai.answer import Choice, PreparedRequest, Responder
from gateway.api.openai.bodies import ChatRequest, CompletionRequest
from gateway.api.openai.history import Prompt
from gateway.api.openai.identity import call_of, identify
from gateway.api.openai.requests import AnswerShape
from gateway.api.openai.schema import Model, Models
from gateway.api.openai.text_proxy import TextRoutes
from gateway.api.openai.turn_view import Reader
from gateway.api.openai.writer import AnswerHead, Api
from gateway.core.retries import Call, choice_id
from gateway.core.tree import TurnTree
from gateway.core.types import SamplingParams, SessionId, TurnId, TurnOrigin, TurnRequest
from gateway.ports import Message, ModelInfo, SessionIdentity, SessionView, TurnHandle, Turns
from gateway.tokens import Codec, ReasoningParser, ToolCallParser
from gateway.tokens.toolcalls import CLOSE, ToolFormat
from protos.errors import OutOfCapacity, Unavailable

PREFIXES = ("", "/sessions/{sid}", "/s/{sid}")
BODY_BYTES_MAX = 1 << 30
"""For the application's `client_max_size`: long histories with logprobs exceed aiohttp's 1 MiB."""
LONG_BODY_BYTES = 8_000
"""A longer body is tokenised in a thread: it would hold the event loop for milliseconds (1 ms for about 4 KB)."""
LONG_HISTORY_BYTES = 32_000
"""Up to this, a body that the session's record holds nearly whole is handled in the event loop: little is left to
tokenise, and rendering the rest through the template costs less than handing it to a thread."""
TOKENISING_MAX = 4
"""Threads that tokenise, so that large prompts wait for each other and for nothing else."""


@dataclass(frozen=True, slots=True)
class OpenAIDeps:
    turns: Turns
    codec: Codec
    text: TextRoutes | None = None  # None: every request takes the token path
    session_from_user: bool = True  # the body's `user` names a session, where nothing else does


@dataclass(frozen=True, slots=True)
class _ParsedRequest:
    """A valid request, before its session is known. `messages`: none for a completion."""

    api: Api
    body: ChatRequest | CompletionRequest
    model: ModelInfo
    shape: AnswerShape
    record_head: Message
    messages: Sequence[Message]
    parses_tools: bool
    parses_reasoning: bool
    make_prompts: Callable[[SessionView], list[Prompt]]
    is_long: Callable[[SessionView], bool]  # making the prompts would hold the event loop
    num_prompts: int = 1
    one_call: bool = False  # no more than one tool call
    continued: bool = False  # the answer continues the last message


NOBODY = SessionView(SessionId(""), TurnTree(), ephemeral=True)
"""The session that a call without one extends: an empty one."""


def add_openai_routes(app: web.Application, deps: OpenAIDeps) -> None:
    """Run the application with `handler_cancellation=True`: a client that disconnects then cancels its handler."""
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
        self._responder = Responder(deps.turns, deps.codec)
        self._threads = ThreadPoolExecutor(TOKENISING_MAX, "tokenising")
        reasons = deps.codec.reasoning_format == "think"  # before it calls: a grammar would forbid that
        self._forced_format: ToolFormat = "none" if reasons else deps.codec.tool_format

    async def models(self, request: web.Request) -> web.Response:
        return answer_json(Models("list", [_model(m) for m in self._turns.models()]))

    async def model(self, request: web.Request) -> web.Response:
        return answer_json(_model(requests.find_model(request.match_info["model"], self._turns.models())))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, "chat", self._parse_chat)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, "completion", self._parse_completion)

    async def _answer(
        self, request: web.Request, api: Api, parse: Callable[[bytes], _ParsedRequest]
    ) -> web.StreamResponse:
        raw = await request.read()
        if self._text is not None and (seen := self._text.glance(request, raw)) is not None:
            return await self._text.answer(request, raw, api, seen)
        return await self._responder.respond(request, await self._prepare(request, raw, parse(raw)))

    def _parse_chat(self, raw: bytes) -> _ParsedRequest:
        body = requests.decode_chat(raw)
        model = requests.find_model(body.model, self._turns.models())
        messages = requests.chat_messages(body.messages)
        requests.check_continued(body, messages)
        tools = requests.chat_tools(body, self._codec.tool_format)
        kwargs = body.chat_template_kwargs
        return _ParsedRequest(
            "chat",
            body,
            model,
            requests.chat_shape(body),
            record_head=history.head(api="chat", tools=tools, template_kwargs=kwargs),
            messages=messages,
            parses_tools=tools is not None and body.tool_choice != "none",
            parses_reasoning=body.separate_reasoning and self._codec.reasoning_format == "think",
            make_prompts=lambda view: [
                history.chat_prompt(
                    self._codec,
                    view,
                    messages,
                    tools,
                    kwargs,
                    body.history,
                    generation_prompt=body.add_generation_prompt is not False,
                    continued=body.continue_final_message,
                )
            ],
            is_long=lambda view: (
                len(raw) > LONG_HISTORY_BYTES
                or (
                    len(raw) > LONG_BODY_BYTES
                    and history.unrecorded_chars(view, messages, tools, kwargs) > LONG_BODY_BYTES
                )
            ),
            one_call=body.parallel_tool_calls is False,
            continued=body.continue_final_message,
        )

    def _parse_completion(self, raw: bytes) -> _ParsedRequest:
        body = requests.decode_completion(raw)
        model = requests.find_model(body.model, self._turns.models())
        prompts = requests.completion_prompts(body, self._codec.vocab_size)
        special = body.add_special_tokens
        return _ParsedRequest(
            "completion",
            body,
            model,
            requests.completion_shape(body, len(prompts)),
            record_head=history.head(api="completion"),
            messages=(),
            parses_tools=False,
            parses_reasoning=False,
            make_prompts=lambda view: [
                history.completion_prompt(self._codec, view, prompt, add_special_tokens=special) for prompt in prompts
            ],
            is_long=lambda view: len(raw) > LONG_BODY_BYTES,
            num_prompts=len(prompts),
        )

    async def _prepare(self, request: web.Request, raw: bytes, parsed: _ParsedRequest) -> PreparedRequest:
        body = parsed.body
        user = body.user if self._session_from_user else None
        identity = identify(request, self._turns, metadata=body.metadata, session_id=body.session_id, user=user)
        call = call_of(request, raw, identity.session_id)
        turns = await self._turns.join(call, parsed.shape.choices)
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
        return PreparedRequest(head, parsed.record_head, prompt, choices, identity.source, joined, parsed.continued)

    async def _begin(
        self, identity: SessionIdentity, call: Call, parsed: _ParsedRequest
    ) -> tuple[Sequence[TurnHandle], bool]:
        """The turns of a new request, and whether they were joined after all.

        A refusal that a retry may get past is noted: else the same request, sent again, would count as the retry of
        another one.
        """
        try:
            return await self._new_turns(identity, call, parsed)
        except (OutOfCapacity, Unavailable):
            self._turns.refused(call)
            raise

    async def _new_turns(
        self, identity: SessionIdentity, call: Call, parsed: _ParsedRequest
    ) -> tuple[Sequence[TurnHandle], bool]:
        """Session, prompt and sampling. A call without a session gets its own last: refused, it leaves none behind.

        While a thread makes a long prompt, a retry of the same request may arrive and begin: then its turns are joined.
        """
        named = identity.session_id is not None
        choices = parsed.shape.choices
        view = await self._turns.open_session(identity, choices) if named else NOBODY
        if parsed.is_long(view):
            frozen = dataclasses.replace(view, tree=view.tree.snapshot())  # turns end meanwhile
            prompts = await asyncio.get_running_loop().run_in_executor(self._threads, parsed.make_prompts, frozen)
            if (joined := await self._turns.join(call, choices, again=True)) is not None:
                return joined, True
        else:
            prompts = parsed.make_prompts(view)
        sampled = [self._sampling(parsed, prompt, view) for prompt in prompts]
        if not named:
            view = await self._turns.open_session(identity, choices)
        name, per_prompt = secrets.token_hex(12), choices // len(prompts)
        new: list[TurnRequest] = []
        for prompt, sampling in zip(prompts, sampled, strict=True):
            ids, origin = self._codec.shared(prompt.token_ids), _origin(call, prompt, named)
            for i in range(len(new), len(new) + per_prompt):
                turn_id = choice_id(TurnId(name), i)
                new.append(TurnRequest(turn_id, view.session_id, prompt.turn, ids, sampling, prompt.parent, i, origin))
        return [self._turns.start(turn) for turn in new], False

    def _sampling(self, parsed: _ParsedRequest, prompt: Prompt, view: SessionView) -> SamplingParams:
        sampling = requests.sampling(
            parsed.body,
            prompt_tokens=len(prompt.token_ids),
            model=requests.within(parsed.model, view),
            top=parsed.shape.logprobs or 0,
            tokens_per_event=self._turns.tokens_per_event(streamed=parsed.shape.stream),
            tool_format=self._forced_format,
            vocab_size=self._codec.vocab_size,
        )
        requests.check_trainable(sampling, view, parsed.model.kinds)
        return sampling

    def _choice(self, parsed: _ParsedRequest, turn: TurnHandle) -> Choice:
        sampling = turn.request.sampling
        one_call = parsed.one_call and parsed.parses_tools
        closes = one_call and self._codec.tool_format == "hermes"
        decoder = self._codec.stream_decoder(
            turn.request.prompt_ids,
            stop=(*sampling.stop, CLOSE) if closes else sampling.stop,
            min_tokens=sampling.min_tokens,
            show_special=not parsed.body.skip_special_tokens,
            markers=parsed.parses_tools or parsed.parses_reasoning,
        )
        reasoning = None
        if parsed.parses_reasoning:
            reasoning = ReasoningParser(begun=self._codec.opens_reasoning(turn.request.prompt_ids))
        tools = ToolCallParser(self._codec.tool_format) if parsed.parses_tools else None
        return Choice(turn, Reader(decoder, reasoning, tools, sampling.stop_token_ids, turn.request.turn_id, one_call))


def _origin(call: Call, prompt: Prompt, named: bool) -> TurnOrigin:
    return TurnOrigin(
        call.digest,
        not named,
        call.idempotency_key,
        prompt.history,
        prompt.reason,
        messages_added=len(prompt.added),
        created_unix_s=int(time.time()),
    )


def _model(model: ModelInfo) -> Model:
    return Model(model.name, "model", model.created_unix_s, "laminar", model.context_tokens, model.name)
