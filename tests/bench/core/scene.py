"""A large fleet in the middle of its work, by seeded chance: engines, turns, several versions, prefixes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gateway.core.fleet.config import FleetConfig
from gateway.core.fleet.events import TurnEntered, TurnLeft
from gateway.core.fleet.machine import FleetMachine
from gateway.core.fleet.prefixes import chain
from gateway.core.fleet.state import EngineState, FleetState, TurnLoad
from gateway.core.placing.scheduler import Admission, Demand, Placement, place
from gateway.core.sessions import SessionSpec, SessionState
from gateway.core.types import EngineName, GroupId, SessionId, TurnId, Version

ENGINES = 1024
NEWEST = Version(8)
KV_TOKENS = 262_144
MAX_RUNNING = 64
GROUP = 8
SYSTEM_TOKENS, PROMPT_TOKENS = 1024, 256
"""A system prompt that all share, and a task that its group shares."""
SEVERAL: Mapping[Version, tuple[float, int]] = {
    NEWEST: (0.4, 32),
    Version(NEWEST - 1): (0.3, 18),
    Version(NEWEST - 2): (0.2, 8),
    Version(NEWEST - 3): (0.1, 2),
}
"""By version: the share of engines that serve it, and the turns of each: 20 on the mean. The newest takes sessions."""
ONE: Mapping[Version, tuple[float, int]] = {NEWEST: (1.0, 20)}
"""All engines on one version, with open intakes: the most that a placement can choose from."""
FREE = Admission(running=0, buffered=0, reader_batch=None, staleness_max=4)


@dataclass(slots=True)
class Turn:
    session: SessionState
    load: TurnLoad
    engine: EngineState


@dataclass(slots=True)
class Scene:
    """`turns`: that run. What happens is drawn from `rng`."""

    machine: FleetMachine
    rng: random.Random
    turns: list[Turn] = field(default_factory=list)
    idle: list[SessionState] = field(default_factory=list)  # sessions that wait for a tool
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    groups: dict[int, tuple[int, ...]] = field(default_factory=dict)  # the blocks of each group's prompt

    @property
    def fleet(self) -> FleetState:
        return self.machine.state

    def enter(self, session: SessionState, engine: EngineState, tokens: int) -> None:
        turn_id = TurnId(f"t{next(self.numbers)}")
        load = TurnLoad(turn_id, session.session_id, tokens, tokens + 4096, generated=tokens // 4)
        self.machine.handle(TurnEntered(engine.name, load), 0.0)
        self.turns.append(Turn(session, load, engine))

    def end_one(self) -> None:
        """Some turn ends, and its session waits for a tool."""
        at = self.rng.randrange(len(self.turns))
        self.turns[at], self.turns[-1] = self.turns[-1], self.turns[at]
        turn = self.turns.pop()
        self.machine.handle(TurnLeft(turn.engine.name, turn.load.turn_id), 0.0)
        self.idle.append(turn.session)

    def grow(self, turns: int, tokens: int) -> None:
        """Tokens come."""
        for turn in self.rng.sample(self.turns, turns):
            turn.load.tokens += tokens

    def demand(self, *, new: bool) -> Demand:
        """A turn that is to be placed: of a session that begins, or that comes back from its tool."""
        if new or not self.idle:
            number = next(self.numbers)
            group = number // GROUP
            spec = SessionSpec(SessionId(f"s{number}"), GroupId(f"g{group}"), group_size=GROUP)
            session = SessionState(spec, 0.0, 0.0)
            return Demand(session, SYSTEM_TOKENS + PROMPT_TOKENS, prefix=self._blocks(group))
        at = self.rng.randrange(len(self.idle))
        self.idle[at], self.idle[-1] = self.idle[-1], self.idle[at]
        return Demand(self.idle.pop(), self.rng.randrange(1_000, 6_000))

    def too_long(self) -> Demand:
        """A new session that no engine has KV for."""
        demand = self.demand(new=True)
        return Demand(demand.session, KV_TOKENS, prefix=demand.prefix)

    def _blocks(self, group: int) -> tuple[int, ...]:
        if group not in self.groups:
            prompt = [*range(SYSTEM_TOKENS), *(group * PROMPT_TOKENS + i for i in range(PROMPT_TOKENS))]
            self.groups[group] = chain(prompt)
        return self.groups[group]

    def book(self, demand: Demand, found: Placement) -> None:
        self.machine.handle(demand.booking(found), 0.0)
        self.enter(demand.session, self.fleet.engines[found.engine], demand.prompt_tokens)

    def place(self, demand: Demand) -> Placement:
        found = place(demand, self.fleet, FREE)
        assert isinstance(found, Placement), found
        return found


def scene(versions: Mapping[Version, tuple[float, int]], *, engines: int = ENGINES, seed: int = 0) -> Scene:
    """Each engine has its version's turns, by chance some more or fewer, and holds the system prompt."""
    rng = random.Random(seed)
    fleet = FleetState(FleetConfig(max_running=MAX_RUNNING, intake_batch=1 << 30), newest=NEWEST)
    made = Scene(FleetMachine(fleet), rng)
    system = chain(range(SYSTEM_TOKENS))
    names = iter(sorted(f"e{i:04d}" for i in range(engines)))
    for version, (share, turns) in versions.items():
        for name in itertools.islice(names, round(share * engines)):
            _add(made, EngineName(name), version, turns, system)
    fleet.served()  # engines are in order before anything is measured, as in a fleet that has been at work
    return made


def _add(made: Scene, name: EngineName, version: Version, turns: int, system: Sequence[int]) -> None:
    state = EngineState(name, "vllm", f"http://{name}", relay=f"relay-{name}", status="serving", version=version)
    state.incarnation, state.kv_capacity_tokens, state.context_tokens = "i", KV_TOKENS, 32_768
    state.available, state.loadable = NEWEST, frozenset({NEWEST})
    state.intake_open = version == NEWEST
    made.fleet.add(state)
    made.fleet.prefixes.sent(system, name, state.holding)
    spread = max(turns // 4, 2)  # of the oldest version some engines are empty
    for _ in range(made.rng.randint(turns - spread, turns + spread)):
        number = next(made.numbers)
        session = SessionState(SessionSpec(SessionId(f"s{number}"), GroupId(f"g{number}")), 0.0, 0.0)
        session.version, session.engine = version, name
        made.fleet.note_session(session.session_id, version, "segment")
        made.enter(session, state, made.rng.randint(500, 7_500))
    state.admitted = len(state.turns)
