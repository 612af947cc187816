"""Anthropic's request as a chat's: the same conversation in the words of the record. Pure.

A message's blocks become chat messages: `tool_result` blocks are messages of role "tool", in their place among the
texts. An assistant's texts are joined as they stand, since an answer's text is one in the record, however many blocks
it was shown in; other texts are joined by line ends, as parts of a chat message are. So what a client sends back of an
answer (its text, thinking and calls) is equal to the recorded message, and the next turn extends the record.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from gateway.api.anthropic.bodies import (
    NEUTRAL,
    NEUTRAL_TOOL,
    WHAT_TO_DO,
    Block,
    CountTokensRequest,
    MessageParam,
    MessagesRequest,
    ToolChoice,
    ToolDefinition,
)
from gateway.api.errors import BadField, RefusedField
from gateway.api.openai.bodies import ChatMessage, ChatRequest, FunctionCall, FunctionSpec, MessageToolCall, Tool
from gateway.core.parameters import PARAMETERS
from gateway.tokens.values import NotJson, parse

ROLES = ("user", "assistant", "system")
BILLING = "x-anthropic-billing-header:"
"""Begins a system block by which Claude Code accounts for a request: it changes with each, and is not part of the
prompt, which could otherwise never extend the record."""
NEEDED = {
    "text": ("text",),
    "thinking": ("thinking",),
    "tool_use": ("id", "name"),
    "tool_result": ("tool_use_id",),
}
"""Types of blocks, with the fields that each must have."""
ALLOWED = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use"), "system": ("text",)}


class NoThreads(RefusedField):
    """A `thread`, whose conversation the server would hold. `details` is the form in which Anthropic refuses one: its
    clients go on with the whole history in each request."""

    details: ClassVar = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def chat_of(body: MessagesRequest | CountTokensRequest, *, switches_thinking: bool) -> ChatRequest:
    """`switches_thinking`: the model's chat template has `enable_thinking`."""
    for name, allowed in NEUTRAL.items():
        _check_neutral(name, getattr(body, name), allowed, name)
    if body.thread is not None:
        raise NoThreads("thread", "`thread` is not supported", hint="send the whole history: sessions keep it")
    if not body.messages:
        raise BadField("messages", "`messages` is empty", hint="send at least one message")
    messages = list(_system(body.system))
    for index, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{index}]")
    chat = ChatRequest(
        model=body.model,
        messages=messages,
        tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())] or None,
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=_parallel(body.tool_choice),
        chat_template_kwargs=_template_kwargs(body, switches_thinking),
        response_format=_response_format(body),
        metadata=body.metadata,
        user=_user(body),
        session_id=body.session_id,
        seed=body.seed,
        return_token_ids=body.return_token_ids,
        return_weight_versions=body.return_weight_versions,
        continue_final_message=_prefills(body.messages),
        **{parameter.name: getattr(body, parameter.name) for parameter in PARAMETERS},
    )
    if isinstance(body, MessagesRequest):
        chat.max_tokens, chat.stop, chat.stream = body.max_tokens, body.stop_sequences, body.stream
    return chat


def _check_neutral(path: str, value: Any, allowed: Sequence[Any], name: str) -> None:
    if value not in allowed:
        raise RefusedField(path, f"`{path}`={value!r:.200} is not supported", hint=WHAT_TO_DO.get(name, "leave it out"))


def _system(system: str | list[Block] | None) -> Iterable[ChatMessage]:
    if isinstance(system, list):
        _check_blocks(system, "system", ALLOWED["system"])
        system = "\n".join(block.text or "" for block in system if not (block.text or "").startswith(BILLING))
    if system:
        yield ChatMessage("system", system)


def _messages(message: MessageParam, path: str) -> Iterable[ChatMessage]:
    if message.role not in ROLES:
        raise BadField(f"{path}.role", f"unknown role {message.role!r}", hint=f"one of {', '.join(ROLES)}")
    if isinstance(message.content, str):
        return [ChatMessage(message.role, message.content)]
    _check_blocks(message.content, f"{path}.content", ALLOWED[message.role])
    if message.role == "assistant":
        return [_assistant(message.content, f"{path}.content")]
    if not message.content:
        raise BadField(f"{path}.content", f"a {message.role} message needs content")
    return _user_messages(message.role, message.content, f"{path}.content")


