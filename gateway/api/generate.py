"""`POST /inference/v1/generate`, vLLM's route of token ids in and out, as the train client of verifiers uses it.

A session's next prompt extends its record where it begins with the record's ids, as a completion's of token ids does.
Tokens are named "token_id:N". `cache_salt` and `priority` are accepted and have no effect: an engine's cache holds one
version, and priorities are sessions'. Without `max_tokens` an answer may take what the context has left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from gateway.api.bodies import EXACT_MAX, decode, within
from gateway.api.calls.answer import AnswerHead, provenance
from gateway.api.calls.schema import Provenance, Span
from gateway.api.calls.service import Calls, ParsedRequest
from gateway.api.calls.turn_view import Answer, Piece
from gateway.api.errors import BadField, RefusedField, error_bytes
from gateway.api.openai.bodies import CompletionRequest, StructuredOutputs
from gateway.api.openai.parser import Parser
from gateway.api.openai.routes import PREFIXES
from gateway.core.parameters import SamplingFields
from gateway.core.types import FinishReason, TopLogprob
from protos.errors import LaminarError

PATH = "/inference/v1/generate"
DONE = b"data: [DONE]\n\n"


class GenerateSampling(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """vLLM's `SamplingParams`. `logprobs`: 0 and 1 give those of the sampled tokens, more also alternatives."""

    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    structured_outputs: StructuredOutputs | None = None
    skip_special_tokens: bool = True
    detokenize: bool | None = None  # answers are token ids in any case

    # accepted where they change nothing (`NEUTRAL`):
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool | None = None
    spaces_between_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    routed_experts_prompt_start: int | None = None


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "prompt_logprobs": (None,),
    "include_stop_str_in_output": (None, False),
    "spaces_between_special_tokens": (None, True),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "truncate_prompt_tokens": (None,),
    "routed_experts_prompt_start": (None,),
}
"""Of the sampling parameters: all other values are refused by name."""
SHARED = tuple(
    name
    for name in GenerateSampling.__struct_fields__
    if name not in NEUTRAL and name not in ("detokenize", "logprobs", "max_tokens")
)
"""Sampling parameters that a completion has under the same name."""


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str
    token_ids: list[int]
    sampling_params: GenerateSampling = msgspec.field(default_factory=GenerateSampling)
    stream: bool | None = None
    session_id: str | None = None
    metadata: dict[str, Any] | None = None
    return_weight_versions: bool = False
    request_id: str | None = None  # answers here have their own
    cache_salt: str | None = None
    priority: int | None = None


class TokenLogprob(msgspec.Struct):
    """`token`: "token_id:N"."""

    token: str
    logprob: float


class SampledTokenId(TokenLogprob):
    top_logprobs: Sequence[TokenLogprob]


class TokenLogprobs(msgspec.Struct):
    content: Sequence[SampledTokenId]


class GeneratedChoice(msgspec.Struct, kw_only=True):
    index: int
    token_ids: Sequence[int]
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None
    weight_versions: Sequence[Span] | UnsetType = UNSET
    laminar: Provenance | UnsetType = UNSET


class Generated(msgspec.Struct, kw_only=True):
    """Also each chunk of a stream, whose choices have the tokens that it adds."""

    request_id: str
    model: str
    choices: Sequence[GeneratedChoice]


_decoder = msgspec.json.Decoder(GenerateRequest)
_json = msgspec.json.Encoder().encode


