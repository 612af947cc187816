"""The order of engines: whatever happens, decisions are those of a look at every engine, with the same reasons."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from gateway.core.fleet import prefixes
from gateway.core.fleet.config import FleetConfig
from gateway.core.fleet.intake import intake_changes
from gateway.core.fleet.order import Load, LoadOrder, Pool
from gateway.core.fleet.prefixes import BLOCK_TOKENS, chain
from gateway.core.fleet.refresh import refresh_decisions
from gateway.core.fleet.state import TRANSITIONS, EngineState, FleetState, TurnLoad, Wanted
from gateway.core.placing import scheduler
from gateway.core.placing.scheduler import Admission, Demand, Placement
from gateway.core.sessions import SessionSpec, SessionState
from gateway.core.types import EngineName, GroupId, SessionId, TurnId, Version
from tests.unit.gateway_core import scanned
from tests.unit.gateway_core.helpers import admit, engine, fleet

E0, E1, E2 = (EngineName(f"e{i}") for i in range(3))
EVENTS = 250
NAMES = [EngineName(f"e{i}") for i in range(8)]


@dataclass
class Twins:
    """One fleet twice: as it is, and as one that keeps no order. Everything happens to both."""

    rng: random.Random
    kept: FleetState
    scanned: FleetState
    sessions: list[tuple[SessionState, SessionState]] = field(default_factory=list)
    turns: list[tuple[TurnLoad, TurnLoad, EngineName]] = field(default_factory=list)
    now: float = 1000.0
    numbers: int = 0

    @property
    def both(self) -> tuple[FleetState, FleetState]:
        return self.kept, self.scanned

    def of(self, name: EngineName) -> tuple[EngineState, EngineState]:
        return self.kept.engines[name], self.scanned.engines[name]

    def some(self) -> EngineName | None:
        return self.rng.choice(sorted(self.kept.engines)) if self.kept.engines else None


def twins(seed: int) -> Twins:
    rng = random.Random(seed)
    config = FleetConfig(
        mode=rng.choice(["repack", "repack", "drain", "inflight", "barrier"]),
        max_running=rng.choice([2, 4, 64]),
        kv_max=rng.choice([0.5, 0.9]),
        intake_batch=rng.choice([2, 8, 64]),
        intake_age_s=rng.choice([20.0, 600.0]),
        version_hold_s=rng.choice([10.0, 120.0]),
        drain_max_s=rng.choice([5.0, 60.0]),
        pinned_versions_max=rng.choice([1, 4]),
    )
    made = Twins(rng, FleetState(config), scanned.ScannedFleet(config))
    for name in rng.sample(NAMES, rng.randint(0, len(NAMES))):
        join(made, name)
    return made


def join(of: Twins, name: EngineName) -> None:
    rng = of.rng
    version = rng.randint(1, 3)
    state = engine(
        name,
        version,
        kind=rng.choice(["vllm", "vllm", "vllm", "embedded"]),
        available=version + rng.choice([0, 0, 1]),
        intake_open=rng.random() < 0.6,
        kv_capacity_tokens=rng.choice([0, 400, 1000]),
        context_tokens=rng.choice([0, 0, 300]),
        incarnation=f"i{rng.randint(0, 1)}",
    )
    for into, one in zip(of.both, (state, copy.deepcopy(state)), strict=True):
        into.add(one)


# -- what happens


def engine_comes_or_goes(of: Twins) -> None:
    name = of.rng.choice(NAMES)
    if name not in of.kept.engines:
        join(of, name)
        return
    for into in of.both:
        into.remove(name)
    of.turns = [turn for turn in of.turns if turn[2] != name]


def status_changes(of: Twins) -> None:
    if (name := of.some()) is None:
        return
    ways = sorted(TRANSITIONS[of.kept.engines[name].status])
    to, loaded = of.rng.choice(ways), of.rng.choice([None, of.rng.randint(1, 5)])
    for one in of.of(name):
        one.to(to)
        if loaded is not None and to == "serving":
            one.loaded(Version(loaded))


def version_arrives(of: Twins) -> None:
    version = Version(of.rng.randint(1, 5))
    at = {name for name in of.kept.engines if of.rng.random() < 0.7}
    for into in of.both:
        into.newest = max(into.newest, version)
        for name in sorted(at):
            one = into.engines[name]
            one.available = max(one.available, version)
            one.loadable = frozenset({*(one.loadable or ()), version})


def engine_differs(of: Twins) -> None:
    if (name := of.some()) is None:
        return
    what: dict[str, Any] = of.rng.choice(
        [
            {"suspected": of.rng.random() < 0.5},
            {"leaving": of.rng.random() < 0.5},
            {"refresh_not_before": of.now + 5.0},
            {"given_up": Version(of.rng.randint(0, 4))},
            {"must_load": True},
            {"context_tokens": of.rng.choice([0, 300])},
        ]
    )
    batch, seconds = of.rng.choice([1, 4, 16]), of.rng.choice([0.1, 1.0])
    for one in of.of(name):
        one.curve.observe(batch, 100, seconds)
        for field_name, value in what.items():
            setattr(one, field_name, value)


def tokens_come(of: Twins) -> None:
    for a, b, _ in of.turns:
        more = of.rng.choice([0, 0, 1, 20])
        a.tokens += more
        b.tokens += more


def turn_leaves(of: Twins) -> None:
    if not of.turns:
        return
    a, _, name = of.turns.pop(of.rng.randrange(len(of.turns)))
    for one in of.of(name):
        assert one.leave(a.turn_id)


def session_ends(of: Twins) -> None:
    if not of.sessions:
        return
    one, _ = of.sessions.pop(of.rng.randrange(len(of.sessions)))
    group_too = of.rng.random() < 0.3
    for into in of.both:
        into.forget_session(one.session_id)
        into.pinned.note(one.session_id, None)
        if group_too:
            into.group_versions.session_ended(one.spec.group_id, 1)


def turn_is_placed(of: Twins) -> None:
    rng = of.rng
    if of.sessions and rng.random() < 0.5:
        sessions = rng.choice(of.sessions)
    else:
        of.numbers += 1
        spec = SessionSpec(
            SessionId(f"s{of.numbers}"),
            GroupId(f"g{rng.randint(0, 5)}"),
            group_size=rng.choice([1, 2, 4]),
            on_version_loss=rng.choice(["segment", "segment", "strict", "fail"]),
            min_version=Version(rng.choice([0, 0, 0, 2])),
            max_version=rng.choice([None, None, None, Version(3)]),
            ephemeral=rng.random() < 0.2,
            expected_output_tokens=rng.choice([None, 5]),
        )
        sessions = (SessionState(spec, 0.0, 0.0), SessionState(spec, 0.0, 0.0))
        if rng.random() < 0.1:
            sessions[0].version = sessions[1].version = Version(rng.randint(1, 4))
        of.sessions.append(sessions)
    prefix = [rng.choice([1, 2])] * (BLOCK_TOKENS * rng.randint(0, 3)) + [3] * (BLOCK_TOKENS * rng.randint(0, 2))
    prompt_tokens = rng.choice([1, 50, 300])
    common: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "avoid": frozenset(rng.sample(NAMES, rng.choice([0, 0, 1, 2]))),
        "prefix": chain(prefix),
        "kinds": rng.choice([None, None, frozenset({"vllm"})]),
        "tokens_max": prompt_tokens + rng.choice([0, 100, 400]),
        "reserved": frozenset(rng.sample(NAMES, rng.choice([0, 0, 0, 1]))),
        "turn_id": TurnId(f"t{of.numbers}-{rng.random()}"),
    }
    a, b = (Demand(session, **common) for session in sessions)
    admission = rng.choice([Admission(0, 0, None, 0), Admission(5, 5, 2, 1, 3.0)])
    there, expected = scheduler.reservable(a, of.kept), scanned.reservable(b, of.scanned)
    assert (there and there.name) == (expected and expected.name)
    found = scheduler.place(a, of.kept, admission)
    assert found == scanned.place(b, of.scanned, admission)
    if isinstance(found, Placement):
        load = TurnLoad(a.turn_id or TurnId(""), a.session.session_id, prompt_tokens, prompt_tokens)
        of.turns.append((load, replace(load), found.engine))
        for into, demand, entered in zip(of.both, (a, b), of.turns[-1], strict=False):
            admit(found, demand, into)
            into.engines[found.engine].enter(entered)  # type: ignore[arg-type]


def fleet_decides(of: Twins) -> None:
    of.now += of.rng.choice([0.1, 5.0, 60.0])
    insisted = {Version(v): Wanted(1, 10) for v in of.rng.sample(range(1, 5), of.rng.choice([0, 0, 0, 1]))}
    waiting = [of.now - 3.0] * of.rng.choice([0, 0, 2])
    for into in of.both:
        into.insisted, into.waiting_since = insisted, waiting
    assert intake_changes(of.kept, of.now) == intake_changes(of.scanned, of.now)
    assert refresh_decisions(of.kept, of.now) == refresh_decisions(of.scanned, of.now)


HAPPENINGS: list[tuple[Callable[[Twins], None], int]] = [
    (turn_is_placed, 12),
    (turn_leaves, 5),
    (tokens_come, 5),
    (fleet_decides, 4),
    (engine_differs, 3),
    (status_changes, 3),
    (session_ends, 2),
    (version_arrives, 1),
    (engine_comes_or_goes, 1),
]


@pytest.mark.parametrize("seed", range(150))
def test_whatever_happens_decisions_are_those_of_a_look_at_every_engine(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefixes, "BLOCKS_MAX", 12)
    of = twins(seed)
    happenings, weights = zip(*HAPPENINGS, strict=True)
    for happens in of.rng.choices(happenings, weights, k=EVENTS):
        happens(of)
        assert [e.load for e in of.kept.sorted_engines()] == [e.load for e in of.scanned.sorted_engines()]
        for version in map(Version, range(6)):
            assert of.kept.live_sessions(version) == of.scanned.live_sessions(version)


# -- the order itself


def test_the_least_loaded_is_found_though_tokens_came_that_nobody_told_of() -> None:
    state = fleet(engine("e0", 1, [10]), engine("e1", 1, [20]), engine("e2", 1, [30]))
    pool = Pool(Version(1))

    def least() -> str | None:
        found = state.least_loaded(pool, 1, lambda engine: True)
        return None if found is None else found.name

    assert least() == "e0"
    for name, tokens in ((E0, 15), (E1, 25)):
        [turn] = state.engines[name].turns.values()
        turn.tokens += tokens
    assert least() == "e0"
    [turn] = state.engines[E0].turns.values()
    turn.tokens = 100
    assert least() == "e2"
    state.engines[E2].leave(TurnId("e2-0"))
    assert least() == "e2"
    state.remove(E2)
    assert least() == "e1"
    state.engines[E1].to("refreshing")
    assert least() == "e0"
    state.engines[E0].loaded(Version(2))
    assert least() is None
    assert state.served() == [2]


def test_an_engine_is_forgotten_with_its_pools() -> None:
    order = LoadOrder()
    order.put(Load(0, 0, 0, E0), (Pool(Version(1)), Pool(Version(1), True)))
    order.put(Load(0, 0, 0, E1), (Pool(Version(2)),))
    assert order.pools() == [(2, False), (1, True), (1, False)]
    order.put(Load(3, 9, 0, E0), (Pool(Version(2)),))
    assert order.pools() == [(2, False)]
    assert [load.name for load in order.loads(Pool(Version(2)))] == [E1, E0]
    for name in (E0, E1):
        order.put(Load(0, 0, 0, name), ())
    assert order == LoadOrder()
