"""A task small enough for a random model, in two turns: the second goes on from the first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer_client import Session

PROMPTS = [f"What is the sum of {number} and 30?" for number in range(4)]


def two_branches(session: Session, task: Mapping[str, Any]) -> float:
    """Two second turns go on from the same first one. The reward is the share of them that found something to say."""
    messages = [*task["prompt"]]
    first = session.chat(messages, max_tokens=24)
    messages.append({"role": "assistant", "content": first.text})
    ends = [
        session.chat([*messages, {"role": "user", "content": request}], max_tokens=24).text
        for request in ("Once more.", "In other words.")
    ]
    return sum(map(bool, ends)) / len(ends)


def two_turns(session: Session, task: Mapping[str, Any]) -> float:
    """The message between the turns is not trained on. The reward is the share of letters among the characters."""
    messages = [*task["prompt"]]
    first = session.chat(messages, max_tokens=24)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Once more."}]
    text = first.text + session.chat(messages, max_tokens=24).text
    return sum(character.isascii() and character.isalpha() for character in text) / max(len(text), 1)
