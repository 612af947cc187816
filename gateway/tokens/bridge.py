"""Bridging turns: the next prompt is the recorded ids plus the new messages' ids, never a re-tokenised history.

Why: re-tokenising text drifts from what the policy sampled (other merges, dropped reasoning, trimmed spaces), and a
training record must hold what it saw. How: render the conversation with a mark in place of the last recorded answer;
what the template writes after the mark is the end of the turn, the new messages and the generation prompt. Only that is
tokenised. It needs no knowledge of the template beyond where a turn ends.

Invariants:
- the recorded ids are a prefix of the bridged prompt;
- every token after them was written by the template, so none of them is the policy's (loss mask 0).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.tokens.template import Message
from gateway.tokens.values import NotJson, parse
from protos.errors import InvalidRequest

CONTINUED_MARK = "\ue0a1CONTINUED\ue0a2"
"""In place of a message that the model is to go on with."""
ANSWER_MARK = "\ue0a1ANSWER\ue0a2"
"""In place of the last recorded answer. Private-use characters, so that no message holds it by chance; a message that
does is refused.
"""


@dataclass(frozen=True, slots=True)
class Bridged:
    """`closed_turn`: the recorded answer was cut short (length, stop string); the template wrote its end."""

    prompt_ids: list[int]
    closed_turn: bool


def difference(recorded: Sequence[Message], messages: Sequence[Message]) -> str:
    """Where a history parts from the recorded one."""
    for position, (old, new) in enumerate(zip(recorded, messages, strict=False)):
        if (before := comparable(old)) != (now := comparable(new)):
            field = next(name for name in before if before[name] != now[name])
            return f"message {position} ({new.get('role')}) differs from the record in its {field}"
    return f"the history has {len(messages)} messages, the record {len(recorded)}"


def comparable(message: Message) -> dict[str, Any]:
    """A message without what clients change on the way: ids of calls, spacing of JSON, outer white space, null."""
    return {
        "role": message.get("role"),
        "content": content_text(message.get("content")).strip(),
        "tool_calls": [
            (call["function"]["name"], arguments_object(call["function"].get("arguments")))
            for call in message.get("tool_calls") or ()
        ],
    }


def content_text(content: Any) -> str:
    """A message's text: a string, null, or text parts, a line each, as vLLM joins them."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)


def arguments_object(arguments: Any) -> Any:
    """A tool call's arguments as an object where they are JSON (nothing at all: no arguments); else as they are."""
    if not arguments:
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        return parse(arguments)
    except NotJson:
        return arguments


def marked(recorded: Sequence[Message], added: Sequence[Message]) -> list[Message]:
    """The conversation with the mark as the last recorded answer."""
    for message in (*recorded, *added):
        if ANSWER_MARK in content_text(message.get("content")):
            raise InvalidRequest(f"a message holds the reserved text {ANSWER_MARK!r}")
    return [*recorded[:-1], {"role": "assistant", "content": ANSWER_MARK}, *added]


def open_ended(messages: Sequence[Message]) -> list[Message]:
    """The conversation with a mark as the text of its last message, which the model is to go on with."""
    if CONTINUED_MARK in content_text(messages[-1].get("content")):
        raise InvalidRequest(f"a message holds the reserved text {CONTINUED_MARK!r}")
    return [*messages[:-1], {**messages[-1], "content": CONTINUED_MARK}]


def up_to_mark(rendered: str, text: str) -> str:
    """What was rendered with the mark, up to and with the text in its place, not yet ended."""
    before, found, _ = rendered.rpartition(CONTINUED_MARK)
    if not found:
        raise InvalidRequest("the model's chat template drops the last message: it cannot be continued")
    return before + text


def after_mark(rendered: str) -> str:
    """What the template wrote after the marked answer."""
    _, found, rest = rendered.rpartition(ANSWER_MARK)
    if not found:
        raise InvalidRequest(
            "the model's chat template drops the last answer from the conversation: it cannot be bridged"
        )
    return rest


def join(recorded_ids: Sequence[int], suffix_ids: Sequence[int], turn_end_ids: frozenset[int]) -> Bridged:
    """Record and suffix, the turn's end written once: the suffix begins with the template's own end of a turn."""
    ends_itself = bool(recorded_ids) and recorded_ids[-1] in turn_end_ids
    template_ends = bool(suffix_ids) and suffix_ids[0] in turn_end_ids
    if ends_itself and template_ends:
        return Bridged([*recorded_ids, *suffix_ids[1:]], closed_turn=False)
    return Bridged([*recorded_ids, *suffix_ids], closed_turn=template_ends)


def template_messages(messages: Sequence[Message], *, knows_tools: bool) -> list[dict[str, Any]]:
    """Messages as templates expect them: text joined, arguments as objects; calls as text where tools are unknown."""
    return [_template_message(message, knows_tools) for message in messages]


def _template_message(message: Message, knows_tools: bool) -> dict[str, Any]:
    out: dict[str, Any] = {key: value for key, value in message.items() if value is not None}
    calls = out.pop("tool_calls", None) or ()
    out["content"] = content_text(message.get("content"))
    if calls and knows_tools:
        out["tool_calls"] = [_template_call(call) for call in calls]
    elif calls:
        out["content"] = "\n".join(filter(None, [out["content"], *(hermes_text(call["function"]) for call in calls)]))
    return out


def _template_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": arguments_object(function.get("arguments"))}}


def hermes_text(function: Mapping[str, Any]) -> str:
    """A tool call as Hermes and Qwen models write it."""
    call = {"name": function["name"], "arguments": arguments_object(function.get("arguments"))}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