def add_generate_route(app: web.Application, calls: Calls) -> None:
    parser = Parser(calls.turns, calls.codec)

    async def generate(request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        return await calls.answer(request, raw, await within(request, raw, lambda: parse(raw)))

    def parse(raw: bytes) -> ParsedRequest:
        body = completion_of(decode_generate(raw, calls.codec.vocab_size))
        return parser.completion(body, len(raw), api="generate", form=GenerateForm())

    for prefix in PREFIXES:
        app.router.add_post(prefix + PATH, generate)


def decode_generate(raw: bytes, vocab_size: int) -> GenerateRequest:
    body = decode(_decoder, raw, unchecked=frozenset({"token_ids"}))
    if not body.token_ids:
        raise BadField("token_ids", "the prompt is empty: it has no tokens", hint="send at least one token id")
    for token_id in (min(body.token_ids), max(body.token_ids)):
        if not 0 <= token_id < vocab_size:
            hint = f"ids are 0 to {vocab_size - 1}"
            raise BadField("token_ids", f"token id {token_id} is not in the vocabulary", hint=hint)
    for name, allowed in NEUTRAL.items():
        if (value := getattr(body.sampling_params, name)) not in allowed:
            field = f"sampling_params.{name}"
            raise RefusedField(field, f"`{field}`={value!r} is not supported", hint="leave it out")
    return body


def completion_of(body: GenerateRequest) -> CompletionRequest:
    """The same request as a completion of token ids."""
    wanted = body.sampling_params
    return CompletionRequest(
        model=body.model,
        prompt=body.token_ids,
        stream=body.stream,
        session_id=body.session_id,
        metadata=body.metadata,
        return_weight_versions=body.return_weight_versions,
        max_tokens=EXACT_MAX if wanted.max_tokens is None else wanted.max_tokens,
        logprobs=0 if wanted.logprobs == 1 else wanted.logprobs,
        **{name: getattr(wanted, name) for name in SHARED},
    )


@dataclass(frozen=True, slots=True)
class GenerateForm:
    """Implements `gateway.api.calls.answer.Form`."""

    def answer_id(self, head: AnswerHead) -> str:
        return f"generate-{head.turn_id}"

    def headers(self, head: AnswerHead) -> Mapping[str, str]:
        return {}

    def body(self, head: AnswerHead, answers: Sequence[Answer]) -> bytes:
        choices = [
            GeneratedChoice(
                index=index,
                token_ids=answer.token_ids,
                finish_reason=answer.finish_reason,
                logprobs=_logprobs(head, answer.token_ids, answer.logprobs, answer.top_logprobs),
                weight_versions=answer.spans if head.shape.weight_versions else UNSET,
                laminar=provenance(head, answer),
            )
            for index, answer in enumerate(answers)
        ]
        return _json(Generated(request_id=self.answer_id(head), model=head.model, choices=choices))

    def events(self, head: AnswerHead, choice: int) -> GenerateEvents:
        return GenerateEvents(self.answer_id(head), head, choice)

    def stream_end(self, head: AnswerHead, answers: Sequence[Answer]) -> bytes:
        return DONE

    def error_event(self, error: LaminarError) -> bytes:
        return b"data: " + error_bytes(error) + b"\n\n"


@dataclass(frozen=True, slots=True)
class GenerateEvents:
    """The chunks of one choice of a streamed response."""

    answer_id: str
    head: AnswerHead
    index: int

    def first(self) -> bytes:
        return b""

    def piece(self, piece: Piece) -> bytes:
        if not piece.token_ids:
            return b""
        logprobs = _logprobs(self.head, piece.token_ids, piece.logprobs, piece.top_logprobs)
        return self._event(
            GeneratedChoice(index=self.index, token_ids=piece.token_ids, finish_reason=None, logprobs=logprobs)
        )

    def last(self, answer: Answer) -> bytes:
        return self._event(
            GeneratedChoice(
                index=self.index,
                token_ids=(),
                finish_reason=answer.finish_reason,
                logprobs=None,
                weight_versions=answer.spans if self.head.shape.weight_versions else UNSET,
                laminar=provenance(self.head, answer),
            )
        )

    def _event(self, choice: GeneratedChoice) -> bytes:
        return (
            b"data: " + _json(Generated(request_id=self.answer_id, model=self.head.model, choices=[choice])) + b"\n\n"
        )


def _logprobs(
    head: AnswerHead,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    top: Sequence[Sequence[TopLogprob]] | None,
) -> TokenLogprobs | None:
    wanted = head.shape.logprobs
    if wanted is None:
        return None
    rows = [sorted(row, key=lambda t: -t.logprob) for row in top] if top else [[]] * len(token_ids)
    return TokenLogprobs(
        [
            SampledTokenId(
                *_token(token_id, logprob), [TokenLogprob(*_token(t.token_id, t.logprob)) for t in row[:wanted]]
            )
            for token_id, logprob, row in zip(token_ids, logprobs, rows, strict=True)
        ]
    )


def _token(token_id: int, logprob: float) -> tuple[str, float]:
    """JSON has no infinity: clients take -9999 for one."""
    return f"token_id:{token_id}", max(logprob, -9999.0)
