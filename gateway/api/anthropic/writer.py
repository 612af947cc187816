"""Writes answers and stream events in the format of Anthropic's Messages API (checked with its official client).

The events of a stream: `message_start`; for each block `content_block_start`, deltas, `content_block_stop`;
`message_delta` with the reason of the stop; `message_stop`. One block is open at a time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from gateway.api.anthropic.schema import (
    MessageAnswer,
    MessageDelta,
    MessageUsage,
    OnRequest,
    StopDelta,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from gateway.api.calls.answer import AnswerHead, provenance
from gateway.api.calls.turn_view import Answer, Piece
from gateway.api.errors import anthropic_error
from gateway.tokens import ToolCall
from gateway.tokens.bridge import arguments_object
from protos.errors import LaminarError

MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class MessagesForm:
    """Implements `gateway.api.calls.answer.Form`."""

    def answer_id(self, head: AnswerHead) -> str:
        return f"msg_{head.turn_id}"

    def headers(self, head: AnswerHead) -> Mapping[str, str]:
        return {"request-id": f"req_{head.turn_id}"}

    def body(self, head: AnswerHead, answers: Sequence[Answer]) -> bytes:
        [answer] = answers
        return _json(_message(self.answer_id(head), head, answer))

    def events(self, head: AnswerHead, choice: int) -> MessageEvents:
        return MessageEvents(self.answer_id(head), head)

    def stream_end(self, head: AnswerHead, answers: Sequence[Answer]) -> bytes:
        return MESSAGE_STOP

    def error_event(self, error: LaminarError) -> bytes:
        return _event("error", anthropic_error(error))


class MessageEvents:
    """The events of a streamed answer."""

    def __init__(self, answer_id: str, head: AnswerHead) -> None:
        self._answer_id, self._head = answer_id, head
        self._open: Literal["text", "thinking"] | None = None
        self._index = -1  # of the newest block

    def first(self) -> bytes:
        message = _message(self._answer_id, self._head, Answer())
        return _event("message_start", {"type": "message_start", "message": message})

    def piece(self, piece: Piece) -> bytes:
        events = []
        if piece.reasoning:
            events += self._shift("thinking")
            events.append(self._delta({"type": "thinking_delta", "thinking": piece.reasoning}))
        if piece.text:
            events += self._shift("text")
            events.append(self._delta({"type": "text_delta", "text": piece.text}))
        for call in piece.calls:
            events += self._close()
            events += self._call(call)
        return b"".join(events)

    def last(self, answer: Answer) -> bytes:
        closed = b"".join(self._close())
        delta = MessageDelta(delta=StopDelta(*_stop(answer)), usage=_usage(self._head, answer))
        return closed + _event("message_delta", _with_extras(delta, self._head, answer))

    def _shift(self, kind: Literal["text", "thinking"]) -> list[bytes]:
        """The end of the open block and the start of one of another kind."""
        if self._open == kind:
            return []
        closed, self._open = self._close(), kind
        return [*closed, self._start(TextBlock("") if kind == "text" else ThinkingBlock("", ""))]

    def _close(self) -> list[bytes]:
        kind, self._open = self._open, None
        if kind is None:
            return []
        signed = [self._delta({"type": "signature_delta", "signature": self._head.turn_id})]
        return [*(signed if kind == "thinking" else ()), self._stop()]

    def _call(self, call: ToolCall) -> list[bytes]:
        """A call comes whole: its arguments are one delta."""
        return [
            self._start(ToolUseBlock(call.id, call.name, {})),
            self._delta({"type": "input_json_delta", "partial_json": json.dumps(arguments_object(call.arguments))}),
            self._stop(),
        ]

    def _start(self, block: TextBlock | ThinkingBlock | ToolUseBlock) -> bytes:
        self._index += 1
        return self._of_block("content_block_start", content_block=block)

    def _delta(self, delta: Mapping[str, str]) -> bytes:
        return self._of_block("content_block_delta", delta=delta)

    def _stop(self) -> bytes:
        return self._of_block("content_block_stop")

    def _of_block(self, kind: str, **fields: Any) -> bytes:
        return _event(kind, {"type": kind, "index": self._index, **fields})


def _event(kind: str, data: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _json(data))


def _message(answer_id: str, head: AnswerHead, answer: Answer) -> MessageAnswer:
    stop_reason, stop_sequence = _stop(answer)
    message = MessageAnswer(
        id=answer_id,
        model=head.model,
        content=_blocks(head, answer),
        stop_reason=stop_reason,
        stop_sequence=stop_sequence,
        usage=_usage(head, answer),
    )
    return message if answer.finish_reason is None else _with_extras(message, head, answer)


def _blocks(head: AnswerHead, answer: Answer) -> list[TextBlock | ThinkingBlock | ToolUseBlock]:
    blocks: list[TextBlock | ThinkingBlock | ToolUseBlock] = []
    if answer.reasonings:
        blocks.append(ThinkingBlock("".join(answer.reasonings), head.turn_id))
    if answer.text:
        blocks.append(TextBlock(answer.text))
    blocks += [ToolUseBlock(call.id, call.name, arguments_object(call.arguments)) for call in answer.calls]
    return blocks


def _stop(answer: Answer) -> tuple[StopReason | None, str | None]:
    """Calls come first, as in a chat: a client that is to run them looks for their reason."""
    if answer.finish_reason is None:
        return None, None
    if answer.finish_reason == "length":
        return "max_tokens", None
    if answer.calls:
        return "tool_use", None
    return ("end_turn", None) if answer.stop_reason is None else ("stop_sequence", answer.stop_reason)


def _usage(head: AnswerHead, answer: Answer) -> MessageUsage:
    return MessageUsage(sum(map(len, head.prompts)), len(answer.token_ids))


def _with_extras(message: OnRequest, head: AnswerHead, answer: Answer) -> Any:
    if head.shape.token_ids:
        message.prompt_token_ids, message.token_ids = head.prompts[0], answer.token_ids
    message.weight_versions = answer.spans if head.shape.weight_versions else UNSET
    message.laminar = provenance(head, answer)
    return message
