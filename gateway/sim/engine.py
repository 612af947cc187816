"""An engine under virtual time: continuous batching by a decode curve, prefill before decode. Pure.

Invariants:
- the clock only goes forward; `advance` updates all counts to it before anything changes;
- a turn decodes only after its whole prompt was prefilled here; a turn that leaves keeps its tokens and loses its KV.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.core.fleet.events import Event, TokensCame
from gateway.core.fleet.state import EngineState, TurnLoad
from gateway.core.sessions import SessionState
from gateway.core.types import EngineName, TurnId


@dataclass(slots=True, eq=False)
class SimTurn:
    """`left`: tokens still to come, known to the simulation only."""

    load: TurnLoad
    session: SessionState
    length: int
    started_at: float
    left: float
    generated: float = 0.0
    engine: EngineName | None = None
    requested_at: float = 0.0  # by its client
    left_at: float = 0.0  # when it last left an engine

    @property
    def turn_id(self) -> TurnId:
        return self.load.turn_id

    def grow(self, tokens: float) -> None:
        before = int(self.generated)
        self.generated += tokens
        self.left -= tokens
        self.load.tokens += int(self.generated) - before


@dataclass(slots=True)
class SimEngine:
    """`decode_s(batch)`: seconds of one decode step. Counts are since the start."""

    state: EngineState
    send: Callable[[Event], object]  # to the machine
    decode_s: Callable[[int], float]
    prefill_tokens_per_s: float
    now: float = 0.0
    decoded_tokens: float = 0.0
    kv_share_s: float = 0.0
    running_s: float = 0.0  # summed over turns, from the end of their prefill
    idle_s: float = 0.0
    running: dict[TurnId, SimTurn] = field(default_factory=dict)
    _prefill: deque[tuple[SimTurn, float]] = field(default_factory=deque)  # with the seconds still to go
    _progress: float = 0.0  # tokens that a turn here since the start would have
    _ends: list[tuple[float, TurnId]] = field(default_factory=list)

    def enter(self, turn: SimTurn) -> None:
        self._prefill.append((turn, turn.load.tokens / self.prefill_tokens_per_s))

    def leave(self, turn: SimTurn) -> None:
        self.running.pop(turn.turn_id, None)
        self._prefill = deque((t, s) for t, s in self._prefill if t is not turn)

    def next_at(self) -> float | None:
        """The time of the next event here: a prefill's end or a turn's, if any."""
        if self._prefill:
            return self.now + self._prefill[0][1]
        end = self._first_end()
        if end is None:
            return None
        return self.now + max(0.0, end - self._progress) * self.decode_s(len(self.running))

    def advance(self, now: float) -> list[SimTurn]:
        """Advances the clock to `now`, at most `next_at`; returns turns that were prefilled or ended."""
        passed, self.now = now - self.now, now
        if self.state.kv_capacity_tokens:
            self.kv_share_s += passed * self.state.tokens / self.state.kv_capacity_tokens
        self.running_s += passed * len(self.running)
        if self._prefill:
            turn, left = self._prefill[0]
            self._prefill[0] = (turn, left - passed)
            if left - passed > 1e-9:
                return []
            self._prefill.popleft()
            self.running[turn.turn_id] = turn
            heapq.heappush(self._ends, (self._progress + turn.left, turn.turn_id))
            return [turn]
        if not self.running:
            self.idle_s += passed
            return []
        return self._decode(passed)

    def _decode(self, passed: float) -> list[SimTurn]:
        batch = len(self.running)
        tokens = passed / self.decode_s(batch)
        if tokens > 0:
            self._progress += tokens
            self.decoded_tokens += batch * tokens
            self.send(TokensCame(self.state.name, max(1, round(tokens)), passed, batch))
            for turn in self.running.values():
                turn.grow(tokens)
        ended = []
        while (end := self._first_end()) is not None and end <= self._progress + 1e-6:
            _, turn_id = heapq.heappop(self._ends)
            ended.append(self.running.pop(turn_id))
        return ended

    def _first_end(self) -> float | None:
        while self._ends:
            at, turn_id = self._ends[0]
            turn = self.running.get(turn_id)
            if turn is not None and abs(self._progress + turn.left - at) < 1e-3:
                return at
            heapq.heappop(self._ends)
        return None
