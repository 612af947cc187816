"""The bridge between turns: the next prompt is the recorded ids plus the new messages' ids.

The history is never retokenised. Text has many tokenisations, and the policy does not sample the one that the tokenizer
gives: `encode(decode(ids))` merges differently, and a template drops reasoning, trims spaces and rewrites the JSON of
calls. A prompt made that way has tokens that the policy never saw at positions for which its logprobs were recorded; a
trainer would compare two different sequences, and the engine's prefix cache would miss from the first difference on.

Instead the conversation is rendered with a mark in place of the last recorded answer. After the mark stand the end of
the turn, the new messages and the generation prompt: only these are tokenised. Of the template one has to know nothing
but the tokens that end a turn. Whether that end is in the record already depends on how the answer stopped: a sampled
end-of-turn token is there, after a length limit or a stop string it is missing. `join` has it exactly once.

Invariants:
- the recorded ids are a prefix of the bridged prompt;
- the template wrote every token after them, so none of them is the policy's (loss mask 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.tokens.template import Message
from gateway.tokens.values import NotJson, parse
from protos.errors import InvalidRequest

CONTINUED_MARK = "\ue0a1CONTINUED\ue0a2"
"""In place of a message that the model continues."""
ANSWER_MARK = "\ue0a1ANSWER\ue0a2"
"""In place of the last recorded answer. Private-use characters, so that no message has it by chance; a message that has
it is refused."""


@dataclass(frozen=True, slots=True)
class Bridged:
    """`closed_turn`: the recorded answer was cut short (length, stop string); the template wrote its end."""

    prompt_ids: list[int]
    closed_turn: bool


def difference(recorded: Sequence[Message], messages: Sequence[Message]) -> str:
    """The first difference between a history and the recorded one."""
    for position, (old, new) in enumerate(zip(recorded, messages, strict=False)):
        if (before := comparable(old)) != (now := comparable(new)):
            field = next(name for name in before if before[name] != now[name])
            return f"message {position} ({new.get('role')}) differs from the record in its {field}"
    return f"the history has {len(messages)} messages, the record {len(recorded)}"


def comparable(message: Message) -> dict[str, Any]:
    """A message without the parts that clients change: ids of calls, spacing of JSON, outer white space, null."""
    return {
        "role": message.get("role"),
        "content": content_text(message.get("content")).strip(),
        "tool_calls": [
            (call["function"]["name"], arguments_object(call["function"].get("arguments")))
            for call in message.get("tool_calls") or ()
        ],
    }


def content_text(content: Any) -> str:
    """A message's text: of a string, null, or text parts, which are joined by line ends as vLLM does."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)


def arguments_object(arguments: Any) -> Any:
    """A tool call's arguments: an object where they are JSON, {} where there are none, else the text."""
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
    """The conversation with a mark as the text of its last message, which the model continues."""
    if CONTINUED_MARK in content_text(messages[-1].get("content")):
        raise InvalidRequest(f"a message holds the reserved text {CONTINUED_MARK!r}")
    return [*messages[:-1], {**messages[-1], "content": CONTINUED_MARK}]


def up_to_mark(rendered: str, text: str) -> str:
    """The rendering up to the mark, and the text in the mark's place: the message has no end yet."""
    before, found, _ = rendered.rpartition(CONTINUED_MARK)
    if not found:
        raise InvalidRequest("the model's chat template drops the last message: it cannot be continued")
    return before + text


def after_mark(rendered: str) -> str:
    """The rendering after the marked answer."""
    _, found, rest = rendered.rpartition(ANSWER_MARK)
    if not found:
        raise InvalidRequest(
            "the model's chat template drops the last answer from the conversation: it cannot be bridged"
        )
    return rest


def join(
    recorded_ids: Sequence[int], suffix_ids: Sequence[int], turn_end_ids: frozenset[int], *, ends_begin: bool = False
) -> Bridged:
    """The record and the suffix, with the turn's end once: the suffix begins with the template's own.

    `ends_begin`: the tokens that end a turn begin the next one (GLM). Then the template's stays beside another one: it
    says whose turn begins.
    """
    ends_itself = bool(recorded_ids) and recorded_ids[-1] in turn_end_ids
    template_ends = bool(suffix_ids) and suffix_ids[0] in turn_end_ids
    if ends_itself and template_ends and not (ends_begin and recorded_ids[-1] != suffix_ids[0]):
        return Bridged([*recorded_ids, *suffix_ids[1:]], closed_turn=False)
    return Bridged([*recorded_ids, *suffix_ids], closed_turn=template_ends)
