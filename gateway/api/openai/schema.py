"""OpenAI's responses as structs: the writer encodes them, and the served schema is made from them.

A field that is not set is left out. `token_ids`, `weight_versions` and `laminar` are there on request; with several
choices each has its own `laminar`, with one it stands at the root. Text that an engine answers itself may have more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.calls.schema import Call, Message, Provenance, Span

FinishReason = Literal["stop", "length", "tool_calls"]


class Model(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    root: str  # as vLLM has it; here the name again


class Models(msgspec.Struct):
    object: Literal["list"]
    data: Sequence[Model]


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CallPart(Call, kw_only=True):
    """A call in a stream's delta."""

    index: int


class Alternative(msgspec.Struct):
    token: str
    logprob: float
    bytes: Sequence[int]


class SampledToken(Alternative):
    top_logprobs: Sequence[Alternative]


class ChatLogprobs(msgspec.Struct):
    content: Sequence[SampledToken]
    refusal: UnsetType | None = UNSET


class CompletionLogprobs(msgspec.Struct):
    tokens: Sequence[str]
    token_logprobs: Sequence[float]
    top_logprobs: Sequence[Mapping[str, float]]
    text_offset: Sequence[int]


class Choice(msgspec.Struct, kw_only=True):
    index: int
    finish_reason: FinishReason | None
    stop_reason: str | UnsetType | None = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET
    weight_versions: Sequence[Span] | UnsetType = UNSET
    laminar: Provenance | UnsetType = UNSET


class ChatChoice(Choice, kw_only=True):
    message: Message
    logprobs: ChatLogprobs | None


class CompletionChoice(Choice, kw_only=True):
    text: str
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    logprobs: CompletionLogprobs | None


class Completed(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    usage: Usage
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    laminar: Provenance | UnsetType = UNSET


class ChatCompletion(Completed, kw_only=True):
    object: Literal["chat.completion"]
    choices: Sequence[ChatChoice]


class Completion(Completed, kw_only=True):
    object: Literal["text_completion"]
    choices: Sequence[CompletionChoice]
