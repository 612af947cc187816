"""Special tokens that stand as text in a message: what they become in the prompt.

Engines tokenise a rendered prompt as one text. So `<|im_end|>` in a web page that a tool read ends the tool's turn, and
its author can speak as the user: that is what vLLM and SGLang do, and `control` here. With `refuse` such a message is
refused by name. With `text` it has the ordinary tokens of its characters: a word stands in for each special token of a
message while the template is rendered, so that those in the rendering are the template's own.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from gateway.core.types import InText
from gateway.tokens.template import Message
from gateway.tokens.toolformats import Tool
from protos.errors import InvalidRequest

OPTION = "--special-tokens-in-text"


class SpecialTokens:
    """Of one tokenizer. Raises InvalidRequest for `text` with a tokenizer that is not the same in pieces."""

    def __init__(self, tokenizer: Tokenizer, in_text: InText) -> None:
        self._tokenizer, self._in_text = tokenizer, in_text
        if in_text == "control":
            return
        added = tokenizer.get_added_tokens_decoder().items()
        self._ids = {token.content: token_id for token_id, token in added if token.special and token.content}
        # The longest first: one may begin another.
        self._names = sorted(self._ids, key=lambda name: (-len(name), name))
        self._pattern = re.compile("|".join(map(re.escape, self._names)) or "(?!)")
        self._word = f"special{secrets.token_hex(8)}n"  # of letters and digits, which no template escapes
        if in_text == "text":
            self.plain = Tokenizer.from_str(tokenizer.to_str())
            self.plain.encode_special_tokens = True
            for name in self._names:
                self._check_alone(name)

    def guarded(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, new: int | None = None
    ) -> tuple[Sequence[Message], Sequence[Tool] | None]:
        """The messages as they may be rendered. `new`: only so many of the last ones were not checked before."""
        if self._in_text == "control":
            return messages, tools
        if self._in_text == "text":
            return _mapped(messages, self._hidden), tools and _mapped(tools, self._hidden)
        first = 0 if new is None else len(messages) - new
        for position in range(first, len(messages)):
            self._refuse(messages[position], f"message {position} ({messages[position]['role']})")
        if new is None:
            self._refuse(tools, "`tools`")
        return messages, tools

    def shown(self, rendered: str) -> str:
        """The rendering with the words as the tokens that they stand for."""
        if self._in_text != "text" or self._word not in rendered:
            return rendered
        return re.sub(self._word + r"(\d+)e", lambda found: self._names[int(found[1])], rendered)

    def pieces(self, rendered: str) -> list[int | str] | None:
        """The ids of the template's special tokens, and between them the texts that `plain` tokenises; None where no
        word stands in."""
        return self._cut(rendered) if self._in_text == "text" and self._word in rendered else None

    def _cut(self, rendered: str) -> list[int | str]:
        found = re.split(f"({self._pattern.pattern})", rendered)
        return [self._ids[piece] if piece in self._ids else self.shown(piece) for piece in found if piece]

    def _check_alone(self, name: str) -> None:
        """Raises InvalidRequest unless texts beside the token have the ids that they have without it."""
        sample, ids = f"a {name} b{name}\n{name}c", list[int]()
        for piece in self._cut(sample):
            ids += [piece] if isinstance(piece, int) else self.plain.encode(piece, add_special_tokens=False).ids
        if ids != self._tokenizer.encode(sample, add_special_tokens=False).ids:
            raise InvalidRequest(
                f"{OPTION} text: {name!r} of this tokenizer changes the text beside it", hint=f"{OPTION} refuse"
            )

    def _hidden(self, text: str) -> str:
        return self._pattern.sub(lambda found: f"{self._word}{self._names.index(found[0])}e", text)

    def _refuse(self, value: Any, where: str) -> None:
        def check(text: str) -> str:
            if found := self._pattern.search(text):
                raise InvalidRequest(
                    f"{where}: {found[0]!r} in its text is a special token of this model",
                    hint=f"leave it out: this gateway has {OPTION} refuse",
                )
            return text

        _mapped(value, check)


def _mapped(value: Any, change: Any) -> Any:
    """The value with each text in it changed. Requests are nested to a bounded depth."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_mapped(key, change): _mapped(inner, change) for key, inner in value.items()}
    return [_mapped(inner, change) for inner in value] if isinstance(value, list | tuple) else value
