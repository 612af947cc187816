"""Input items of the Responses API to the messages of a chat. Pure.

An answer of the model is several items: its reasoning, its text, each of its calls. Templates and records have them in
one assistant message, so items of the model that follow each other become one; a second text without calls or reasoning
in between begins another message.

Raises BadField and RefusedField with the path of the item.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway.api.errors import BadField, RefusedField
from gateway.ports import Message
from gateway.tokens.bridge import content_text

ROLES = ("user", "assistant", "system", "developer")
TEXTS = ("input_text", "output_text", "text")
INSTRUCTIONS = "instructions"
"""Marks the message that a request's `instructions` became, in its record: the next response does not inherit it."""

Item = Mapping[str, Any]


def instructed(instructions: str | None) -> list[Message]:
    return [] if instructions is None else [{"role": "system", "content": instructions, INSTRUCTIONS: True}]


def carried(recorded: Sequence[Message]) -> list[Message]:
    """The history of a recorded response as the next one inherits it: without its instructions."""
    return [message for message in recorded if not message.get(INSTRUCTIONS)]


def input_messages(found: str | list[dict[str, Any]]) -> list[Message]:
    """The messages of a request's `input`."""
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    if not found:
        raise BadField("input", "`input` is empty", hint="send a text, or at least one item")
    conversation = _Conversation()
    for index, item in enumerate(found):
        kind = item.get("type", "message" if "role" in item else None)
        take = _KINDS.get(kind) if isinstance(kind, str) else None
        path = f"input[{index}]"
        if take is None:
            raise RefusedField(
                f"{path}.type",
                f"items of type {kind!r} are not supported",
                hint=f"one of {', '.join(sorted(_KINDS))}",
            )
        take(conversation, item, path)
    return conversation.messages


def as_items(message: Message) -> list[dict[str, Any]]:
    """The items that became a recorded message."""
    text, role = content_text(message.get("content")), message["role"]
    if role == "tool":
        return [{"type": "function_call_output", "call_id": message.get("tool_call_id"), "output": text}]
    found: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        found.append({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": reasoning}]})
    if text or not message.get("tool_calls"):
        part = {"type": "output_text", "text": text, "annotations": []} if role == "assistant" else None
        content = [part or {"type": "input_text", "text": text}]
        found.append({"type": "message", "role": role, "status": "completed", "content": content})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        named = {"call_id": call.get("id"), "name": function["name"], "arguments": function["arguments"]}
        found.append({"type": "function_call", "status": "completed", **named})
    return found


class _Conversation:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._own: dict[str, Any] | None = None  # the assistant message that further items of the model join
        self._text_ended = False  # a text of the model was the last item

    def message(self, item: Item, path: str) -> None:
        _known(item, path, {"role", "content", "type", "id", "status", "phase"})
        role = item.get("role")
        if role not in ROLES:
            raise BadField(f"{path}.role", f"unknown role {role!r}", hint=f"one of {', '.join(ROLES)}")
        text = _text(item.get("content"), f"{path}.content")
        if role != "assistant":
            self._other({"role": "system" if role == "developer" else role, "content": text})
            return
        if self._text_ended:
            self._own = None
        own = self._assistant()
        own["content"] = (own["content"] or "") + text
        self._text_ended = True

    def reasoning(self, item: Item, path: str) -> None:
        _known(item, path, {"type", "id", "summary", "content", "status", "encrypted_content"})
        if item.get("encrypted_content"):
            raise RefusedField(f"{path}.encrypted_content", "encrypted reasoning is another provider's")
        parts = item.get("content") or item.get("summary") or []
        text = _joined(parts, f"{path}.content", ("reasoning_text", "summary_text"))
        if self._text_ended or (self._own is not None and self._own.get("tool_calls")):
            self._own = None  # reasoning begins an answer
        own = self._assistant()
        if text:
            own["reasoning_content"] = own.get("reasoning_content", "") + text

    def call(self, item: Item, path: str) -> None:
        _known(item, path, {"type", "id", "call_id", "name", "arguments", "status", "caller", "namespace"})
        call_id, name = _string(item, "call_id", path), _string(item, "name", path)
        arguments = item.get("arguments", "")
        if not isinstance(arguments, str):
            raise BadField(f"{path}.arguments", "`arguments` is JSON as text")
        own = self._assistant()
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        own.setdefault("tool_calls", []).append(call)

    def output(self, item: Item, path: str) -> None:
        _known(item, path, {"type", "id", "call_id", "output", "status", "caller", "name", "namespace"})
        text = _text(item.get("output"), f"{path}.output")
        self._other({"role": "tool", "tool_call_id": _string(item, "call_id", path), "content": text})

    def _other(self, message: Message) -> None:
        self._own, self._text_ended = None, False
        self.messages.append(message)

    def _assistant(self) -> dict[str, Any]:
        if self._own is None:
            self._own = {"role": "assistant", "content": None}
            self.messages.append(self._own)
        self._text_ended = False
        return self._own


_KINDS: dict[str, Callable[[_Conversation, Item, str], None]] = {
    "message": _Conversation.message,
    "reasoning": _Conversation.reasoning,
    "function_call": _Conversation.call,
    "function_call_output": _Conversation.output,
}


def _known(item: Item, path: str, fields: set[str]) -> None:
    for name, value in item.items():
        if name not in fields and value is not None:
            raise RefusedField(f"{path}.{name}", f"unknown field `{path}.{name}`", hint="leave it out")


def _string(item: Item, name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not value:
        raise BadField(f"{path}.{name}", f"`{path}.{name}` is a string that is not empty")
    return value


def _text(content: Any, path: str) -> str:
    """The text of a message or of a tool's output: a string, or parts."""
    return content if isinstance(content, str) else _joined(content, path, TEXTS)


def _joined(parts: Any, path: str, kinds: Sequence[str]) -> str:
    if not isinstance(parts, list):
        raise BadField(path, f"`{path}` is a string or a list of parts")
    texts: list[str] = []
    for index, part in enumerate(parts):
        at = f"{path}[{index}]"
        if not isinstance(part, Mapping) or part.get("type") not in kinds:
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise RefusedField(f"{at}.type", f"content of type {kind!r} is not supported", hint=" or ".join(kinds))
        if not isinstance(text := part.get("text"), str):
            raise BadField(f"{at}.text", f"`{at}.text` is a string")
        texts.append(text)
    return "\n".join(texts)