def _check_blocks(blocks: Sequence[Block], path: str, allowed: Sequence[str]) -> None:
    for index, block in enumerate(blocks):
        if block.type not in allowed:
            raise RefusedField(
                f"{path}[{index}].type",
                f"`{path}[{index}]`: a block of type {block.type!r} is not supported there",
                hint=f"one of {', '.join(allowed)}",
            )
        if block.source is not None or block.data is not None:
            raise RefusedField(f"{path}[{index}]", f"`{path}[{index}]`: a {block.type} block has no `source` or `data`")
        for name in NEEDED[block.type]:
            if getattr(block, name) is None:
                raise BadField(
                    f"{path}[{index}].{name}", f"`{path}[{index}]`: a {block.type} block needs a string `{name}`"
                )


def _assistant(blocks: Sequence[Block], path: str) -> ChatMessage:
    return ChatMessage(
        "assistant",
        "".join(block.text or "" for block in blocks if block.type == "text"),
        tool_calls=[_call(block, f"{path}[{index}]") for index, block in enumerate(blocks) if block.type == "tool_use"]
        or None,
        reasoning_content="".join(block.thinking or "" for block in blocks if block.type == "thinking") or None,
    )


def _call(block: Block, path: str) -> MessageToolCall:
    """A model may have written arguments that are no object: they are sent back as they were shown."""
    text = bytes(block.input).decode()
    try:
        shown = parse(text) if text else None
    except NotJson as e:
        raise BadField(f"{path}.input", f"`{path}.input`: {e}") from e
    arguments = shown if isinstance(shown, str) else "" if shown is None else text
    return MessageToolCall(FunctionCall(block.name or "", arguments), block.id)


def _user_messages(role: str, blocks: Sequence[Block], path: str) -> Iterable[ChatMessage]:
    texts: list[str] = []
    for index, block in enumerate(blocks):
        if block.type == "text":
            texts.append(block.text or "")
            continue
        if texts:
            yield ChatMessage(role, "\n".join(texts))
            texts = []
        yield ChatMessage("tool", _result(block, f"{path}[{index}].content"), tool_call_id=block.tool_use_id)
    if texts:
        yield ChatMessage(role, "\n".join(texts))


def _result(block: Block, path: str) -> str:
    """A result's text. That it is an error stands in its text, in Anthropic's API as here; an empty one would say
    nothing."""
    content = block.content or ""
    if not isinstance(content, str):
        _check_blocks(content, path, ("text",))
        content = "\n".join(part.text or "" for part in content)
    return content or ("error" if block.is_error else "")


def _prefills(messages: Sequence[MessageParam]) -> bool:
    """Whether the answer continues the last message."""
    if not messages or messages[-1].role != "assistant":
        return False
    content = messages[-1].content
    if not content or (not isinstance(content, str) and any(block.type != "text" for block in content)):
        raise BadField(
            f"messages[{len(messages) - 1}]",
            "the last message is not an assistant's text that can be continued",
            hint="end with a user message, or with the beginning of the answer as text",
        )
    return True


def _tool(tool: ToolDefinition, path: str) -> Tool:
    for name, allowed in NEUTRAL_TOOL.items():
        _check_neutral(f"{path}.{name}", getattr(tool, name), allowed, name)
    if tool.input_schema is None:
        raise BadField(f"{path}.input_schema", f"`{path}` needs an `input_schema`")
    return Tool("function", FunctionSpec(tool.name, tool.description, tool.input_schema, tool.strict))


def _tool_choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    if choice.name is None:
        raise BadField("tool_choice.name", "a `tool_choice` of type 'tool' needs the tool's `name`")
    return {"type": "function", "function": {"name": choice.name}}


def _parallel(choice: ToolChoice | None) -> bool | None:
    return False if choice is not None and choice.disable_parallel_tool_use else None


def _template_kwargs(body: MessagesRequest | CountTokensRequest, switches_thinking: bool) -> dict[str, Any] | None:
    if body.thinking is None or not switches_thinking:
        return body.chat_template_kwargs
    return {"enable_thinking": body.thinking.type != "disabled", **(body.chat_template_kwargs or {})}


def _response_format(body: MessagesRequest | CountTokensRequest) -> dict[str, Any] | None:
    wanted = None if body.output_config is None else body.output_config.format
    return None if wanted is None else {"type": "json_schema", "json_schema": {"schema": wanted.schema}}


def _user(body: MessagesRequest | CountTokensRequest) -> str | None:
    user = (body.metadata or {}).get("user_id")
    if user is not None and not isinstance(user, str):
        raise BadField("metadata.user_id", f"`metadata.user_id` is not a string: {user!r:.80}")
    return user
