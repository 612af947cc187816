"""The answer to a request: its turns are read side by side, and sent whole or as a stream of events.

Invariants:
- the turn has left its engine and the record holds its answer before the client sees the finish: the client's next
  request, sent at once, finds both;
- a client that disconnects leaves its turns, which run on for a grace period: a retry joins them (`X-Laminar-Joined`);
- a failure before the first byte is an error of its own status; after it, the stream's last event, or a body cut off.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from gateway.api.calls.events import EventStream, LateBody
from gateway.api.calls.history import Prompt
from gateway.api.calls.schema import Provenance
from gateway.api.calls.turn_view import Answer, Piece, Reader
from gateway.api.errors import error_headers, unexpected
from gateway.ports import IdentitySource, Message, TurnHandle, Turns
from gateway.tokens.bridge import content_text
from protos.errors import LaminarError
from protos.foreign_text import quoted

log = logging.getLogger(__name__)

R = TypeVar("R")
Api = Literal["chat", "completion", "generate", "messages"]
VERSION_HEADER = "X-Laminar-Weight-Version"
NOTES_HEADER = "X-Laminar-Without-Effect"
"""Fields that were accepted and have no effect, and `max_tokens=N` where the context had room for no more than N."""


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """What a client wants of the answer. `logprobs`: the number of alternatives beside the sampled token; None: no
    logprobs."""

    stream: bool
    include_usage: bool
    logprobs: int | None
    token_ids: bool
    weight_versions: bool
    choices: int = 1


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What is known of an answer before its first token. `turn_id`: its first choice's."""

    api: Api
    turn_id: str
    session_id: str
    model: str
    shape: AnswerShape
    prompts: Sequence[Sequence[int]]
    history: str
    created_unix_s: int = field(default_factory=lambda: int(time.time()))

    def prompt_ids(self, choice: int) -> Sequence[int]:
        """The prompt of a choice: each prompt of a batch has the same number of choices."""
        return self.prompts[choice * len(self.prompts) // self.shape.choices]


def provenance(head: AnswerHead, answer: Answer) -> Provenance | UnsetType:
    """On request, and in any case when the session's version was lost meanwhile."""
    if not (head.shape.token_ids or head.shape.weight_versions or answer.version_changes):
        return UNSET
    moves = sum(segment.cause == "move" for segment in answer.segments)
    return Provenance(head.session_id, head.history, moves, answer.segments, answer.version_changes)


class ChoiceEvents(Protocol):
    """Writes the events of one choice of a streamed answer."""

    def first(self) -> bytes:
        """Before any text; may be empty."""
        ...

    def piece(self, piece: Piece) -> bytes:
        """Empty when the piece shows nothing that was requested."""
        ...

    def last(self, answer: Answer) -> bytes:
        """The choice's finish."""
        ...


class Form(Protocol):
    """The form of an API's answers."""

    def answer_id(self, head: AnswerHead) -> str: ...

    def headers(self, head: AnswerHead) -> Mapping[str, str]:
        """Those that this API has beside the common ones."""
        ...

    def body(self, head: AnswerHead, answers: Sequence[Answer]) -> bytes:
        """The whole answer: its choices in order."""
        ...

    def events(self, head: AnswerHead, choice: int) -> ChoiceEvents: ...

    def stream_end(self, head: AnswerHead, answers: Sequence[Answer]) -> bytes:
        """After the last choice's finish."""
        ...

    def error_event(self, error: LaminarError) -> bytes:
        """The last event of a stream that failed after its first byte."""
        ...


@dataclass(slots=True)
class Choice:
    """One of a request's `n` answers: a turn, ready to run or joined, and its reader."""

    turn: TurnHandle
    reader: Reader
    answer: Answer = field(default_factory=Answer)
    read: bool = False  # to its end


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request with its turns, ready to be answered."""

    form: Form
    head: AnswerHead
    record_head: Message
    prompt: Prompt
    choices: Sequence[Choice]
    named_by: IdentitySource  # "none": it is a session of its own
    joined: bool
    has_messages: bool = True  # its prompt is a conversation
    continued: bool = False  # the answer continues the last message of the request
    kept: bool = False  # its session lives on, also if nothing named it
    notes: Sequence[str] = ()  # for `NOTES_HEADER`

    @property
    def ephemeral(self) -> bool:
        return self.named_by == "none" and not self.kept

    def delivered(self) -> None:
        for choice in self.choices:
            choice.turn.delivered()

    def left(self) -> None:
        """The client has the whole answer, or is gone. A turn that was not read to its end may have other readers."""
        for choice in self.choices:
            if choice.read:
                choice.turn.left()


class Responder:
    """Reads a request's turns and sends their answers."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    async def respond(self, request: web.Request, prepared: PreparedRequest) -> web.StreamResponse:
        try:
            return await self._send_answers(request, prepared)
        except LaminarError as e:
            if len(prepared.choices) > 1 and error_headers(e)["x-should-retry"] == "false":
                for choice in prepared.choices:
                    await choice.turn.give_up(f"another answer to its request failed: {e.message}")
            raise
        finally:
            prepared.left()

    async def _send_answers(self, request: web.Request, prepared: PreparedRequest) -> web.StreamResponse:
        headers = _headers(prepared)
        kept_alive = EventStream(request, headers) if prepared.head.shape.stream else LateBody(request, headers)
        async with kept_alive as response:
            try:
                if isinstance(response, EventStream):
                    sent = await self._stream(response, prepared)
                else:
                    sent = await self._whole(response, prepared)
                prepared.delivered()
                return sent
            except ConnectionError:  # the client is gone: nobody is left to notify
                return response.response
            except LaminarError as e:
                if not response.started:
                    raise
                log.warning("%s %s: failed after its first byte: %s", request.method, quoted(request.path), e)
                return await response.fail(prepared.form.error_event(e))
            except Exception as e:
                if not response.started:
                    raise
                return await response.fail(prepared.form.error_event(unexpected(request, e)))

    async def _whole(self, late: LateBody, prepared: PreparedRequest) -> web.StreamResponse:
        answers = await _side_by_side([self._read(late, prepared, choice) for choice in prepared.choices])
        late.set_header(VERSION_HEADER, _versions(answers))
        return await late.answer(prepared.form.body(prepared.head, answers))

    async def _read(self, late: LateBody, prepared: PreparedRequest, choice: Choice) -> Answer:
        async with choice.turn:
            late.begin()
            choice.turn.sent(0)  # it is sent whole, after its end: until then the client has none of it
            await choice.reader.read(choice.turn, choice.answer, None)
            choice.read = True
            await self._record(prepared, choice)
        return choice.answer

    async def _stream(self, events: EventStream, prepared: PreparedRequest) -> web.StreamResponse:
        await _side_by_side([self._send(events, prepared, choice) for choice in prepared.choices])
        await events.send(prepared.form.stream_end(prepared.head, [choice.answer for choice in prepared.choices]))
        return await events.end()

    async def _send(self, events: EventStream, prepared: PreparedRequest, choice: Choice) -> None:
        """One choice's events, up to its finish."""
        chunks = prepared.form.events(prepared.head, choice.turn.request.choice)
        first = chunks.first()

        def show(piece: Piece) -> Awaitable[None] | None:
            nonlocal first
            event = chunks.piece(piece)
            if first:
                events.set_header(VERSION_HEADER, _versions([choice.answer]))
                first, event = b"", first + event
            return events.send_soon(event) if event else None

        async with choice.turn:
            events.begin()
            try:
                await choice.reader.read(choice.turn, choice.answer, show)
                choice.read = True
            finally:
                choice.turn.sent(len(choice.answer.token_ids))
            await self._record(prepared, choice)
        await events.send(chunks.last(choice.answer))

    async def _record(self, prepared: PreparedRequest, choice: Choice) -> None:
        """Records the turn's messages while it is still read: then they share one commit with the turn's end."""
        choice.answer.end(choice.turn)
        if prepared.ephemeral:
            return
        messages: list[Message] = []
        if prepared.has_messages:
            answer = msgspec.to_builtins(choice.answer.message())
            messages = [*prepared.prompt.added, answer]
            if prepared.continued:  # a client sends the begun message and its continuation back as one
                *before, begun, _ = messages
                text = content_text(begun.get("content")) + content_text(answer.get("content"))
                messages = [*before, {**answer, "content": text}]
        await self._turns.record_turn(choice.turn.request, prepared.record_head, messages)


async def _side_by_side(choices: Sequence[Coroutine[Any, Any, R]]) -> list[R]:
    """Awaits all of them; the first that fails cancels the others."""
    if len(choices) == 1:
        return [await choices[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(choice) for choice in choices]
    except ExceptionGroup as failed:  # no `except*`: Python 3.11.2 wraps what is raised in it in a group again
        first, *others = failed.exceptions
        for other in others:
            log.warning("a second choice of the same request failed: %r", other)
        raise first from None
    return [task.result() for task in tasks]


def _versions(answers: Sequence[Answer]) -> str:
    """The weight versions that sampled the answers so far, in ascending order: "27", or "27, 28"."""
    return ", ".join(map(str, sorted({int(span.version) for answer in answers for span in answer.spans})))


def _headers(prepared: PreparedRequest) -> dict[str, str]:
    headers = {
        "X-Session-ID": prepared.head.session_id,
        "X-Request-Id": prepared.form.answer_id(prepared.head),
        "X-Laminar-Session-From": prepared.named_by,
        "X-Laminar-History": prepared.prompt.history,
        **prepared.form.headers(prepared.head),
    }
    if prepared.prompt.reason:
        headers["X-Laminar-History-Reason"] = prepared.prompt.reason
    if prepared.joined:
        headers["X-Laminar-Joined"] = "true"
    if prepared.notes:
        headers[NOTES_HEADER] = ", ".join(prepared.notes)
    return headers
