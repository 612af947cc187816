"""Anthropic's responses and stream events as structs. A field that is not set is left out; those of `OnRequest` are
ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.calls.schema import Provenance, Span

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(msgspec.Struct, tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    """`signature`: not empty, because clients drop blocks without one; nothing reads it."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    """`input`: the arguments; an object, unless the model wrote something else."""

    id: str
    name: str
    input: Any


class MessageUsage(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class OnRequest(msgspec.Struct, kw_only=True):
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET
    weight_versions: Sequence[Span] | UnsetType = UNSET
    laminar: Provenance | UnsetType = UNSET


class MessageAnswer(OnRequest, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: Sequence[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    input_tokens: int


class StopDelta(msgspec.Struct):
    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDelta(OnRequest, kw_only=True):
    """The event that ends a streamed message's content."""

    type: Literal["message_delta"] = "message_delta"
    delta: StopDelta
    usage: MessageUsage
