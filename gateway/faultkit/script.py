"""The tokens and the failures of scripted engines: functions of ids and seeds alone. Pure.

Every token and logprob is a function of all ids before it, so a token that was lost or doubled changes everything after
it.
"""

from __future__ import annotations

import random
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

CutKind = Literal[
    "reset",  # the connection is aborted (RST)
    "closed",  # the connection is closed within the chunked body (FIN)
    "eof",  # the body ends cleanly, without [DONE]
    "done",  # [DONE] without a finish reason
    "abort",  # finish_reason "abort"
    "error_event",  # an error as the stream's last event
    "500",  # statuses come before the stream
    "503",
    "400",
    "torn_500",  # a 500 whose body breaks off
    "silent",  # no answer at all, not even a status line
    "hang",  # sends nothing more
    "malformed",  # an event that is not JSON
    "not_utf8",  # an event with a byte that is not UTF-8
    "huge_line",  # an event longer than any reader takes
    "no_logprobs",  # two tokens without logprobs
    "huge_id",  # a token id beyond 64 bits
    "repeat",  # the last event once more, then nothing
    "shorten",  # an event that lacks a token, then nothing
    "death",  # as kill -9: resets every connection and refuses new ones
    "version",  # no cut: it ends whole, and reports another version for the tokens after
]
RESUMABLE: tuple[CutKind, ...] = tuple(kind for kind in get_args(CutKind) if kind not in ("400", "version"))
"""The cuts that a gateway must recover from: not a refusal, which is the request's own fault, nor "version"."""


def scripted(prompt: Sequence[int], num_tokens: int, vocab_size: int = 1000) -> tuple[list[int], list[float]]:
    """Ids and logprobs that follow `prompt`; ids from 3 on, since the first ones are special in most vocabularies."""
    sequence, logprobs = list(prompt), []
    for _ in range(num_tokens):
        mark = _mark(sequence)
        sequence.append(3 + mark % (vocab_size - 3))
        logprobs.append(_logprob(mark))
    return sequence[len(prompt) :], logprobs


def logprobs_of(prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
    """Logprobs of given ids: each a function of all ids before it."""
    return [_logprob(_mark([*prompt, *ids[:i]])) for i in range(len(ids))]


def _mark(sequence: Sequence[int]) -> int:
    return zlib.crc32(array("q", sequence).tobytes())


def _logprob(mark: int) -> float:
    return -(mark % 1021) / 256


@dataclass(frozen=True)
class Cut:
    """`after`: tokens of this request that are sent before; with as many as it requests, all but no finish reason."""

    kind: CutKind
    after: int = 0


def cuts_by_seed(
    seed: int, share: float, after_max: int, kinds: Sequence[CutKind] = RESUMABLE
) -> Callable[[], Cut | None]:
    """Draws the cut of one request after another: a `share` of them is cut, before token `after_max`."""
    chance = random.Random(seed)

    def draw() -> Cut | None:
        if chance.random() >= share:
            return None
        return Cut(chance.choice(kinds), chance.randrange(after_max))

    return draw
