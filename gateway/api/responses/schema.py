"""OpenAI's response object, its items and its usage as structs: the writer encodes them, and the served schema is made
from them. `laminar`, `prompt_token_ids`, `token_ids` and `weight_versions` are there on request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.calls.schema import Provenance, Span
from gateway.api.openai.schema import SampledToken

Status = Literal["in_progress", "completed", "incomplete", "failed"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, kw_only=True):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: Sequence[Any] = ()
    logprobs: Sequence[SampledToken] = ()


class ReasoningText(msgspec.Struct, kw_only=True):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputMessage(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: Sequence[OutputText]


class ReasoningItem(msgspec.Struct, kw_only=True):
    """The reasoning as the model wrote it. There is no summary of it."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: ItemStatus
    summary: Sequence[Any] = ()
    content: Sequence[ReasoningText]


class FunctionCallItem(msgspec.Struct, kw_only=True):
    """`arguments` is JSON text."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputItems(msgspec.Struct, kw_only=True):
    """What a response was answered to: messages, calls and their outputs, of its whole conversation."""

    object: Literal["list"] = "list"
    data: Sequence[Any]
    has_more: bool
    first_id: str | None
    last_id: str | None


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """What an engine had cached is not reported by it for each request, so it is 0 here."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens_details: OutputTokensDetails


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class ResponseError(msgspec.Struct):
    code: str
    message: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response. Of one that is read back later, only what its session's record has is set."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: Sequence[Any] = ()  # of `OutputItem`, told apart by `type`
    usage: ResponseUsage | None = None
    previous_response_id: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    temperature: float | None = None
    top_p: float | None = None
    tool_choice: Any = "auto"
    tools: Sequence[Any] = ()
    text: Any = None
    reasoning: Any = None
    top_logprobs: int | None = None
    truncation: Literal["disabled"] = "disabled"
    background: bool = False
    store: bool = True
    user: str | None = None
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET
    weight_versions: Sequence[Span] | UnsetType = UNSET
    laminar: Provenance | UnsetType = UNSET
