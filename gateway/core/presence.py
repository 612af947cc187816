"""Which live sessions are silent, and which of those something keeps: counted as it changes, for each placement asks.

Invariants:
- every noted session is either awake, with one entry in `_due`, or in `_silent`;
- an entry of `_due` is no later than the session's last turn, so a session is looked at once in `after_s`, and turns
  that come meanwhile cost nothing. Of thousands that are due together, as after a restart, the next looks have the
  rest: until then they count as running;
- whether something keeps a silent session is computed anew when it, a child of it, or a runner's lease changes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from gateway.core.admission import Sessions, is_silent
from gateway.core.sessions import SessionState
from gateway.core.types import SessionId

LOOKED_AT_ONCE = 1000
"""Sessions that one placement looks at: some three milliseconds."""


@dataclass(slots=True)
class Presence:
    """`find`: a live session. `counts`: sessions for training that have begun. `keeps`: whether something keeps a
    session that is silent."""

    after_s: float
    find: Callable[[SessionId], SessionState | None]
    counts: Collection[SessionId]
    keeps: Callable[[SessionState, float], bool] = lambda state, now: False
    _due: list[tuple[float, SessionId]] = field(default_factory=list)
    _silent: dict[SessionId, bool] = field(default_factory=dict)  # whether something keeps it
    _num: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})  # silent ones that count, kept or idle

    def sessions(self, now: float) -> Sessions:
        """At `now`, a Unix time."""
        self._look(now)
        idle = self._num[False]
        return Sessions(len(self.counts) - idle, self._num[True], idle)

    def note(self, state: SessionState) -> None:
        """The session is live from now on. One that neither counts nor keeps another is left out."""
        if state.spec.trains or state.spec.blocks_parent:
            heapq.heappush(self._due, (state.touched_unix_s, state.session_id))

    def woke(self, state: SessionState, now: float) -> None:
        """A turn of it began, or its child has ended."""
        if self._leave(state):
            self.note(state)
            self._parent_of(state, now)

    def gone(self, state: SessionState, now: float) -> None:
        """It is not live any more."""
        self._leave(state)
        self._parent_of(state, now)

    def look_again(self, state: SessionState, now: float) -> None:
        """Something of it changed that may keep it."""
        before = self._silent.get(state.session_id)
        if before is None or before == (kept := self.keeps(state, now)):
            return
        self._leave(state)
        self._enter(state, kept=kept)
        self._parent_of(state, now)

    def silent(self) -> list[SessionId]:
        return list(self._silent)

    def _look(self, now: float) -> None:
        again: list[SessionState] = []
        for _ in range(LOOKED_AT_ONCE):
            if not self._due or self._due[0][0] > now - self.after_s:
                break
            _, session_id = heapq.heappop(self._due)
            state = self.find(session_id)
            if state is None or session_id in self._silent:
                continue
            if is_silent(state, now, self.after_s):
                self._enter(state, kept=self.keeps(state, now))
                self._parent_of(state, now)
            else:
                again.append(state)
        for state in again:
            heapq.heappush(self._due, (now if state.running else state.touched_unix_s, state.session_id))

    def _enter(self, state: SessionState, *, kept: bool) -> None:
        self._silent[state.session_id] = kept
        self._num[kept] += state.session_id in self.counts

    def _leave(self, state: SessionState) -> bool:
        """Whether it was silent."""
        kept = self._silent.pop(state.session_id, None)
        if kept is not None:
            self._num[kept] -= state.session_id in self.counts
        return kept is not None

    def _parent_of(self, state: SessionState, now: float) -> None:
        parent = state.spec.parent_session_id
        if parent in self._silent and (found := self.find(parent)) is not None:
            self.look_again(found, now)
