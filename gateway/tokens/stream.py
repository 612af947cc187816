"""From a stream of token ids to a stream of text: incremental, UTF-8-safe, stop strings matched across every boundary.

Invariants:
- the deltas joined are the text of all tokens fed, up to the first stop string;
- no delta holds a torn character, nor the beginning of what may become a stop string;
- work is O(1) amortised per token (the generic vocabulary decodes a window that restarts at every clean boundary).
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

import msgspec
from tokenizers import Tokenizer


class Detokenizer(Protocol):
    """Text of tokens as they come; may hold back a torn character until `flush`."""

    def feed(self, token_ids: Sequence[int]) -> str: ...
    def flush(self) -> str: ...


class ByteLevelDetokenizer:
    """`table` has the bytes to show for each id: empty for what is hidden."""

    __slots__ = ("_table", "_torn", "_utf8")

    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._torn = False  # the decoder holds the beginning of a character

    def feed(self, token_ids: Sequence[int]) -> str:
        table = self._table
        if len(token_ids) == 1:
            said = table[token_ids[0]]
        else:
            said = b"".join([table[token_id] for token_id in token_ids])
        if not self._torn:
            try:
                return said.decode()  # whole characters, as nearly always: the incremental decoder is plain Python
            except UnicodeDecodeError:
                pass  # a torn or broken one, which the decoder knows how to treat
        text = self._utf8.decode(said)
        self._torn = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


WINDOW_MAX = 64
"""Tokens that the generic detokenizer decodes again at most, when no clean boundary comes."""


class WindowDetokenizer:
    """For vocabularies whose tokens depend on their neighbours: decodes what came since the last clean boundary, after
    the run of tokens before that boundary.

    `prefix_ids` are the tokens before the first one fed: SentencePiece shows a leading space only inside a text.
    """

    __slots__ = ("_hidden", "_pending", "_prefix", "_tokenizer")

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
                continue  # a torn character, most likely: the next token completes it
            out.append(text)
            self._prefix = self._pending if text else [*self._prefix, *self._pending]
            self._pending = []
        return "".join(out)

    def flush(self) -> str:
        return self._text_of_pending()

    def _text_of_pending(self) -> str:
        before = self._decode(self._prefix)
        return self._decode([*self._prefix, *self._pending])[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """`stopped_by`: the stop string that ended the text; `tokens_used`: of this feed, up to the one completing it."""

    text: str
    tokens_used: int
    stopped_by: str | None = None


class StreamDecoder:
    """One turn's text. `feed` what arrives; `finish` once, when no more comes and no stop string matched."""

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str] = (), *, min_tokens: int = 0) -> None:
        """Stop strings are looked for only after `min_tokens` tokens."""
        self._detokenizer = detokenizer
        self.text = detokenizer.feed
        """Feeds where there is no stop string to look for."""
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._unchecked_tokens = min_tokens
        self._held = ""

    @property
    def stops(self) -> bool:
        """Whether a text may end before its tokens do: it has to be fed as they come."""
        return bool(self._stop)

    def feed(self, token_ids: Sequence[int]) -> TextDelta:
        if not self._stop:
            return TextDelta(self.text(token_ids), len(token_ids))
        shown: list[str] = []
        for position, token_id in enumerate(token_ids):
            self._held += self._detokenizer.feed((token_id,))
            if self._unchecked_tokens > 0:
                self._unchecked_tokens -= 1
                shown.append(self._held)
                self._held = ""
                continue
            found = self._find_stop()
            if found is not None:
                at, stop = found
                shown.append(self._held[:at])
                self._held = ""
                return TextDelta("".join(shown), position + 1, stop)
            keep = self._possible_stop()
            if keep < len(self._held):
                shown.append(self._held[: len(self._held) - keep])
                self._held = self._held[len(self._held) - keep :]
        return TextDelta("".join(shown), len(token_ids))

    def finish(self) -> TextDelta:
        """What was held back: a torn character (shown as U+FFFD), or a stop string that did not complete."""
        self._held += self._detokenizer.flush()
        found = self._find_stop() if self._unchecked_tokens == 0 else None
        text, self._held = (self._held if found is None else self._held[: found[0]]), ""
        return TextDelta(text, 0, None if found is None else found[1])

    def _find_stop(self) -> tuple[int, str] | None:
        hits = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        return min(hits, default=None)

    def _possible_stop(self) -> int:
        """Length of the longest end of what is held that begins a stop string."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
