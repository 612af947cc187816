"""The responses of the dialect: one request's deltas as chunks, or as one completion."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from gateway.engines.embedded.batching.sequence import Delta, FinishReason, GenerationRequest, Token, WeightSpan
from gateway.engines.embedded.dialect import CompletionBody
from gateway.engines.embedded.text import Text
from protos.telemetry.context import TraceContext
from protos.telemetry.spans import Attribute, Span

LOGPROB_MIN = -9999.0
"""JSON has no -inf; vLLM reports this."""


class Answer:
    """The tokens of one request; `take` returns those since the last take, in vLLM's format."""

    def __init__(self, body: CompletionBody, request: GenerationRequest, model: str, text: Text) -> None:
        self._body, self._request, self._model, self._text = body, request, model, text
        self._stream = text.stream(skip_special_tokens=body.skip_special_tokens)
        self._created = int(time.time())
        self._new_tokens: list[Token] = []
        self._new_text = ""
        self._text_length = 0
        self._spans: list[WeightSpan] = []
        self._takes = 0
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.first_token_s: float | None = None  # from the request's arrival; None before it came
        self._stop_reason: int | None = None
        self.cached_tokens = 0

    @property
    def versions(self) -> list[str]:
        """The labels of the weights that sampled it, in order."""
        return [span.version for span in self._spans]

    @property
    def due(self) -> bool:
        """Whether a chunk should be sent: with the first token, with `stream_interval` of them, and at the end."""
        if self.finish_reason is not None:
            return True
        return len(self._new_tokens) >= (self._body.stream_interval if self._takes else 1)

    def add(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            self.finish_reason, self._stop_reason = delta.finish_reason, delta.stop_reason
            self.cached_tokens = delta.cached_tokens
            if delta.token is not None:
                self._add_token(delta.token, delta.version)

    def _add_token(self, token: Token, version: str) -> None:
        self._new_tokens.append(token)
        if self._spans and self._spans[-1].version == version:
            version_start = self._spans.pop().start
        else:
            version_start = self.num_tokens
        self.num_tokens += 1
        self._spans.append(WeightSpan(version, version_start, self.num_tokens))
        if self.finish_reason != "stop" or self._body.include_stop_str_in_output:
            self._new_text += self._stream.add(token.id)

    def take(self) -> dict[str, Any]:
        """The completion object with everything new; only the last has a `finish_reason`."""
        tokens, text = self._new_tokens, self._new_text
        choice: dict[str, Any] = {
            "index": 0,
            "text": text,
            "logprobs": self._logprobs(tokens),
            "finish_reason": self.finish_reason,
            "stop_reason": self._stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = [token.id for token in tokens]
            choice["prompt_token_ids"] = None if self._takes else list(self._request.prompt_ids)
        if self._body.return_weight_versions and self.finish_reason is not None:
            choice["weight_versions"] = [{"version": s.version, "start": s.start, "end": s.end} for s in self._spans]
        self._new_tokens, self._new_text = [], ""
        self._text_length += len(text)
        self._takes += 1
        return self._object([choice])

    def usage_chunk(self) -> dict[str, Any]:
        """The stream's closing chunk when `stream_options.include_usage` was set."""
        return {**self._object([]), "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        prompt = len(self._request.prompt_ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.num_tokens,
            "total_tokens": prompt + self.num_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self._request.request_id}",
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        if self._request.params.logprobs is None:
            return None
        names = [self._name(token.id) for token in tokens]
        offset, offsets = self._text_length, []
        for name in names:
            offsets.append(offset)
            offset += len(name)
        return {
            "tokens": names,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._top(token, name) for token, name in zip(tokens, names, strict=True)],
            "text_offset": offsets,
        }

    def _top(self, token: Token, name: str) -> dict[str, float]:
        return {name: _finite(token.logprob), **{self._name(id): _finite(value) for id, value in token.top}}

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._body.return_tokens_as_token_ids else self._text.token(token_id)


def completion_span(
    trace: TraceContext, request: GenerationRequest, answer: Answer, started_unix_s: float, ended_unix_s: float
) -> Span:
    """Of a request that has ended; `trace`: the span of the gateway's segment, or a root."""
    attributes: dict[str, Attribute] = {
        "laminar.request": request.request_id,
        "laminar.outcome": answer.finish_reason or "abort",
        "laminar.prompt_tokens": len(request.prompt_ids),
        "laminar.cached_tokens": answer.cached_tokens,
        "laminar.sampled_tokens": answer.num_tokens,
        "laminar.versions": [int(label) for label in answer.versions if label.isdecimal()],  # whole numbers everywhere
    }
    if answer.first_token_s is not None:
        attributes["laminar.first_token_s"] = answer.first_token_s
    context = trace.child(f"completion {request.request_id} {started_unix_s!r}")
    return Span("completion", context, trace, started_unix_s, ended_unix_s, attributes, "server")


def _finite(logprob: float | None) -> float:
    return LOGPROB_MIN if logprob is None else max(logprob, LOGPROB_MIN)
