"""The answer to a request: its turns read side by side, whole or as a stream of events.

Invariants:
- the turn has left its engine and the record holds its answer before the client sees the finish: its next request,
  sent at once, finds both;
- a client that goes away leaves its turns, which go on for a while: the same request joins them (`X-Laminar-Joined`);
- what fails before the first byte is an error of its own status; after it, the stream's last event, or a body cut off.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web

from gateway.api.errors import error_bytes, error_headers, unforeseen
from gateway.api.openai import shapes
from gateway.api.openai.events import EventStream, LateBody
from gateway.api.openai.history import Prompt
from gateway.api.openai.shapes import AnswerHead
from gateway.api.openai.text_proxy import VERSION_HEADER
from gateway.api.openai.turn_view import Answer, Piece, Reader
from gateway.ports import IdentitySource, Message, TurnRun, Turns
from gateway.tokens import Codec
from gateway.tokens.bridge import content_text
from protos.errors import LaminarError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Choice:
    """One of a request's `n` answers: a turn, ready to run or joined, and how to read it."""

    run: TurnRun
    reader: Reader
    answer: Answer = field(default_factory=Answer)
    read: bool = False  # to its end


@dataclass(frozen=True, slots=True)
class Asked:
    """A request ready to be answered."""

    head: AnswerHead
    record_head: Message
    prompt: Prompt
    choices: Sequence[Choice]
    named_by: IdentitySource  # "none": it is a session of its own
    joined: bool
    continued: bool = False  # the answer goes on with the last message of the request

    @property
    def ephemeral(self) -> bool:
        return self.named_by == "none"

    def delivered(self) -> None:
        for choice in self.choices:
            choice.run.delivered()

    def left(self) -> None:
        """Its client has the whole answer, or is gone. Of what it has not read to the end others may be readers."""
        for choice in self.choices:
            if choice.read:
                choice.run.left()


class Answering:
    def __init__(self, turns: Turns, codec: Codec) -> None:
        self._turns, self._codec = turns, codec

    async def answer(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        try:
            if asked.head.shape.stream:
                return await self._stream(request, asked)
            return await self._whole(request, asked)
        except LaminarError as e:
            if len(asked.choices) > 1 and error_headers(e)["x-should-retry"] == "false":
                for choice in asked.choices:
                    await choice.run.give_up(f"another answer to its request came to nothing: {e.message}")
            raise
        finally:
            asked.left()

    async def _whole(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        async with LateBody(request, _headers(asked)) as late:
            try:
                answered = await _side_by_side([self._read(late, asked, choice) for choice in asked.choices])
                late.set_header(VERSION_HEADER, _versions(answered))
                response = await late.answer(shapes.body(self._codec, asked.head, answered))
                asked.delivered()
                return response
            except ConnectionError:  # the client is gone: there is nobody to tell
                return late.response
            except LaminarError as e:
                if not late.started:
                    raise
                log.warning("%s %s: cut after its first byte: %s", request.method, request.path, e)
                return late.cut()
            except Exception as e:
                if not late.started:
                    raise
                unforeseen(request, e)
                return late.cut()

    async def _read(self, late: LateBody, asked: Asked, choice: Choice) -> Answer:
        async with choice.run:
            late.begin()
            choice.run.sent(0)
            await choice.reader.read(choice.run, choice.answer, None)
            choice.read = True
            await self._record(asked, choice)
        return choice.answer

    async def _stream(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        async with EventStream(request, _headers(asked)) as events:
            try:
                await _side_by_side([self._send(events, asked, choice) for choice in asked.choices])
                await events.send(shapes.stream_end(asked.head, [choice.answer for choice in asked.choices]))
                ended = await events.end()
                asked.delivered()
                return ended
            except ConnectionError:  # the client is gone: there is nobody to tell
                return events.response
            except LaminarError as e:
                if not events.started:
                    raise
                return await _end_with(events, e)
            except Exception as e:
                if not events.started:
                    raise
                return await _end_with(events, unforeseen(request, e))

    async def _send(self, events: EventStream, asked: Asked, choice: Choice) -> None:
        """One choice's chunks, up to its finish."""
        chunks = shapes.Chunks(self._codec, asked.head, choice.run.request.choice)
        first = chunks.first()

        def show(piece: Piece) -> Awaitable[None] | None:
            nonlocal first
            event = chunks.piece(piece)
            if first:
                events.set_header(VERSION_HEADER, _versions([choice.answer]))
                first, event = b"", first + event
            return events.send_soon(event) if event else None

        async with choice.run:
            events.begin()
            try:
                await choice.reader.read(choice.run, choice.answer, show)
                choice.read = True
            finally:
                choice.run.sent(len(choice.answer.token_ids))
            await self._record(asked, choice)
        await events.send(chunks.last(choice.answer))

    async def _record(self, asked: Asked, choice: Choice) -> None:
        """What the turn said, while it is still read: then it is one commit with the turn's end."""
        choice.answer.end(choice.run)
        if asked.ephemeral:
            return
        said = [*asked.prompt.added, choice.answer.message()] if asked.head.api == "chat" else []
        if asked.continued:  # both are one message to who sends it back
            *before, begun, answer = said
            text = content_text(begun.get("content")) + content_text(answer.get("content"))
            said = [*before, {**answer, "content": text}]
        await self._turns.record_turn(choice.run.request, asked.record_head, said)


async def _end_with(events: EventStream, error: LaminarError) -> web.StreamResponse:
    """The error is the stream's last event, and no end mark follows it."""
    try:
        await events.send(b"data: " + error_bytes(error) + b"\n\n")
        return await events.end()
    except ConnectionError:  # the client is gone: there is nobody to tell
        return events.response


R = TypeVar("R")


async def _side_by_side(choices: Sequence[Coroutine[Any, Any, R]]) -> list[R]:
    """All of them; the first that fails ends the others."""
    if len(choices) == 1:
        return [await choices[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(choice) for choice in choices]
    except* Exception as failed:  # noqa: BLE001 (raised again, without its group)
        first, *others = failed.exceptions
        for other in others:
            log.warning("a second choice of the same request failed: %r", other)
        raise first from None
    return [task.result() for task in tasks]


def _versions(answers: Sequence[Answer]) -> str:
    """The weight versions that sampled what there is of these answers, in ascending order: "27", or "27, 28"."""
    return ", ".join(map(str, sorted({int(span["version"]) for answer in answers for span in answer.spans})))


def _headers(asked: Asked) -> dict[str, str]:
    headers = {
        "X-Session-ID": asked.head.session_id,
        "X-Request-Id": asked.head.answer_id,
        "X-Laminar-Session-From": asked.named_by,
        "X-Laminar-History": asked.prompt.history,
    }
    if asked.prompt.reason:
        headers["X-Laminar-History-Reason"] = asked.prompt.reason
    if asked.joined:
        headers["X-Laminar-Joined"] = "true"
    return headers
