"""What the holders of API keys have running, and the bounds on it. Pure.

A holder is the name that a key of the key file was given to: keys of one name count together. Sessions and turns belong
to the holder whose key made the session; those of nobody, because access control was off, are not bounded here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.core.access import NOBODY
from protos.errors import OutOfCapacity

RETRY_S = 5.0
"""Until a session or a turn of the holder's own may have ended."""
SHOWN_MAX = 32
"""Holders in the status, those with the most first."""


@dataclass(slots=True)
class KeyBounds:
    """`sessions_max`, `turns_max`: of each holder; None: any number."""

    sessions_max: int | None = None
    turns_max: int | None = None
    _sessions: Counter[str] = field(default_factory=Counter)
    _turns: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    """Sessions and requests for turns, since the start."""

    def check_session(self, owner: str) -> None:
        """OutOfCapacity where the holder has as many live sessions as it may have."""
        if self._refuses(self._sessions[owner], 1, self.sessions_max, owner):
            raise OutOfCapacity(
                f"the key of {owner} has {self._sessions[owner]} live sessions",
                hint="finish or abandon some, or start the gateway with a higher --sessions-per-key",
                retry_after_s=RETRY_S,
            )

    def check_turns(self, owner: str, more: int) -> None:
        """OutOfCapacity where the holder would have more turns running than it may have."""
        if self._refuses(self._turns[owner], more, self.turns_max, owner):
            raise OutOfCapacity(
                f"{self._turns[owner]} turns run in sessions of the key of {owner}"
                + (f", and this request has {more}" if more > 1 else ""),
                hint="wait for their answers, or start the gateway with a higher --turns-per-key",
                retry_after_s=RETRY_S,
            )

    def _refuses(self, has: int, more: int, most: int | None, owner: str) -> bool:
        refuses = most is not None and owner != NOBODY and has + more > most
        self.refused += refuses
        return refuses

    def session_began(self, owner: str) -> None:
        self._sessions[owner] += 1

    def session_ended(self, owner: str) -> None:
        _take(self._sessions, owner)

    def turn_began(self, owner: str) -> None:
        self._turns[owner] += 1

    def turn_ended(self, owner: str) -> None:
        _take(self._turns, owner)

    def by_holder(self) -> Mapping[str, tuple[int, int]]:
        """Live sessions and running turns of the holders that have the most of both."""
        most = [name for name, _ in (self._sessions + self._turns).most_common(SHOWN_MAX + 1) if name != NOBODY]
        return {name: (self._sessions[name], self._turns[name]) for name in most[:SHOWN_MAX]}


def _take(counter: Counter[str], owner: str) -> None:
    counter[owner] -= 1
    if not counter[owner]:
        del counter[owner]
