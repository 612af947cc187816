"""The request body of `POST /v1/responses`, field by field.

Invariants, as for the chat's body:
- a body decodes into these structs or is refused: an unknown field by its name, a wrong type by its path;
- a field that is not supported may have only the values that change nothing (`NEUTRAL`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.api.openai.bodies import Metadata, StreamOptions
from gateway.core.parameters import SamplingFields
from gateway.core.types import History

RESPONSE_ID_MAX = 128

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
"""Has no effect, and its answer says so: reasoning stands in its item as it is, and may be sent back so."""
INCLUDABLE = (LOGPROBS, ENCRYPTED)


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """The last part is of this gateway, for training clients, as in a chat's body."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: Metadata | None = None
    user: str | None = None
    prompt_cache_key: str | None = None  # as the next two: hints for a cache that sessions already have
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None  # names an end user to OpenAI; nothing here reads it

    access_programs: list[Any] | None = None
    background: bool | None = None
    context_management: list[Any] | None = None
    conversation: Any = None
    image: Any = None
    max_tool_calls: int | None = None
    moderation: Any = None
    prompt: Any = None
    service_tier: str | None = None
    truncation: str | None = None

    seed: int | None = None
    stop: str | list[str] | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    stream_interval: int | None = None
    session_id: str | None = None
    history: History | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_weight_versions: bool | None = None


SHARED = (
    *SamplingFields.__struct_fields__,
    *("model", "stream", "parallel_tool_calls", "top_logprobs", "metadata", "user", "seed", "stop", "min_tokens"),
    *("stop_token_ids", "ignore_eos", "logit_bias", "stream_interval", "session_id", "history"),
    *("chat_template_kwargs", "return_token_ids", "return_weight_versions"),
)
"""Fields that a chat's body has under the same name and with the same meaning."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "access_programs": (None, []),
    "background": (None, False),
    "context_management": (None, []),
    "conversation": (None,),
    "image": (None,),
    "max_tool_calls": (None,),
    "moderation": (None,),
    "prompt": (None,),
    "service_tier": (None, "auto", "default"),
    "truncation": (None, "disabled"),
}
NEUTRAL_REASONING: dict[str, tuple[Any, ...]] = {
    "effort": (None,),
    "summary": (None, "auto"),
    "generate_summary": (None, "auto"),
    "context": (None,),
    "mode": (None,),
}
NEUTRAL_TOOL: dict[str, tuple[Any, ...]] = {
    "allowed_callers": (None, ["direct"]),
    "async": (None, False),
    "defer_loading": (None, False),
    "output_schema": (None,),
}

WHAT_TO_DO: dict[str, str] = {
    "background": "stream the response, or send the request again: a retry joins its turn",
    "conversation": "name a session, or the previous response",
    "prompt": "send `instructions` and `input`",
    "truncation": "shorten the history yourself, or begin a new one",
    "reasoning.effort": "use `chat_template_kwargs` with what the model's template knows",
    "reasoning.summary": "reasoning stands in its item, whole",
    "reasoning.generate_summary": "reasoning stands in its item, whole",
    "text.verbosity": "say it in `instructions`",
}
