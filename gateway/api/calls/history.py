"""The prompt of a turn: it extends a turn of the session's tree, or begins a branch, which the response shows.

A root of the tree keeps its head: the API and the tools that its prompt was rendered with. A history that matches the
messages but not the head would continue a different prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from gateway.core.tree import Turn, TurnTree, matched
from gateway.core.types import History, HistoryKind, TurnId
from gateway.ports import Message, SessionView
from gateway.tokens import Codec
from gateway.tokens.bridge import comparable, content_text, difference
from gateway.tokens.codec import Rendering

HEAD_ROLE = "laminar:head"


@dataclass(frozen=True, slots=True)
class Prompt:
    """`parent`: the turn that it extends; `added`: the messages that it adds to that turn's.

    `turn`: the number of answers before it in its conversation. `reason`: why it is a branch.
    """

    token_ids: list[int]
    history: HistoryKind
    parent: TurnId | None = None
    added: Sequence[Message] = ()
    turn: int = 0
    reason: str = ""


def head(**rendered_with: Any) -> Message:
    """The head of a root: what its prompt was rendered with."""
    return {"role": HEAD_ROLE, **rendered_with}


def chat_prompt(
    codec: Codec,
    view: SessionView,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    template_kwargs: Mapping[str, Any] | None,
    mode: History | None = None,
    *,
    generation_prompt: bool = True,
    continued: bool = False,
    after: TurnId | None = None,
) -> Prompt:
    """Extends the deepest turn whose path the messages repeat; without one, renders the template alone.

    `after`: this turn, if the messages repeat its path: others may say the same in other ids.

    `mode` "template": the template's rendering takes precedence wherever it differs from the record. `continued`: the
    answer continues the last message. A recorded answer is continued from its ids, as a root of its own, because its
    message becomes another one.
    """
    how: Rendering = {
        "template_kwargs": template_kwargs,
        "add_generation_prompt": generation_prompt,
        "continued": continued,
    }
    turn = sum(message.get("role") == "assistant" for message in messages)
    tree, own_head = view.tree, head(api="chat", tools=tools, template_kwargs=template_kwargs)
    parent = _extended_turn(tree, own_head, messages, after)
    if parent is None:
        ids = codec.render(messages, tools, **how)
        if not len(tree):
            return Prompt(ids, "first", added=messages, turn=turn)
        return Prompt(ids, "branch", added=messages, turn=turn, reason=_difference(tree, own_head, messages))
    recorded = _messages(tree, parent)
    added = messages[len(recorded) :]
    if continued and not added:
        return _continuation(codec, tree.ids(parent), messages, tools, how, turn)
    bridged = codec.bridge(tree.ids(parent), recorded, added, tools, **how)
    if (mode or view.history) == "template":
        rendered = codec.render_text([*recorded, *added], tools, **how)
        if codec.decode(bridged.prompt_ids) != rendered:
            reason = "the template renders this history differently than it was sampled"
            ids = codec.render([*recorded, *added], tools, **how)
            return Prompt(ids, "branch", added=[*recorded, *added], turn=turn, reason=reason)
    if tree.children(parent):
        reason = f"turn {parent.depth} has been extended already"
        return Prompt(bridged.prompt_ids, "branch", parent.turn_id, added, turn, reason)
    return Prompt(bridged.prompt_ids, "closed" if bridged.closed_turn else "extended", parent.turn_id, added, turn)


def unrecorded_chars(
    view: SessionView,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    template_kwargs: Mapping[str, Any] | None,
) -> int:
    """Characters of the messages that the session's record lacks: about what `chat_prompt` has to tokenise."""
    own_head = head(api="chat", tools=tools, template_kwargs=template_kwargs)
    parent = _extended_turn(view.tree, own_head, messages)
    recorded = sum(len(turn.messages) for turn in view.tree.path(parent))
    return sum(len(content_text(message.get("content"))) for message in messages[recorded:])


