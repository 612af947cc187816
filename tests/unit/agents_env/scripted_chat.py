"""The model as a function, without a server: for tests of what an environment says and how it scores."""

from __future__ import annotations

from collections.abc import Callable

from agents_env.environment import Message, Reply


class ScriptedChat:
    """`script` answers the conversation; answers of more than `max_tokens` words are cut."""

    def __init__(self, script: Callable[[list[Message]], str]) -> None:
        self.script = script
        self.conversations: list[list[Message]] = []

    async def reply(self, messages: list[Message], *, max_tokens: int) -> Reply:
        self.conversations.append(list(messages))
        words = self.script(messages).split(" ")
        return Reply(" ".join(words[:max_tokens]), len(words) > max_tokens, min(len(words), max_tokens))
