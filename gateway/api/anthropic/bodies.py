"""The request bodies of Anthropic's Messages API, field by field.

Invariants:
- a body decodes into these structs or is refused: an unknown field by its name, a wrong type by its path;
- a field that is not supported may have only the values that change nothing (`NEUTRAL`); any other is refused by name;
- fields that only steer caching, billing and observation at Anthropic are accepted and not read: `cache_control`,
  `citations`, `caller`, `diagnostics`, and the like. So are hints: `thinking.budget_tokens`, `output_config.effort`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gateway.api.bodies import AtLeastOne
from gateway.core.parameters import SamplingFields


class Block(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A part of a message. Which fields it needs depends on its type (`gateway.api.anthropic.conversation`)."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None  # of a thinking block; any is accepted
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)  # as it is written: numbers of any size
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    cache_control: Any = None
    citations: Any = None
    caller: Any = None
    toolset_name: str | None = None
    source: Any = None  # of an image or a document, which are refused by their type
    data: Any = None  # of redacted thinking, too


class MessageParam(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[Block]


class ToolDefinition(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    input_examples: list[Any] | None = None


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """Sets the chat template's `enable_thinking`, where it has one. Reasoning is shown in any case."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    format: OutputFormat | None = None


class _Conversation(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """The fields of both routes. The last five are ours."""

    model: str
    messages: list[MessageParam]
    system: str | list[Block] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    metadata: dict[str, Any] | None = None
    cache_control: Any = None
    diagnostics: Any = None
    container: Any = None
    context_management: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None
    service_tier: str | None = None
    speed: str | None = None
    inference_geo: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    billing_policy: Any = None
    compaction: Any = None
    fallbacks: Any = None
    fallback_credit_token: Any = None
    thread: Any = None  # refused in a way that clients know: they then send the whole history

    session_id: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    seed: int | None = None
    return_token_ids: bool | None = None
    return_weight_versions: bool | None = None


class MessagesRequest(_Conversation, forbid_unknown_fields=True, kw_only=True):
    max_tokens: AtLeastOne
    stop_sequences: list[str] | None = None
    stream: bool | None = None


class CountTokensRequest(_Conversation, forbid_unknown_fields=True, kw_only=True):
    """Of a message that may be sent next."""


KEEPS_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
"""What coding agents send as `context_management`; it removes nothing."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "container": (None,),
    "context_management": (None, {}, {"edits": []}, KEEPS_ALL),
    "mcp_servers": (None, []),
    "service_tier": (None, "auto", "standard_only"),
    "speed": (None, "standard"),
    "inference_geo": (None,),
    "user_profile_id": (None,),
    "workspace_id": (None,),
    "billing_policy": (None,),
    "compaction": (None,),
    "fallbacks": (None, []),
    "fallback_credit_token": (None,),
}
NEUTRAL_TOOL: dict[str, tuple[Any, ...]] = {
    "type": (None, "custom"),
    "defer_loading": (None, False),
    "allowed_callers": (None, ["direct"]),
    "input_examples": (None, []),
}
WHAT_TO_DO: dict[str, str] = {
    "type": "declare it with a `name` and an `input_schema`, and run it in the client",
    "context_management": "edit the history in the client",
    "mcp_servers": "connect to them in the client, and declare their tools",
}
