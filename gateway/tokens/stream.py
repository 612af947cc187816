"""From a stream of token ids to a stream of text: incremental and UTF-8-safe; and the text up to a stop string.

A byte-level vocabulary (GPT-2's alphabet: Llama 3, Qwen2, SmolLM2, ...) is a table: the text of a run of tokens is the
join of their bytes, read as UTF-8. Nothing is decoded twice, so a token costs one list access. Tokens of other
vocabularies (SentencePiece: metaspace, byte fallback) depend on their neighbours: those need `tokenizers` and a window.

Invariants:
- the deltas joined are the text of all tokens fed;
- no delta ends within a character;
- work is O(1) amortised per token (the generic vocabulary decodes a window that restarts at every clean boundary).
"""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer


@functools.cache
def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: character -> byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + position): byte for position, byte in enumerate(others)})
    return table


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer's decoder is plain ByteLevel, alone or in a sequence of one."""
    decoder: dict[str, Any] = json.loads(tokenizer.to_str()).get("decoder") or {}
    if decoder.get("type") == "Sequence" and len(decoder["decoders"]) == 1:
        decoder = decoder["decoders"][0]
    return decoder.get("type") == "ByteLevel"


def lone_token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes of one token of a SentencePiece-like vocabulary inside a text; of a byte-fallback token its byte."""
    token = tokenizer.id_to_token(token_id) or ""
    if len(token) == 6 and token.startswith("<0x"):
        return bytes.fromhex(token[3:5])
    return token.replace("▁", " ").encode()


def token_bytes(tokenizer: Tokenizer, size: int) -> list[bytes]:
    """Bytes by token id, empty for ids without a token. For byte-level vocabularies only."""
    alphabet = byte_level_alphabet()
    table = [b""] * size
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        try:
            table[token_id] = bytes([alphabet[character] for character in token])
        except KeyError:  # an added token with characters outside the alphabet is its own text
            table[token_id] = token.encode()
    return table


class Detokenizer(Protocol):
    """Text of tokens as they come; may hold back an incomplete character until `flush`.

    `special`: the ids whose text depends on what is read of the text before them, so that each is fed alone.
    """

    @property
    def special(self) -> frozenset[int]: ...
    def feed(self, token_ids: Sequence[int]) -> str: ...
    def flush(self) -> str: ...


class ByteLevelDetokenizer:
    """`table`: the bytes to show for each id, empty for hidden ones."""

    __slots__ = ("_table", "_torn", "_utf8")
    special: frozenset[int] = frozenset()

    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._torn = False  # the decoder holds the beginning of a character

    def feed(self, token_ids: Sequence[int]) -> str:
        table = self._table
        if len(token_ids) == 1:
            data = table[token_ids[0]]
        else:
            data = b"".join([table[token_id] for token_id in token_ids])
        if not self._torn:
            try:
                return data.decode()  # whole characters, nearly always: the incremental decoder is plain Python
            except UnicodeDecodeError:
                pass  # an incomplete or invalid one, which the incremental decoder handles
        text = self._utf8.decode(data)
        self._torn = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


WINDOW_MAX = 64
"""Tokens that the generic detokenizer decodes again at most while no clean boundary comes, and while no text comes."""


class WindowDetokenizer:
    """For vocabularies whose tokens depend on their neighbours: decodes the tokens since the last clean boundary,
    together with the run of tokens before it.

    `prefix_ids`: the tokens before the first one fed; SentencePiece shows a leading space only inside a text.
    """

    __slots__ = ("_hidden", "_pending", "_prefix", "_tokenizer")
    special: frozenset[int] = frozenset()

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int], prefix_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._prefix = [token_id for token_id in prefix_ids if token_id not in hidden]
        self._pending: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> str:
        out = []
        for token_id in token_ids:
            if token_id in self._hidden:
                continue
            self._pending.append(token_id)
            text = self._text_of_pending()
            if text.endswith("\ufffd") and len(self._pending) < WINDOW_MAX:
                continue  # an incomplete character, most likely: the next token completes it
            out.append(text)
            if text:
                self._prefix = self._pending
            elif len(self._prefix) < WINDOW_MAX:  # further ones say nothing of what follows
                self._prefix += self._pending
            self._pending = []
        return "".join(out)

    def flush(self) -> str:
        return self._text_of_pending()

    def _text_of_pending(self) -> str:
        before = self._decode(self._prefix)
        return self._decode([*self._prefix, *self._pending])[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


class CallDetokenizer:
    """Shows special tokens within calls, where a model writes them into an argument, and hides them elsewhere.

    `inner` shows all of them. `in_call`: whether what was read so far ends within a call; so a special token is fed
    alone, once what is before it was read.
    """

    def __init__(self, inner: Detokenizer, special: frozenset[int], in_call: Callable[[], bool]) -> None:
        self._inner, self.special, self._in_call = inner, special, in_call

    def feed(self, token_ids: Sequence[int]) -> str:
        if not self.special.isdisjoint(token_ids) and not self._in_call():
            token_ids = [token_id for token_id in token_ids if token_id not in self.special]
        return self._inner.feed(token_ids)

    def flush(self) -> str:
        return self._inner.flush()


class StopStrings:
    """The text up to the first stop string. `feed` what each token adds; `finish` at the end."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""

    def feed(self, text: str, *, checked: bool = True, ahead: str = "") -> tuple[str, str | None]:
        """The text that no stop string holds back, and the stop string that ends it. Not `checked`: none does, nor does
        one that begins in it. `ahead`: what follows, and is shown only if a stop string ends it: it is fed later."""
        self._held += text
        if checked and (found := self._find_stop(self._held + ahead)) is not None:
            shown, self._held = (self._held + ahead)[: found[0]], ""
            return shown, found[1]
        end = len(self._held) - (self._possible_stop() if checked else 0)
        shown, self._held = self._held[:end], self._held[end:]
        return shown, None

    def finish(self) -> str:
        """The text held back: the beginning of a stop string."""
        held, self._held = self._held, ""
        return held

    def _find_stop(self, text: str) -> tuple[int, str] | None:
        hits = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        return min(hits, default=None)

    def _possible_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
