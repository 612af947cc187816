"""The OpenAI endpoints: from a request to its session, prompt and turns, which `openai_answering` answers with.

Every path is served at the root and below `/sessions/{sid}` and `/s/{sid}`. `X-Session-ID` is in every answer;
`X-Laminar-Session-From` says what named it ("none": nothing did), `X-Laminar-History` how the prompt came from the
session's record (`gateway.api.openai.history`).

Invariants:
- a call without a session that is refused leaves none behind;
- the `n` answers to a request are turns of their own, side by side in the session's tree.
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

from gateway.api.answers import answer_json
from gateway.api.openai import history, requests
from gateway.api.openai.answer import Answering, Asked, Choice
from gateway.api.openai.bodies import ChatRequest, CompletionRequest
from gateway.api.openai.history import Prompt
from gateway.api.openai.identity import call_of, identify
from gateway.api.openai.requests import AnswerShape
from gateway.api.openai.schema import Model, Models
from gateway.api.openai.shapes import AnswerHead, Api
from gateway.api.openai.text_proxy import TextRoutes
from gateway.api.openai.turn_view import Reader
from gateway.core.retries import Call, choice_id
from gateway.core.tree import TurnTree
from gateway.core.types import SamplingParams, SessionId, TurnId, TurnOrigin, TurnRequest
from gateway.ports import Message, ModelInfo, SessionIdentity, SessionView, TurnRun, Turns
from gateway.tokens import Codec, ReasoningParser, ToolCallParser
from gateway.tokens.toolcalls import CLOSE, ToolFormat
from protos.errors import OutOfCapacity, Unavailable

PREFIXES = ("", "/sessions/{sid}", "/s/{sid}")
BODY_BYTES_MAX = 1 << 30
"""For the application's `client_max_size`: long histories with logprobs outgrow aiohttp's 1 MiB."""
LONG_BODY_BYTES = 8_000
"""Above this, tokenising would hold the event loop for milliseconds (some 1 ms for each 4 KB): it goes to a thread."""
LONG_HISTORY_BYTES = 32_000
"""Up to this, a body of which the session's record has nearly all stays: what is left to tokenise is short, and writing
the rest through the template takes less than a thread does."""
TOKENISING_MAX = 4
"""Threads for that, so that large prompts wait for each other and for nothing else."""


@dataclass(frozen=True, slots=True)
class OpenAIDeps:
    turns: Turns
    codec: Codec
    text: TextRoutes | None = None  # None: every request takes the token path
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
    make_prompts: Callable[[SessionView], list[Prompt]]
    is_long: Callable[[SessionView], bool]  # making them would hold the event loop
    num_prompts: int = 1
    one_call: bool = False  # no more than one tool call
    continued: bool = False  # the last message is gone on with


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
        self._threads = ThreadPoolExecutor(TOKENISING_MAX, "tokenising")
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
        requests.check_continued(body, messages)
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
        return await self._answering.answer(request, await self._prepare(request, raw, call))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        if self._text is not None and (seen := self._text.glance(request, raw)) is not None:
            return await self._text.answer(request, raw, "completion", seen)
        body = requests.decode_completion(raw)
        model = requests.find_model(body.model, self._turns.models())
        prompts = requests.completion_prompts(body, self._codec.vocab_size)
        special = body.add_special_tokens
        call = _Call(
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
        return await self._answering.answer(request, await self._prepare(request, raw, call))

    async def _prepare(self, request: web.Request, raw: bytes, call: _Call) -> Asked:
        body = call.body
        user = body.user if self._session_from_user else None
        identity = identify(request, self._turns, metadata=body.metadata, session_id=body.session_id, user=user)
        asked = call_of(request, raw, identity.session_id)
        runs = await self._turns.join(asked, call.shape.choices)
        joined = runs is not None
        if runs is None:
            runs, joined = await self._first_asked(identity, asked, call)
        first = runs[0].request
        origin = first.origin
        added = call.messages[len(call.messages) - origin.messages_added :]
        prompt = Prompt(
            list(first.prompt_ids), origin.history, first.parent, added, first.turn_index, origin.history_reason
        )
        per_prompt = call.shape.choices // call.num_prompts
        head = AnswerHead(
            call.api,
            first.turn_id,
            first.session_id,
            call.model.name,
            call.shape,
            [run.request.prompt_ids for run in runs if run.request.choice % per_prompt == 0],
            origin.history,
            origin.created_unix_s,
        )
        choices = [self._choice(call, run) for run in runs]
        return Asked(head, call.record_head, prompt, choices, identity.source, joined, call.continued)

    async def _first_asked(self, identity: SessionIdentity, asked: Call, call: _Call) -> tuple[Sequence[TurnRun], bool]:
        """Its turns, and whether another request began them. What is refused now and may come again is noted, lest it
        be taken for another's retry then."""
        try:
            return await self._new_turns(identity, asked, call)
        except (OutOfCapacity, Unavailable):
            self._turns.refused(asked)
            raise

    async def _new_turns(self, identity: SessionIdentity, asked: Call, call: _Call) -> tuple[Sequence[TurnRun], bool]:
        """Session, prompt and sampling. A call without a session gets its own last: refused, it leaves none behind.

        While a long prompt is made the same request may come again, and begin: then its turns are joined.
        """
        named = identity.session_id is not None
        choices = call.shape.choices
        view = await self._turns.open_session(identity, choices) if named else NOBODY
        if call.is_long(view):
            as_it_is = dataclasses.replace(view, tree=view.tree.snapshot())  # for turns end meanwhile
            prompts = await asyncio.get_running_loop().run_in_executor(self._threads, call.make_prompts, as_it_is)
            if (runs := await self._turns.join(asked, choices, again=True)) is not None:
                return runs, True
        else:
            prompts = call.make_prompts(view)
        sampled = [self._sampling(call, prompt, view) for prompt in prompts]
        if not named:
            view = await self._turns.open_session(identity, choices)
        name, per_prompt = secrets.token_hex(12), choices // len(prompts)
        turns: list[TurnRequest] = []
        for prompt, sampling in zip(prompts, sampled, strict=True):
            ids, origin = self._codec.shared(prompt.token_ids), _origin(asked, prompt, named)
            for i in range(len(turns), len(turns) + per_prompt):
                turn_id = choice_id(TurnId(name), i)
                turns.append(
                    TurnRequest(turn_id, view.session_id, prompt.turn, ids, sampling, prompt.parent, i, origin)
                )
        return [self._turns.start(turn) for turn in turns], False

    def _sampling(self, call: _Call, prompt: Prompt, view: SessionView) -> SamplingParams:
        sampling = requests.sampling(
            call.body,
            prompt_tokens=len(prompt.token_ids),
            model=requests.within(call.model, view),
            top=call.shape.logprobs or 0,
            tokens_per_event=self._turns.tokens_per_event(streamed=call.shape.stream),
            tool_format=self._forced_format,
            vocab_size=self._codec.vocab_size,
        )
        requests.check_trainable(sampling, view, call.model.kinds)
        return sampling

    def _choice(self, call: _Call, run: TurnRun) -> Choice:
        sampling = run.request.sampling
        one_call = call.one_call and call.parses_tools
        closes = one_call and self._codec.tool_format == "hermes"
        decoder = self._codec.stream_decoder(
            run.request.prompt_ids,
            stop=(*sampling.stop, CLOSE) if closes else sampling.stop,
            min_tokens=sampling.min_tokens,
            show_special=not call.body.skip_special_tokens,
            markers=call.parses_tools or call.parses_reasoning,
        )
        reasoning = None
        if call.parses_reasoning:
            reasoning = ReasoningParser(begun=self._codec.opens_reasoning(run.request.prompt_ids))
        tools = ToolCallParser(self._codec.tool_format) if call.parses_tools else None
        return Choice(run, Reader(decoder, reasoning, tools, sampling.stop_token_ids, run.request.turn_id, one_call))


def _origin(asked: Call, prompt: Prompt, named: bool) -> TurnOrigin:
    return TurnOrigin(
        asked.digest,
        not named,
        asked.idempotency_key,
        prompt.history,
        prompt.reason,
        messages_added=len(prompt.added),
        created_unix_s=int(time.time()),
    )


def _model(model: ModelInfo) -> Model:
    return Model(model.name, "model", model.created_unix_s, "laminar", model.context_tokens, model.name)
