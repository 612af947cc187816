"""Silent sessions are counted as a look at every session would count them, whatever happens."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from gateway.core.admission import Sessions, is_silent
from gateway.core.presence import Presence
from gateway.core.sessions import SessionState, Unrewarded
from gateway.core.types import SamplingParams, SessionId, TurnId, TurnRequest, Version
from tests.unit.gateway_core.helpers import session

AFTER_S = 10.0


@dataclass
class Room:
    """Live sessions, and a look at each of them."""

    rng: random.Random
    live: dict[SessionId, SessionState] = field(default_factory=dict)
    training: set[SessionId] = field(default_factory=set)
    leased: set[SessionId] = field(default_factory=set)
    now: float = 1000.0
    made: int = 0
    presence: Presence = field(init=False)

    def __post_init__(self) -> None:
        self.presence = Presence(AFTER_S, self.live.get, self.training, self.keeps)

    def keeps(self, state: SessionState, now: float) -> bool:
        children = [s for s in self.live.values() if s.spec.parent_session_id == state.session_id]
        blocking = [child for child in children if child.spec.blocks_parent]
        return (
            state.unrewarded is not None
            or state.session_id in self.leased
            or any(not is_silent(child, now, AFTER_S) or self.keeps(child, now) for child in blocking)
        )

    def counted(self) -> Sessions:
        silent = [s for s in self.live.values() if s.session_id in self.training and is_silent(s, self.now, AFTER_S)]
        kept = sum(self.keeps(state, self.now) for state in silent)
        return Sessions(len(self.training) - len(silent) + kept, kept, len(silent) - kept)

    def some(self) -> SessionState | None:
        return self.rng.choice([*self.live.values()]) if self.live else None

    # -- what happens

    def begins(self) -> None:
        parent, spec = self.some(), dict[str, Any]()
        if parent is not None and self.rng.random() < 0.6:
            spec = {"parent_session_id": parent.session_id, "blocks_parent": self.rng.random() < 0.7}
        self.made += 1
        state = session(f"s{self.made}", train=self.rng.random() < 0.8, **spec)
        state.touched_unix_s = self.now
        self.live[state.session_id] = state
        self.presence.note(state)
        if spec and parent is not None:  # as where a child is made: its parent may be kept from now on
            self.presence.look_again(parent, self.now)

    def turn_begins(self) -> None:
        if (state := self.some()) is not None and not state.running:
            turn_id = TurnId(f"t{self.rng.random()}")
            state.begin_turn(TurnRequest(turn_id, state.session_id, 0, (1,), SamplingParams(max_tokens=1)), self.now)
            self.presence.woke(state, self.now)
            state.version = Version(1)
            if state.spec.trains:
                self.training.add(state.session_id)

    def turn_ends(self) -> None:
        if (state := self.some()) is not None and state.running:
            state.drop_turn(next(iter(state.running)), self.now)

    def waits_for_its_reward(self) -> None:
        if (state := self.some()) is not None:
            state.unrewarded = None if state.unrewarded is not None else Unrewarded(None, 0.0)  # type: ignore[arg-type]
            self.presence.look_again(state, self.now)

    def leases_change(self) -> None:
        self.leased = set(self.rng.sample(sorted(self.live), min(2, len(self.live))))
        for session_id in self.presence.silent():
            self.presence.look_again(self.live[session_id], self.now)

    def ends(self) -> None:
        if (state := self.some()) is not None:
            del self.live[state.session_id]
            self.presence.gone(state, self.now)
            self.training.discard(state.session_id)

    def time_passes(self) -> None:
        self.now += self.rng.choice([0.5, 3.0, AFTER_S])


@pytest.mark.parametrize("seed", range(60))
def test_silent_sessions_are_counted_as_by_a_look_at_each(seed: int) -> None:
    room = Room(random.Random(seed))
    happenings = [room.begins, room.turn_begins, room.turn_ends, room.time_passes]
    rare = [room.waits_for_its_reward, room.leases_change, room.ends]
    for _ in range(150):
        room.rng.choice(happenings if room.rng.random() < 0.75 else rare)()
        assert room.presence.sessions(room.now) == room.counted()


def test_where_everybody_is_silent_at_once_nobody_waits_for_it() -> None:
    room = Room(random.Random(0))
    room.presence.after_s = 0.0
    room.begins()
    room.turn_begins()
    assert room.presence.sessions(room.now).running == len(room.training)


def test_of_many_that_are_silent_at_once_the_next_looks_have_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.core.presence.LOOKED_AT_ONCE", 2)
    room = Room(random.Random(0))
    for number in range(5):
        state = session(f"s{number}", train=True)
        state.touched_unix_s = room.now
        room.live[state.session_id] = state
        room.presence.note(state)
        room.training.add(state.session_id)
    room.now += AFTER_S
    assert [room.presence.sessions(room.now).idle for _ in range(4)] == [2, 4, 5, 5]
    assert room.presence.sessions(room.now) == room.counted()
