"""The typed events of a streamed response.

Invariants:
- every event has the next sequence number; an item's events lie between its `added` and its `done`;
- one item is open at a time: it ends when the model goes on to another kind, or with the answer;
- the items joined are the answer's reasoning, text and calls, each in its order.

Text is the hot path: a delta is a prefix that is made once per item, the text as JSON, and its number.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.api.calls.answer import AnswerHead
from gateway.api.calls.turn_view import Answer, Piece
from gateway.api.openai.schema import SampledToken
from gateway.api.openai.writer import sampled_tokens
from gateway.api.responses.schema import (
    FunctionCallItem,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseObject,
)
from gateway.tokens import Codec, ToolCall

_json = msgspec.json.Encoder().encode

DELTAS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


def event(kind: str, number: int, **fields: Any) -> bytes:
    body = _json({"type": kind, "sequence_number": number, **fields})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), body)


class ResponseEvents:
    """Implements `gateway.api.calls.answer.ChoiceEvents`."""

    def __init__(self, codec: Codec, head: AnswerHead, response: ResponseObject) -> None:
        self._codec, self._head, self._response = codec, head, response
        self.items: list[OutputItem] = []
        self._number = 0
        self._open: OutputMessage | ReasoningItem | None = None
        self._texts: list[str] = []  # of the open item
        self._logprobs: list[SampledToken] = []  # of the open item
        self._unsent: list[SampledToken] = []  # tokens whose text is held back
        self._delta_begins = b""

    def event(self, kind: str, **fields: Any) -> bytes:
        number = self._number
        self._number += 1
        return event(kind, number, **fields)

    def first(self) -> bytes:
        return self.event("response.created", response=self._response) + self.event(
            "response.in_progress", response=self._response
        )

    def piece(self, piece: Piece) -> bytes:
        most = self._head.shape.logprobs
        if most is not None:
            self._unsent += sampled_tokens(self._codec, piece.token_ids, piece.logprobs, piece.top_logprobs, most)
        out = b""
        if piece.reasoning:
            out += self._text("reasoning", piece.reasoning)
        if piece.text:
            out += self._text("message", piece.text)
        for call in piece.calls:
            out += self._call(call)
        return out

    def last(self, answer: Answer) -> bytes:
        """The end of the open item. An answer without any text or call has an empty text."""
        out = b"" if any(item.type != "reasoning" for item in self.items) else self._text("message", "")
        return out + self._close("completed" if answer.finish_reason == "stop" else "incomplete")

    def failed(self, error: ResponseError) -> bytes:
        self._response.status, self._response.error, self._response.output = "failed", error, self.items
        return self.event("response.failed", response=self._response)

    def _text(self, kind: str, text: str) -> bytes:
        out = b""
        if self._open is None or self._open.type != kind:
            out = self._close("completed") + (self._begin_message() if kind == "message" else self._begin_reasoning())
        if not text:
            return out
        self._texts.append(text)
        if kind == "message" and self._unsent:
            sent, self._unsent = self._unsent, []
            self._logprobs += sent
            return out + self.event("response.output_text.delta", **self._at(), delta=text, logprobs=sent)
        number = self._number
        self._number += 1
        return b'%b%b%b,"sequence_number":%d}\n\n' % (out, self._delta_begins, _json(text), number)

    def _begin_message(self) -> bytes:
        self._open = OutputMessage(id=self._id("msg"), status="in_progress", content=())
        return self._added(OutputText(text=""), b',"logprobs":[]')

    def _begin_reasoning(self) -> bytes:
        self._open = ReasoningItem(id=self._id("rs"), status="in_progress", content=())
        return self._added(ReasoningText(text=""), b"")

    def _added(self, part: OutputText | ReasoningText, more: bytes) -> bytes:
        assert self._open is not None
        self.items.append(self._open)
        kind = f"{DELTAS[self._open.type]}.delta"
        head = _json({"type": kind, **self._at()})[:-1]
        self._delta_begins = b'event: %b\ndata: %b%b,"delta":' % (kind.encode(), head, more)
        return self.event("response.output_item.added", output_index=len(self.items) - 1, item=self._open) + self.event(
            "response.content_part.added", **self._at(), part=part
        )

    def _close(self, status: ItemStatus) -> bytes:
        """The end of the open item, if any."""
        item = self._open
        if item is None:
            return b""
        text, done = "".join(self._texts), f"{DELTAS[item.type]}.done"
        item.status = status
        part: OutputText | ReasoningText
        if isinstance(item, OutputMessage):
            self._logprobs += self._unsent
            part = OutputText(text=text, logprobs=self._logprobs)
            item.content = [part]
            out = self.event(done, **self._at(), text=text, logprobs=self._logprobs)
            self._unsent = []
        else:
            part = ReasoningText(text=text)
            item.content = [part]
            out = self.event(done, **self._at(), text=text)
        out += self.event("response.content_part.done", **self._at(), part=part)
        out += self.event("response.output_item.done", output_index=len(self.items) - 1, item=item)
        self._open, self._texts, self._logprobs = None, [], []
        return out

    def _call(self, call: ToolCall) -> bytes:
        """A call is shown whole, since it is parsed whole."""
        out, item_id = self._close("completed"), self._id("fc")
        item = FunctionCallItem(id=item_id, status="in_progress", call_id=call.id, name=call.name, arguments="")
        self.items.append(item)
        at = {"item_id": item_id, "output_index": len(self.items) - 1}
        out += self.event("response.output_item.added", output_index=at["output_index"], item=item)
        out += self.event("response.function_call_arguments.delta", **at, delta=call.arguments)
        out += self.event("response.function_call_arguments.done", **at, name=call.name, arguments=call.arguments)
        item.status, item.arguments = "completed", call.arguments
        return out + self.event("response.output_item.done", output_index=at["output_index"], item=item)

    def _at(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open.id, "output_index": len(self.items) - 1, "content_index": 0}

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._head.turn_id}_{len(self.items)}"
