"""The fleet's machine: what its table says, and that a round over what changed decides all that a full one would."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import get_args

import pytest

from deploy.setup_env import ROOT
from gateway.core.fleet.config import FleetConfig, Mode
from gateway.core.fleet.events import (
    Added,
    ConnectionBroke,
    Described,
    Effect,
    Emptying,
    EngineEvent,
    Event,
    HoldBegan,
    Loaded,
    LoadFailed,
    NotAcquired,
    Noted,
    Polled,
    PollFailed,
    RelayReported,
    Removed,
    RoundBegan,
    SessionEnded,
    TurnEndedWell,
    TurnFailed,
    TurnLeft,
    VersionCame,
)
from gateway.core.fleet.intake import IntakeChange
from gateway.core.fleet.machine import HANDLERS, FleetMachine
from gateway.core.fleet.refresh import RefreshDecision
from gateway.core.fleet.state import WAYS, EngineState, EngineStatus, FleetState, TurnLoad
from gateway.core.placing.scheduler import Admission, Demand, Placement, place
from gateway.core.types import EngineName, SessionId, TurnId, Version
from tests.support.watched_fleet import check
from tests.unit.gateway_core.helpers import engine, fleet, session

E0 = EngineName("e0")
FREE = Admission(0, 0, None, 0)
NAMES = [EngineName(f"e{i}") for i in range(6)]
RELAYS = ["r0", "r1"]


def test_every_event_has_its_handler() -> None:
    def leaves(of: type[Event]) -> set[type[Event]]:
        below = set[type[Event]]().union(*(leaves(sub) for sub in of.__subclasses__()))
        return below or {of}

    assert set(HANDLERS) == leaves(Event)


def test_the_decision_has_the_table_of_an_engines_ways() -> None:
    page = (ROOT / "docs/decisions/28-the-fleet-is-one-machine.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (.+) \|$", page, re.MULTILINE)
    assert rows == [(*way, why) for way, why in WAYS.items()]


def test_an_event_of_an_engine_that_has_left_changes_nothing() -> None:
    machine = FleetMachine(FleetState(FleetConfig()))
    for event in (TurnLeft(E0, TurnId("t")), Loaded(E0, Version(1)), PollFailed(E0, "gone", 1), Removed(E0)):
        assert machine.handle(event, 1.0) == ()
    assert (machine.state.engines, machine.changed) == ({}, set())


def test_nobody_else_writes() -> None:
    code = compile("engine.leaving = True", "shell.py", "exec")
    with pytest.raises(AssertionError, match=r"gateway\.fleet\.shell writes leaving: only the machine may"):
        exec(code, {"__name__": "gateway.fleet.shell", "engine": engine()})


def test_a_response_to_a_request_from_before_the_suspicion_proves_nothing() -> None:
    machine = FleetMachine(fleet(e0 := engine("e0", 1, incarnation="i")))
    machine.handle(ConnectionBroke(E0), 10.0)
    described = Described(E0, 9.0, "i", "1", 0, 0)
    machine.handle(described, 11.0)
    assert e0.suspected
    machine.handle(Described(E0, 10.5, "i", "1", 0, 0), 11.0)
    assert not e0.suspected


def test_an_engine_that_this_gateway_paused_for_a_load_is_not_taken_for_unready() -> None:
    machine = FleetMachine(fleet(e0 := engine("e0", 1, incarnation="i", available=2)))
    [decision] = machine.handle(RoundBegan(everything=True), 10.0)[-1:]
    assert isinstance(decision, RefreshDecision)
    machine.handle(Loaded(E0, Version(2)), 11.0)
    machine.handle(Polled(E0, 9.0, "i", 0.0, 0, 0, ready=False), 12.0)
    assert (e0.status, e0.suspected) == ("serving", False)
    machine.handle(Polled(E0, 11.5, "i", 0.0, 0, 0, ready=False), 12.0)
    assert (e0.suspected, e0.ready) == (True, False)


def test_a_plan_for_a_version_is_made_once_intakes_have_closed_for_it() -> None:
    machine = FleetMachine(fleet(engine("e0", 1, [10], intake_open=True, admitted=1, relay="r")))
    assert machine.handle(RelayReported("r", Version(2), frozenset({Version(2)})), 1.0) == ()
    [change, came] = machine.handle(RoundBegan(), 1.0)
    assert (change, came) == (IntakeChange(E0, False, "version 2 is here; 1 admitted"), VersionCame())
    assert VersionCame() not in machine.handle(RoundBegan(everything=True), 2.0)


def test_an_engine_is_free_once_the_session_that_held_it_goes_on_under_another_version() -> None:
    held = engine("e0", 1, available=2, intake_closed_at=1.0)
    machine = FleetMachine(fleet(held, engine("e1", 2, intake_open=True)))
    demand = Demand(session("s", version=1), 5)
    machine.handle(demand.booking(Placement(E0, "")), 1.0)
    assert HoldBegan(E0) in machine.handle(RoundBegan(everything=True), 2.0)
    machine.handle(demand.booking(Placement(EngineName("e1"), "longer than its context")), 3.0)
    [decision] = machine.handle(RoundBegan(), 3.0)
    assert isinstance(decision, RefreshDecision)
    assert (decision.engine, decision.reason, decision.forced_sessions) == ("e0", "empty", ())


# -- a round over what changed


@dataclass
class Story:
    """What happens to a small fleet, by chance. All of it at one moment: the clock alone changes nothing."""

    seed: int
    machine: FleetMachine
    rng: random.Random
    now: float = 1000.0
    turns: dict[TurnId, EngineName] = field(default_factory=dict)
    loads: dict[EngineName, RefreshDecision] = field(default_factory=dict)
    sessions: list[Demand] = field(default_factory=list)
    numbers: int = 0
    ways: set[tuple[EngineStatus, EngineStatus]] = field(default_factory=set)

    def send(self, event: Event) -> None:
        name = event.engine if isinstance(event, EngineEvent) else None
        before = self.machine.state.engines.get(name) if name is not None else None
        status: EngineStatus | None = None if before is None else before.status
        for effect in self.machine.handle(event, self.now):
            if isinstance(effect, RefreshDecision):
                self.loads[effect.engine] = effect
            if isinstance(effect, Noted) and effect.state in get_args(EngineStatus) and status is not None:
                after: EngineStatus = effect.state  # type: ignore[assignment]
                if after != status:
                    self.ways.add((status, after))
                status = after

    def some(self) -> EngineState | None:
        engines = self.machine.state.sorted_engines()
        return self.rng.choice(engines) if engines else None


def comes_or_goes(of: Story) -> None:
    name = of.rng.choice(NAMES)
    if name in of.machine.state.engines:
        of.send(Removed(name))
        of.loads.pop(name, None)
        of.turns = {turn: there for turn, there in of.turns.items() if there != name}
    else:
        newest = Version(of.rng.randint(0, 2))
        held = frozenset(map(Version, range(1, newest + 1)))
        relay = of.rng.choice(RELAYS)
        of.send(Added(EngineState(name, "vllm", f"http://{name}", relay, loadable=held, available=newest)))


def responds(of: Story) -> None:
    if (one := of.some()) is None:
        return
    incarnation = of.rng.choice([one.incarnation or "i", one.incarnation or "i", "j"])
    began = of.now + of.rng.choice([-1.0, 1.0])
    of.send(Polled(one.name, began, incarnation, 0.1, 0, 0, ready=of.rng.random() < 0.9))
    if one.unlike(incarnation):
        label = of.rng.choice([str(one.version), str(one.version), "0", "1", "step"])
        fenced = of.rng.random() < 0.2
        of.send(Described(one.name, began, incarnation, label, 0, 1000, fenced=fenced))


def is_silent(of: Story) -> None:
    if (one := of.some()) is not None:
        of.send(PollFailed(one.name, "no response", 2))


def version_comes(of: Story) -> None:
    relay, held = of.rng.choice(RELAYS), frozenset(map(Version, range(1, of.rng.randint(1, 6))))
    of.send(RelayReported(relay, max(held, default=Version(0)), held))


def load_ends(of: Story) -> None:
    if not of.loads:
        return
    name = of.rng.choice(sorted(of.loads))
    decision, how = of.loads.pop(name), of.rng.random()
    if how < 0.7:
        of.send(Loaded(name, decision.to_version))
    elif how < 0.8:
        of.send(NotAcquired(name, decision.to_version))
    else:
        of.send(LoadFailed(name, decision, "it failed", of.rng.random() < 0.5, decision.served and how > 0.9))


def turn_is_placed(of: Story) -> None:
    of.numbers += 1
    if of.sessions and of.rng.random() < 0.4:
        held = of.rng.choice(of.sessions).session
    else:
        policy = of.rng.choice(["segment", "strict", "fail"])
        held = session(f"s{of.numbers}", f"g{of.rng.randint(0, 3)}", group_size=2, on_version_loss=policy)
    demand = Demand(held, of.rng.choice([10, 400]), turn_id=TurnId(f"t{of.numbers}"))
    found = place(demand, of.machine.state, FREE)
    if isinstance(found, Placement):
        of.send(demand.booking(found))
        of.sessions.append(demand)
        of.turns[TurnId(f"t{of.numbers}")] = found.engine


def turn_leaves(of: Story) -> None:
    if not of.turns:
        return
    turn_id = of.rng.choice(sorted(of.turns))
    name = of.turns.pop(turn_id)
    if of.rng.random() < 0.2:
        of.send(TurnFailed(name, turn_id, "reset", of.rng.random() < 0.5))
    else:
        of.send(TurnEndedWell(name))
    of.send(TurnLeft(name, turn_id))


def session_ends(of: Story) -> None:
    if of.sessions:
        ended = of.sessions.pop(of.rng.randrange(len(of.sessions))).session
        of.send(SessionEnded(ended, forgotten=True))


def is_emptied(of: Story) -> None:
    if (one := of.some()) is not None:
        of.send(Emptying(one.name, not one.leaving))


HAPPENINGS: list[tuple[Callable[[Story], None], int]] = [
    (turn_is_placed, 12),
    (turn_leaves, 9),
    (responds, 8),
    (load_ends, 4),
    (session_ends, 4),
    (version_comes, 2),
    (is_emptied, 2),
    (is_silent, 2),
    (comes_or_goes, 2),
]


def story(seed: int, mode: Mode) -> Story:
    rng = random.Random(seed)
    config = FleetConfig(mode, 4, intake_batch=rng.choice([2, 50]), intake_min_batch=rng.choice([1, 3]))
    of = Story(seed, FleetMachine(FleetState(config)), rng)
    for _ in range(4):
        comes_or_goes(of)
    return of


def decided(effects: object) -> list[Effect]:
    assert isinstance(effects, tuple)
    return [effect for effect in effects if isinstance(effect, Noted | IntakeChange | RefreshDecision | HoldBegan)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", get_args(Mode))
def test_a_round_over_what_changed_leaves_nothing_to_decide(mode: Mode) -> None:
    ways = set[tuple[EngineStatus, EngineStatus]]()
    for seed in range(40):
        of = story(seed, mode)
        happenings, weights = zip(*HAPPENINGS, strict=True)
        for happens in of.rng.choices(happenings, weights, k=120):
            happens(of)
            while of.machine.changed:
                of.send(RoundBegan())
            check(of.machine.state)
            full = FleetMachine(copy.deepcopy(of.machine.state))
            found = decided(full.handle(RoundBegan(everything=True), of.now))
            assert found == [], f"{mode}, seed {seed}: after {happens.__name__} a full round finds more"
        ways |= of.ways
    assert ways <= set(WAYS)


def test_a_turn_and_its_session_leave_nothing() -> None:
    machine = FleetMachine(fleet(engine("e0", 1, intake_open=True)))
    demand = Demand(session("s"), 5, turn_id=TurnId("t"))
    found = place(demand, machine.state, FREE)
    assert isinstance(found, Placement)
    machine.handle(demand.booking(found), 1.0)
    assert machine.state.engines[E0].turns == {TurnId("t"): TurnLoad(TurnId("t"), SessionId("s"), 5, 5)}
    assert machine.state.live_sessions(Version(1)) == ("s",)
    machine.handle(TurnLeft(E0, TurnId("t")), 2.0)
    machine.handle(SessionEnded(demand.session, forgotten=True), 2.0)
    assert (machine.state.engines[E0].turns, machine.state.session_versions) == ({}, {})
