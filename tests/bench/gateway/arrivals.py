"""What one client received of a stream: which of its tokens came, and when; and whether that was all, and on time.

Pure: bytes and clock readings in. Engines say a text that repeats, so a client knows each token that it should receive.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

ON_TIME_S = 1.0
"""An event that comes so much later than its stream's pace is late. The gateway lets an event gather as long."""
_CONTENT = re.compile(rb'"content": ?"((?:[^"\\]|\\.)*)"')


class Script:
    """The text of which every answer is the beginning: `words`, as they stand in JSON, over and over."""

    def __init__(self, words: Sequence[bytes]) -> None:
        self._cycle = b"".join(words)
        self._ends = list(itertools.accumulate(map(len, words)))

    def says(self, said: bytes, position: int) -> bool:
        """Whether `said` stands at that place of the text."""
        size = len(self._cycle)
        begin = position % size
        return (self._cycle * ((begin + len(said)) // size + 1))[begin : begin + len(said)] == said

    def tokens(self, position: int) -> int:
        """Whole tokens before that place."""
        cycles, rest = divmod(position, len(self._cycle))
        return cycles * len(self._ends) + bisect.bisect_right(self._ends, rest)


@dataclass(slots=True)
class Arrivals:
    """Of one answer. `seen`: when bytes came, and how many tokens were whole then. `wrong`: what came out of order."""

    script: Script
    seen: list[tuple[float, int]] = field(default_factory=list)
    wrong: str = ""
    _position: int = 0
    _rest: bytes = b""

    def take(self, data: bytes, now: float) -> None:
        data = self._rest + data
        end = data.rfind(b"\n\n") + 2
        if end < 2:
            self._rest = data
            return
        self._rest, before = data[end:], self._position
        for found in _CONTENT.finditer(data, 0, end):
            if not self.wrong and not self.script.says(found[1], self._position):
                self.wrong = f"after {self._position} bytes of text: {found[1][:40]!r}"
            self._position += len(found[1])
        if self._position > before and not self.wrong:
            self.seen.append((now, self.script.tokens(self._position)))


@dataclass(frozen=True, slots=True)
class Received:
    """One stream within a window: how late its events were, and how many of its tokens were not there at the end."""

    delays_s: Sequence[float]
    missing: int
    longest_gap_s: float
    wrong: str = ""


def received(arrivals: Arrivals, tokens_s: float, since: float, until: float) -> Received:
    """Engines keep their pace, so each event tells when the first token would have come; the soonest counts.

    A token is missing at the end that was due `ON_TIME_S` and an event's time before.
    """
    seen = arrivals.seen
    if not seen:
        return Received((), round((until - since) * tokens_s), until - since, arrivals.wrong)
    began = min(at - (tokens - 1) / tokens_s for at, tokens in seen)
    inside = [(at, tokens) for at, tokens in seen if since <= at < until]
    delays = [at - began - (tokens - 1) / tokens_s for at, tokens in inside]
    sizes = [later - earlier for (_, earlier), (_, later) in itertools.pairwise(seen)]
    had = max((tokens for at, tokens in seen if at < until), default=0)
    due = 1 + int((until - began - ON_TIME_S) * tokens_s) - max(sizes, default=0)
    times = [since, *(at for at, _ in inside), until]
    gap = max(later - earlier for earlier, later in itertools.pairwise(times))
    return Received(delays, max(0, due - had), gap, arrivals.wrong)
