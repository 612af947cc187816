"""Answers and stream chunks, to the letter of OpenAI's API (checked with its official client), plus what was asked for.

The streaming side is the gateway's hot path: a chunk of plain text is a prefix made once per answer, the text as JSON,
and a suffix. Extra fields (ours or vLLM's) appear only when the request asked for them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from gateway.api.openai.requests import AnswerShape
from gateway.api.openai.turn_view import Answer, Piece, tool_call_body
from gateway.core.types import TopLogprob
from gateway.tokens import Codec

Api = Literal["chat", "completion"]

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""An SSE comment: every client skips it, and proxies see a living connection."""

_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every chunk of an answer, or the one body, begins with."""

    api: Api
    turn_id: str
    session_id: str
    model: str
    shape: AnswerShape
    prompts: Sequence[Sequence[int]]
    history: str
    created_unix_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def answer_id(self) -> str:
        return f"{'chatcmpl' if self.api == 'chat' else 'cmpl'}-{self.turn_id}"

    def prompt_ids(self, choice: int) -> Sequence[int]:
        """Of a batch each prompt has as many choices."""
        return self.prompts[choice * len(self.prompts) // self.shape.choices]

    def fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.answer_id, "object": kind, "created": self.created_unix_s, "model": self.model}


def body(codec: Codec, head: AnswerHead, answers: Sequence[Answer]) -> bytes:
    """The whole answer of a request without `stream`: its choices in order."""
    shape = head.shape
    out = head.fields("chat.completion" if head.api == "chat" else "text_completion")
    out["choices"] = [_choice(codec, head, index, answer) for index, answer in enumerate(answers)]
    out["usage"] = usage(head, answers)
    if shape.token_ids and len(head.prompts) == 1:
        out["prompt_token_ids"] = head.prompts[0]
    told = [laminar(head, answer) for answer in answers]
    if len(told) == 1:
        out |= told[0]
    else:
        for choice, how in zip(out["choices"], told, strict=True):
            choice |= how
    return _json(out)


def _choice(codec: Codec, head: AnswerHead, index: int, answer: Answer) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index}
    if head.api == "chat":
        choice["message"] = {**answer.message(), "refusal": None}
    else:
        choice["text"] = answer.text
        if head.shape.token_ids:
            choice["prompt_token_ids"] = head.prompt_ids(index)
    choice["logprobs"] = _logprobs(codec, head, answer.token_ids, answer.logprobs, answer.top_logprobs, 0)
    choice["finish_reason"] = finish_reason(answer)
    choice["stop_reason"] = answer.stop_reason
    if head.shape.token_ids:
        choice["token_ids"] = answer.token_ids
    if head.shape.weight_versions:
        choice["weight_versions"] = answer.spans
    return choice


class Chunks:
    """The chunks of one choice of a streamed answer, as SSE events."""

    def __init__(self, codec: Codec, head: AnswerHead, index: int = 0) -> None:
        self._codec = codec
        self._head, self._index = head, index
        self._chat = head.api == "chat"
        fields = _json(head.fields("chat.completion.chunk" if self._chat else "text_completion"))
        self._prefix = b"data: " + fields[:-1] + b',"choices":[{"index":%d,' % index
        self._suffix = b'],"usage":null}\n\n' if head.shape.include_usage else b"]}\n\n"
        self._plain = b',"logprobs":null,"finish_reason":null}' + self._suffix
        self._text_begins = self._prefix + (b'"delta":{"content":' if self._chat else b'"text":')
        self._text_ends = (b"}" if self._chat else b"") + self._plain
        self._carries_tokens = head.shape.logprobs is not None or head.shape.token_ids
        self._calls = 0
        self._characters = 0  # of token texts so far: completions' text_offset

    def first(self) -> bytes:
        """Before any text: the role, and the prompt's ids if asked for. Empty if there is nothing to say."""
        ids = b""
        if self._head.shape.token_ids:
            ids = b',"prompt_token_ids":' + _json(self._head.prompt_ids(self._index))
        if not self._chat and not ids:
            return b""
        said = b'"delta":{"role":"assistant","content":"","refusal":null}' if self._chat else b'"text":""' + ids
        at_root = ids if len(self._head.prompts) == 1 else b""
        return self._prefix + said + self._plain[: -len(self._suffix)] + b"]" + at_root + self._suffix[1:]

    def piece(self, piece: Piece) -> bytes:
        """One or more chunks; empty when the piece shows nothing that was asked for."""
        if not self._carries_tokens and not piece.calls and not piece.reasoning:
            return b"".join((self._text_begins, _json(piece.text), self._text_ends)) if piece.text else b""
        return self._full_piece(piece)

    def last(self, answer: Answer) -> bytes:
        """The choice's finish."""
        shape = self._head.shape
        choice: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        choice |= {"logprobs": None, "finish_reason": finish_reason(answer), "stop_reason": answer.stop_reason}
        if shape.token_ids:
            choice["token_ids"] = []
        if shape.weight_versions:
            choice["weight_versions"] = answer.spans
        told = laminar(self._head, answer)
        root = b"," + _json(told)[1:-1] if told else b""
        return self._prefix + _json(choice)[1:] + b"]" + root + self._suffix[1:]

    def _full_piece(self, piece: Piece) -> bytes:
        choice: dict[str, Any] = {"delta": self._delta(piece)} if self._chat else {"text": piece.text}
        choice["logprobs"] = _logprobs(
            self._codec, self._head, piece.token_ids, piece.logprobs, piece.top_logprobs, self._characters
        )
        choice["finish_reason"] = None
        if self._head.shape.token_ids:
            choice["token_ids"] = piece.token_ids
        if not self._chat and self._head.shape.logprobs is not None:
            self._characters += sum(len(token_text(self._codec, token_id)) for token_id in piece.token_ids)
        return self._prefix + _json(choice)[1:] + self._suffix

    def _delta(self, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.calls:
            delta["tool_calls"] = [
                {"index": index, **tool_call_body(call)} for index, call in enumerate(piece.calls, self._calls)
            ]
            self._calls += len(piece.calls)
        return delta


def stream_end(head: AnswerHead, answers: Sequence[Answer]) -> bytes:
    """After the last choice's finish: the usage if asked for, and the end mark."""
    if not head.shape.include_usage:
        return DONE
    fields = head.fields("chat.completion.chunk" if head.api == "chat" else "text_completion")
    return b"data: " + _json({**fields, "choices": [], "usage": usage(head, answers)}) + b"\n\n" + DONE


def finish_reason(answer: Answer) -> str | None:
    return "tool_calls" if answer.calls and answer.finish_reason == "stop" else answer.finish_reason


def usage(head: AnswerHead, answers: Sequence[Answer]) -> dict[str, int]:
    """A prompt counts once, however many choices it has."""
    prompt, completion = sum(map(len, head.prompts)), sum(len(answer.token_ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def laminar(head: AnswerHead, answer: Answer) -> dict[str, Any]:
    """How the answer came about: when asked for, and in any case when its session's version was lost meanwhile."""
    if not (head.shape.token_ids or head.shape.weight_versions or answer.version_changes):
        return {}
    told = {
        "session_id": head.session_id,
        "history": head.history,
        "moves": sum(segment.cause == "move" for segment in answer.segments),
        "segments": answer.segments,
        "version_changes": answer.version_changes,
    }
    return {"laminar": told}


def token_text(codec: Codec, token_id: int) -> str:
    return codec.token_bytes(token_id).decode("utf-8", "replace")


def _logprobs(
    codec: Codec,
    head: AnswerHead,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    top: Sequence[Sequence[TopLogprob]] | None,
    offset: int,
) -> dict[str, Any] | None:
    if head.shape.logprobs is None:
        return None
    alternatives = [sorted(row, key=lambda t: -t.logprob) for row in top] if top else [[]] * len(token_ids)
    if head.api == "chat":
        content = [
            {
                **_chat_token(codec, token_id, logprob),
                "top_logprobs": [_chat_token(codec, t.token_id, t.logprob) for t in row[: head.shape.logprobs]],
            }
            for token_id, logprob, row in zip(token_ids, logprobs, alternatives, strict=True)
        ]
        return {"content": content, "refusal": None}
    texts = [token_text(codec, token_id) for token_id in token_ids]
    offsets = [offset]
    for text in texts[:-1]:
        offsets.append(offsets[-1] + len(text))
    return {
        "tokens": texts,
        "token_logprobs": list(logprobs),
        "top_logprobs": [
            {**{token_text(codec, t.token_id): t.logprob for t in row}, text: logprob}  # the sampled one is always told
            for text, logprob, row in zip(texts, logprobs, alternatives, strict=True)
        ],
        "text_offset": offsets[: len(texts)],
    }


def _chat_token(codec: Codec, token_id: int, logprob: float) -> dict[str, Any]:
    raw = codec.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0), "bytes": list(raw)}
