"""A task small enough for a random model: answer with letters, in two turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer_client.integrations.trl import Session

PROMPTS = [f"What is the sum of {number} and 30?" for number in range(8)]
ROWS = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in PROMPTS]


def letters(text: str) -> float:
    """The share of letters among the characters."""
    return sum(character.isascii() and character.isalpha() for character in text) / max(len(text), 1)


def two_turns(session: Session, task: Mapping[str, Any]) -> float:
    """The second turn goes on from the first, with a message between them that is not trained on."""
    messages = [*task["prompt"]]
    first = session.chat(messages)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Once more."}]
    return letters(first.text + session.chat(messages).text)


def with_a_branch(session: Session, task: Mapping[str, Any]) -> float:
    """As `two_turns`, and a second answer to the prompt, which makes a branch."""
    reward = two_turns(session, task)
    return (reward + letters(session.chat([*task["prompt"], {"role": "user", "content": "Briefly."}]).text)) / 2
