"""Writes responses and stream chunks in the format of OpenAI's API (checked with its official client).

Fields of our own or of vLLM's are added only on request. Streaming is the gateway's hot path: a chunk of plain text is
a prefix that is made once per response, the text as JSON, and a suffix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.calls.answer import AnswerHead, provenance
from gateway.api.calls.schema import CalledFunction, Provenance
from gateway.api.calls.turn_view import Answer, Piece
from gateway.api.errors import error_bytes
from gateway.api.openai.schema import (
    Alternative,
    CallPart,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FinishReason,
    SampledToken,
    Usage,
)
from gateway.core.types import TopLogprob
from gateway.tokens import Codec
from protos.errors import LaminarError

DONE = b"data: [DONE]\n\n"

_json = msgspec.json.Encoder().encode


PREFIXES = {"chat": "chatcmpl", "completion": "cmpl"}
"""Of the answers' ids."""


@dataclass(frozen=True, slots=True)
class OpenAIForm:
    """Implements `gateway.api.calls.answer.Form`, for chat and completions."""

    codec: Codec

    def answer_id(self, head: AnswerHead) -> str:
        return _answer_id(head)

    def headers(self, head: AnswerHead) -> Mapping[str, str]:
        return {}

    def body(self, head: AnswerHead, answers: Sequence[Answer]) -> bytes:
        return body(self.codec, head, answers)

    def events(self, head: AnswerHead, choice: int) -> Chunks:
        return Chunks(self.codec, head, choice)

    def stream_end(self, head: AnswerHead, answers: Sequence[Answer]) -> bytes:
        return stream_end(head, answers)

    def error_event(self, error: LaminarError) -> bytes:
        return b"data: " + error_bytes(error) + b"\n\n"


def _answer_id(head: AnswerHead) -> str:
    return f"{PREFIXES[head.api]}-{head.turn_id}"


def _fields(head: AnswerHead, kind: str) -> dict[str, Any]:
    return {"id": _answer_id(head), "object": kind, "created": head.created_unix_s, "model": head.model}


def body(codec: Codec, head: AnswerHead, answers: Sequence[Answer]) -> bytes:
    """The whole response to a request without `stream`: its choices in order."""
    origins = [provenance(head, answer) for answer in answers]
    alone = len(answers) == 1
    common: dict[str, Any] = {
        "id": _answer_id(head),
        "created": head.created_unix_s,
        "model": head.model,
        "choices": [
            _choice(codec, head, index, answer, UNSET if alone else origins[index])
            for index, answer in enumerate(answers)
        ],
        "usage": usage(head, answers),
        "prompt_token_ids": head.prompts[0] if head.shape.token_ids and len(head.prompts) == 1 else UNSET,
        "laminar": origins[0] if alone else UNSET,
    }
    if head.api == "chat":
        return _json(ChatCompletion(object="chat.completion", **common))
    return _json(Completion(object="text_completion", **common))


def _choice(
    codec: Codec, head: AnswerHead, index: int, answer: Answer, origin: Provenance | UnsetType
) -> ChatChoice | CompletionChoice:
    shape = head.shape
    common: dict[str, Any] = {
        "index": index,
        "logprobs": _logprobs(codec, head, answer.token_ids, answer.logprobs, answer.top_logprobs, 0),
        "finish_reason": finish_reason(answer),
        "stop_reason": answer.stop_reason,
        "token_ids": answer.token_ids if shape.token_ids else UNSET,
        "weight_versions": answer.spans if shape.weight_versions else UNSET,
        "laminar": origin,
    }
    if head.api == "chat":
        message = answer.message()
        message.refusal = None
        return ChatChoice(message=message, **common)
    prompt_ids = head.prompt_ids(index) if shape.token_ids else UNSET
    return CompletionChoice(text=answer.text, prompt_token_ids=prompt_ids, **common)


