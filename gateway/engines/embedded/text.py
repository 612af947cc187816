"""Ids to text for the `text` and `logprobs.tokens` fields: incremental, so that no chunk ends inside a character."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from protos.errors import InvalidRequest


class Text:
    """The model directory's tokenizer."""

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise InvalidRequest(f"{directory} has no tokenizer.json", hint="save the model's fast tokenizer there")
        self._tokenizer = Tokenizer.from_file(str(path))
        self.token = lru_cache(maxsize=1 << 16)(self._token)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def _token(self, id: int) -> str:
        decoded: str = self._tokenizer.decode([id], skip_special_tokens=False)
        return decoded

    def stream(self, *, skip_special_tokens: bool) -> TextStream:
        return TextStream(self._tokenizer, DecodeStream(skip_special_tokens=skip_special_tokens))


class TextStream:
    """The text of one request's generated ids, without an incomplete character at its end."""

    def __init__(self, tokenizer: Tokenizer, decoder: DecodeStream) -> None:
        self._tokenizer = tokenizer
        self._decoder = decoder

    def add(self, id: int) -> str:
        """The text that this id completes; empty while a character is incomplete."""
        return self._decoder.step(self._tokenizer, id) or ""
