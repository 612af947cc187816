"""The request bodies of the OpenAI endpoints, field by field.

Invariants:
- a body decodes into these structs or is refused: an unknown field by its name, a wrong type by its path;
- a field of OpenAI's API that is not supported may have only the values that change nothing (`NEUTRAL_CHAT`,
  `NEUTRAL_COMPLETION`); any other value is refused by name.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.core.parameters import SamplingFields
from gateway.core.types import History

Metadata = dict[str, Any]


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    arguments: str | dict[str, Any] = ""
    parsed_arguments: Any = None  # the official client's parsing helpers add it to an answer, and send it back


class MessageToolCall(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    function: FunctionCall
    id: str | None = None
    type: str = "function"
    index: int | None = None  # a remnant of streamed deltas that a client joined


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A message of a client, perhaps an answer's that it sends back. A null means the same as no field."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None
    parsed: Any = None  # as `parsed_arguments`


class FunctionSpec(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    function: FunctionSpec


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's field, of which one is set. `json`: a schema; `regex`: in the dialect of the engines."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None


class _Common(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """The fields of both endpoints. The second half is ours or vLLM's, for training clients."""

    model: str
    max_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = None
    user: str | None = None
    logit_bias: dict[str, float] | None = None

    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: dict[str, Any] | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    session_id: str | None = None
    metadata: Metadata | None = None
    request_id: str | None = None  # vLLM's name for a request; answers here have their own
    stream_interval: int | None = None

    # vLLM's, accepted where they change nothing (`NEUTRAL`):
    prompt_logprobs: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    include_stop_str_in_output: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    thinking_token_budget: int | None = None
    priority: int | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    logits_processors: list[Any] | None = None


class ChatRequest(_Common, forbid_unknown_fields=True, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    separate_reasoning: bool | None = (
        None  # not false: reasoning stands in `reasoning_content`; else in the content, with its tags
    )
    history: History | None = None  # for this turn, instead of the session's
    add_generation_prompt: bool | None = None  # None: unless the last message is to be continued
    continue_final_message: bool | None = None  # the answer continues the last message, an assistant's
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    store: bool | None = None
    service_tier: str | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None
    moderation: Any = None
    add_special_tokens: bool | None = None
    prompt_cache_options: Any = None  # as the next two: hints for a cache that sessions already have
    prompt_cache_retention: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None  # names an end user to OpenAI; nothing here reads it
    echo: bool | None = None
    include_reasoning: bool | None = None
    documents: list[Any] | None = None
    chat_template: str | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    return_prompt_text: bool | None = None


class CompletionRequest(_Common, forbid_unknown_fields=True, kw_only=True):
    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None  # not false: the tokenizer's are added to a text
    prompt_embeds: Any = None


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "prompt_logprobs": (None,),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1.0),
    "include_stop_str_in_output": (None, False),
    "spaces_between_special_tokens": (None, True),
    "truncate_prompt_tokens": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "thinking_token_budget": (None, -1),
    "priority": (None, 0),
    "return_tokens_as_token_ids": (None, False),
    "cache_salt": (None,),
    "kv_transfer_params": (None, {}),
    "vllm_xargs": (None, {}),
    "logits_processors": (None, []),
}
NEUTRAL_CHAT: dict[str, tuple[Any, ...]] = {
    **_NEUTRAL,
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
    "reasoning_effort": (None,),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    "moderation": (None,),
    "add_special_tokens": (None, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "echo": (None, False),
    "include_reasoning": (None, True),
    "documents": (None, []),
    "chat_template": (None,),
    "mm_processor_kwargs": (None, {}),
    "return_prompt_text": (None, False),
}
NEUTRAL_COMPLETION: dict[str, tuple[Any, ...]] = {
    **_NEUTRAL,
    "echo": (None, False),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "prompt_embeds": (None,),
}

WHAT_TO_DO: dict[str, str] = {
    "best_of": "request `n` answers and choose yourself",
    "functions": "use `tools`",
    "function_call": "use `tool_choice`",
    "priority": "make the session with a `priority`",
    "chat_template": "the model's own is used, with the request's `chat_template_kwargs`",
    "include_reasoning": "reasoning stands in `reasoning_content`, which may be left unread",
    "return_tokens_as_token_ids": "use `return_token_ids`",
    "reasoning_effort": "use `chat_template_kwargs` with what the model's template knows",
    "echo": "prepend the prompt yourself, or set `return_token_ids`",
}
