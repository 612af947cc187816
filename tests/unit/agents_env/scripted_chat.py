"""The model as a function, without a server: for tests of what an environment says and how it scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agents_env.environment import Message, Reply, Tool


class ScriptedChat:
    """`script` answers the conversation; more than `max_tokens` words are cut. A `Reply` is returned as it is."""

    def __init__(self, script: Callable[[list[Message]], str | Reply]) -> None:
        self.script = script
        self.conversations: list[list[Message]] = []
        self.tools: list[list[Tool]] = []

    async def reply(self, messages: list[Message], *, max_tokens: int, tools: Sequence[Tool] = ()) -> Reply:
        self.conversations.append(list(messages))
        self.tools.append(list(tools))
        answer = self.script(messages)
        if isinstance(answer, Reply):
            return answer
        words = answer.split(" ")
        return Reply(" ".join(words[:max_tokens]), len(words) > max_tokens, min(len(words), max_tokens))
