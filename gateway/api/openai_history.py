"""The prompt of a turn: the session's record extended, or begun anew, visibly.

A record is kept as its head (which API and what tools its first prompt was written with) and its messages: a history
that matches the messages but not the head would continue a prompt that says something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gateway.ports import Message, SessionView
from gateway.tokens import Branch, Codec

HistoryKind = Literal["first", "extended", "closed", "anew"]
"""`closed`: extended, after the template ended a turn that was cut short. `anew`: the record did not fit (`reason`)."""

HEAD_ROLE = "laminar:head"


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    history: HistoryKind
    reason: str = ""


def head(**written_with: Any) -> Message:
    """The first entry of a record."""
    return {"role": HEAD_ROLE, **written_with}


def chat_prompt(
    codec: Codec,
    view: SessionView,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    template_kwargs: Mapping[str, Any] | None,
) -> Prompt:
    reason = ""
    if view.recorded_ids:
        recorded_head, recorded = view.recorded_messages[:1], view.recorded_messages[1:]
        if list(recorded_head) != [head(api="chat", tools=tools, template_kwargs=template_kwargs)]:
            reason = "tools, template arguments or API differ from the record's"
        else:
            outcome = codec.bridge(view.recorded_ids, recorded, messages, tools, template_kwargs=template_kwargs)
            if not isinstance(outcome, Branch):
                return Prompt(outcome.prompt_ids, "closed" if outcome.closed_turn else "extended")
            reason = outcome.reason
    ids = codec.render(messages, tools, template_kwargs=template_kwargs)
    return Prompt(ids, "anew" if view.recorded_ids else "first", reason)


def completion_prompt(codec: Codec, view: SessionView, prompt: str | list[int], *, add_special_tokens: bool) -> Prompt:
    """A text that continues the record's text keeps the record's ids; token ids are taken as they are."""
    recorded = list(view.recorded_ids)
    if isinstance(prompt, str):
        before = codec.decode(recorded) if recorded else ""
        if recorded and prompt.startswith(before):
            return Prompt(recorded + codec.encode(prompt[len(before) :]), "extended")
        ids = codec.encode(prompt, add_special_tokens=add_special_tokens)
    else:
        ids = prompt
    if not recorded:
        return Prompt(ids, "first")
    if ids[: len(recorded)] == recorded:
        return Prompt(ids, "extended")
    return Prompt(ids, "anew", "the prompt does not begin with the record")