class Chunks:
    """The chunks of one choice of a streamed response, as server-sent events."""

    def __init__(self, codec: Codec, head: AnswerHead, index: int = 0) -> None:
        self._codec = codec
        self._head, self._index = head, index
        self._chat = head.api == "chat"
        fields = _json(_fields(head, "chat.completion.chunk" if self._chat else "text_completion"))
        self._prefix = b"data: " + fields[:-1] + b',"choices":[{"index":%d,' % index
        self._suffix = b'],"usage":null}\n\n' if head.shape.include_usage else b"]}\n\n"
        self._plain = b',"logprobs":null,"finish_reason":null}' + self._suffix
        self._text_begins = self._prefix + (b'"delta":{"content":' if self._chat else b'"text":')
        self._text_ends = (b"}" if self._chat else b"") + self._plain
        self._carries_tokens = head.shape.logprobs is not None or head.shape.token_ids
        self._calls = 0
        self._characters = 0  # of token texts so far: completions' text_offset

    def first(self) -> bytes:
        """Before any text: the role, and the prompt's ids on request. Empty if there is neither."""
        ids = b""
        if self._head.shape.token_ids:
            ids = b',"prompt_token_ids":' + _json(self._head.prompt_ids(self._index))
        if not self._chat and not ids:
            return b""
        empty = b'"delta":{"role":"assistant","content":"","refusal":null}' if self._chat else b'"text":""' + ids
        at_root = ids if len(self._head.prompts) == 1 else b""
        return self._prefix + empty + self._plain[: -len(self._suffix)] + b"]" + at_root + self._suffix[1:]

    def piece(self, piece: Piece) -> bytes:
        """One or more chunks; empty when the piece shows nothing that was requested."""
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
        origin = provenance(self._head, answer)
        root = b"" if origin is UNSET else b',"laminar":' + _json(origin)
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
                CallPart(call.id, "function", CalledFunction(call.name, call.arguments), index=index)
                for index, call in enumerate(piece.calls, self._calls)
            ]
            self._calls += len(piece.calls)
        return delta


def stream_end(head: AnswerHead, answers: Sequence[Answer]) -> bytes:
    """After the last choice's finish: the usage on request, and the end mark."""
    if not head.shape.include_usage:
        return DONE
    fields = _fields(head, "chat.completion.chunk" if head.api == "chat" else "text_completion")
    return b"data: " + _json({**fields, "choices": [], "usage": usage(head, answers)}) + b"\n\n" + DONE


def finish_reason(answer: Answer) -> FinishReason | None:
    return "tool_calls" if answer.calls and answer.finish_reason == "stop" else answer.finish_reason


def usage(head: AnswerHead, answers: Sequence[Answer]) -> Usage:
    """A prompt counts once, however many choices it has."""
    prompt, completion = sum(map(len, head.prompts)), sum(len(answer.token_ids) for answer in answers)
    return Usage(prompt, completion, prompt + completion)


def token_text(codec: Codec, token_id: int) -> str:
    return codec.token_bytes(token_id).decode("utf-8", "replace")


def _logprobs(
    codec: Codec,
    head: AnswerHead,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    top: Sequence[Sequence[TopLogprob]] | None,
    offset: int,
) -> ChatLogprobs | CompletionLogprobs | None:
    """`offset`: characters of token texts before these, for completions' `text_offset`."""
    if head.shape.logprobs is None:
        return None
    if head.api == "chat":
        return ChatLogprobs(sampled_tokens(codec, token_ids, logprobs, top, head.shape.logprobs), None)
    rows = _sorted_rows(top, len(token_ids))
    texts = [token_text(codec, token_id) for token_id in token_ids]
    offsets = [offset]
    for text in texts[:-1]:
        offsets.append(offsets[-1] + len(text))
    alternatives = [
        {**{token_text(codec, t.token_id): t.logprob for t in row}, text: logprob}  # the sampled token is always there
        for text, logprob, row in zip(texts, logprobs, rows, strict=True)
    ]
    return CompletionLogprobs(texts, list(logprobs), alternatives, offsets[: len(texts)])


def sampled_tokens(
    codec: Codec,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    top: Sequence[Sequence[TopLogprob]] | None,
    most: int,
) -> list[SampledToken]:
    """Tokens with their logprobs and at most `most` alternatives each."""
    return [
        SampledToken(
            *_token(codec, token_id, logprob),
            [Alternative(*_token(codec, t.token_id, t.logprob)) for t in row[:most]],
        )
        for token_id, logprob, row in zip(token_ids, logprobs, _sorted_rows(top, len(token_ids)), strict=True)
    ]


def _sorted_rows(top: Sequence[Sequence[TopLogprob]] | None, length: int) -> list[list[TopLogprob]]:
    return [sorted(row, key=lambda t: -t.logprob) for row in top] if top else [[]] * length


def _token(codec: Codec, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
    """Fields of an `Alternative`. JSON has no infinity: clients take -9999 for one."""
    raw = codec.token_bytes(token_id)
    return raw.decode("utf-8", "replace"), max(logprob, -9999.0), list(raw)