def _continuation(
    codec: Codec,
    recorded_ids: list[int],
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    how: Rendering,
    turn: int,
) -> Prompt:
    """Continues a recorded answer: from its ids, unless they end the turn."""
    reason = "a recorded answer is continued"
    if recorded_ids[-1] in codec.turn_end_ids:
        recorded_ids, reason = codec.render(messages, tools, **how), "a recorded answer that had ended is continued"
    return Prompt(recorded_ids, "branch", added=messages, turn=turn, reason=reason)


def completion_prompt(codec: Codec, view: SessionView, prompt: str | list[int], *, add_special_tokens: bool) -> Prompt:
    """A text that continues a turn's text keeps that turn's ids; token ids are used unchanged."""
    tree = view.tree
    if isinstance(prompt, str):
        parent, before = _text_before(codec, tree, prompt)
        if parent is not None:
            ids = tree.ids(parent) + codec.encode(prompt.encode()[len(before) :].decode())
        else:
            ids = codec.encode(prompt, add_special_tokens=add_special_tokens)
    else:
        ids = prompt
        parent = matched(tree, ids, lambda turn: [*turn.prompt_ids, *turn.token_ids])
    if not len(tree):
        return Prompt(ids, "first")
    if parent is None:
        return Prompt(ids, "branch", reason="the prompt does not begin with the record")
    if tree.children(parent):
        return Prompt(
            ids,
            "branch",
            parent.turn_id,
            turn=parent.depth + 1,
            reason=f"turn {parent.depth} has been extended already",
        )
    return Prompt(ids, "extended", parent.turn_id, turn=parent.depth + 1)


def _extended_turn(
    tree: TurnTree, own_head: Message, messages: Sequence[Message], after: TurnId | None = None
) -> Turn | None:
    """The first item of a history is its head, so that a turn with another head never matches."""
    items = [own_head, *map(comparable, messages)]

    def own(turn: Turn) -> list[Any] | None:
        if not turn.messages:
            return None  # a completion's ids, or a turn whose messages are not recorded yet
        own_items = list(map(comparable, turn.messages))
        return [turn.head, *own_items] if turn.parent is None else own_items

    named = None if after is None else tree.turns.get(after)
    if named is not None:
        owned = [own(turn) for turn in tree.path(named)]
        if None not in owned and (path := [item for found in owned for item in found or ()]) == items[: len(path)]:
            return named
    return matched(tree, items, own)


def _messages(tree: TurnTree, turn: Turn | None) -> list[Message]:
    return [message for t in tree.path(turn) for message in t.messages]


def _difference(tree: TurnTree, own_head: Message, messages: Sequence[Message]) -> str:
    """The first difference between the history and the newest path."""
    path = tree.path(tree.newest)
    if path[0].head != own_head:
        return "tools, template arguments or API differ from the record's"
    return difference(_messages(tree, path[-1]), messages)


def _text_before(codec: Codec, tree: TurnTree, prompt: str) -> tuple[Turn | None, bytes]:
    """The turn with the longest text that the prompt begins with, newest first, and that text in UTF-8.

    A path is decoded once and compared by its digest from then on: else a long session would be decoded at each turn.
    """
    text = prompt.encode()
    marks = {turn.turn_id: _text_mark(codec, tree, turn) for turn in tree.turns.values()}
    digests, digest, at = {}, xxhash.xxh3_128(), 0
    for length in sorted({length for length, _ in marks.values() if length <= len(text)}):
        digest.update(text[at:length])
        digests[length], at = digest.digest(), length
    best, longest = None, 0
    for turn in reversed(tree.turns.values()):
        length, of_path = marks[turn.turn_id]
        if length > longest and digests.get(length) == of_path:
            best, longest = turn, length
    return best, text[:longest]


def _text_mark(codec: Codec, tree: TurnTree, turn: Turn) -> tuple[int, bytes]:
    mark, num_tokens = turn.text_mark, len(turn.token_ids)
    if mark is None:
        text = codec.decode(tree.ids(turn)).encode()
        mark = len(text), xxhash.xxh3_128_digest(text)
        if len(turn.token_ids) == num_tokens:  # else it was shortened meanwhile: this may run in a thread
            turn.text_mark = mark
    return mark
