"""A made-up run of the demo, seeded: three engines, a long tail, refreshes, one repack, one kill."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from deploy.demo.recording import (
    BufferSeen,
    EngineChange,
    EngineStatus,
    GatewayStatus,
    Move,
    Note,
    Observation,
    Publish,
    Recording,
    Refresh,
    RelaySeen,
    Repack,
    Segment,
    SessionChange,
    SessionsSeen,
    Step,
)

ZERO = 1_800_000_000.0
RELAYS = ("relay-1", "relay-2", "relay-3")
ENGINES = ("engine-1", "engine-2", "engine-3")
STEP_S = 30.0
KILL_S = 95.0
AWAY_S = 25.0
REPACK_S = 150.0


@dataclass
class Made:
    """A run under construction; observations are sorted by time at the end."""

    seed: int
    wall_s: float = 270.0
    rng: random.Random = field(init=False)
    seen: list[tuple[float, Observation]] = field(default_factory=list)
    versions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ENGINES, 1))
    segments: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def add(self, t: float, observation: Observation) -> None:
        self.seen.append((t, observation))

    def publish(self, version: int, t: float) -> None:
        stall, sealed, broadcast = 0.08, 0.11, 0.35 + self.rng.random() / 10
        self.add(
            ZERO + t + broadcast,
            Publish(
                t=ZERO + t + broadcast,
                version=version,
                step=version - 1,
                stall_s=stall,
                sealed_s=sealed,
                broadcast_s=broadcast,
            ),
        )
        for order, relay in enumerate(RELAYS):
            held = ZERO + t + sealed + 0.1 * order
            self.add(
                held - 0.02,
                RelaySeen(t=held - 0.02, relay=relay, version=version, kind="transfer", bytes_done=5, bytes_total=9),
            )
            self.add(
                held,
                RelaySeen(t=held, relay=relay, version=version, kind="available", sealed_unix_s=ZERO + t + sealed),
            )

    def step(self, number: int, t: float) -> None:
        reward = min(0.95, 0.4 + 0.06 * number + self.rng.uniform(-0.05, 0.05))
        self.add(
            ZERO + t,
            Step(
                t=ZERO + t,
                step=number,
                version=number + 1,
                reward_mean=reward,
                loss=0.01 * self.rng.random(),
                staleness_mean=self.rng.random(),
                staleness_max=self.rng.randint(0, 2),
                tokens=5000,
                seconds=20.0,
                wait_s=8.0,
                trajectories=32,
            ),
        )

    def refresh(self, engine: str, version: int, t: float) -> None:
        event = Refresh(
            t_unix_s=ZERO + t,
            engine=engine,
            from_version=self.versions[engine],
            to_version=version,
            seconds=0.8,
            pause_s=0.7,
        )
        self.versions[engine] = version
        self.add(ZERO + t, event)

    def turn(self, session: str, turn: int, engine: str, t: float, seconds: float) -> float:
        """One turn; killed or repacked ones go on at another engine. Returns its end."""
        end = t + seconds
        if engine == "engine-2" and KILL_S <= t < KILL_S + AWAY_S:
            engine = "engine-1"
        for when, cause, source in ((KILL_S, "cut", "engine-2"), (REPACK_S, "move", "engine-3")):
            if engine == source and t < when < end:
                self._segment(session, turn, engine, t, when, "start", "cut" if cause == "cut" else "moved")
                self._segment(session, turn, "engine-1", when + 0.4, end + 0.6, cause, "finished")
                return end + 0.6
        self._segment(session, turn, engine, t, end, "start", "finished")
        return end

    def _segment(self, session: str, turn: int, engine: str, t0: float, t1: float, cause: str, end: str) -> None:
        self.segments += 1
        self.add(
            ZERO + t1,
            Segment(
                session_id=session,
                group_id=session.rsplit("-", 1)[0],
                turn=turn,
                engine=engine,
                version=self.versions[engine],
                started_unix_s=ZERO + t0,
                ended_unix_s=ZERO + t1,
                tokens=max(1, int((t1 - t0) * 25)),
                cause=cause,
                end=end,
            ),
        )


def make(seed: int = 1) -> Recording:
    """A whole run of 270 s."""
    made = Made(seed)
    made.add(ZERO, Note(t=ZERO, kind="phase", text="set-up done"))
    made.publish(1, -3.0)
    for number in range(1, 9):
        made.step(number, STEP_S * number)
        made.publish(number + 1, STEP_S * number)
    _rollouts(made)
    made.add(ZERO + KILL_S, Note(t=ZERO + KILL_S, kind="kill", text="engine-2 killed", engine="engine-2"))
    made.add(ZERO + KILL_S, EngineChange(t_unix_s=ZERO + KILL_S, engine="engine-2", state="dead", reason="reset"))
    moved = tuple(
        Move(session_id=f"group-{i}-0", source="engine-3", destination="engine-1", tokens=200) for i in range(2)
    )
    made.add(
        ZERO + REPACK_S,
        Repack(t_unix_s=ZERO + REPACK_S, version=4, moves=moved, freed=("engine-3",), reason="2 of 8 slots used"),
    )
    for tick in range(0, 270, 2):
        made.add(ZERO + tick, _status(made, float(tick)))
    return Recording(observation for _, observation in sorted(made.seen, key=lambda pair: pair[0]))


def _rollouts(made: Made) -> None:
    for index, engine in enumerate(ENGINES):
        begin = 0.5 + index
        version = 1
        while begin < made.wall_s - 40:
            ends = [_session(made, f"group-{made.segments}-{slot}", engine, begin + slot * 0.05) for slot in range(8)]
            version = 1 + int(max(ends) // STEP_S)
            begin = max(ends) + 1.0
            if engine == "engine-2" and KILL_S - 30 < begin < KILL_S:
                begin = KILL_S - 2.0  # so that the kill finds turns in flight
            elif engine == "engine-2" and KILL_S < begin < KILL_S + AWAY_S:
                begin = KILL_S + AWAY_S
            if version > made.versions[engine]:
                made.refresh(engine, version, begin)


def _session(made: Made, session: str, engine: str, t: float) -> float:
    env = made.rng.choice(("tool-chain", "reasoning"))
    made.add(
        ZERO + t, SessionChange(t_unix_s=ZERO + t, session_id=session, group_id="g", state="started", environment=env)
    )
    turns = 1 if env == "reasoning" else min(8, 1 + int(made.rng.expovariate(0.5)))
    for turn in range(turns):
        t = made.turn(session, turn, engine, t, 0.5 + made.rng.expovariate(0.6)) + 0.1
    reward = float(made.rng.random() < 0.4 + 0.5 * t / made.wall_s)
    done = SessionChange(
        t_unix_s=ZERO + t,
        session_id=session,
        group_id="g",
        state="finished",
        environment=env,
        reward=reward,
        turns=turns,
    )
    made.add(ZERO + t, done)
    return t


def _status(made: Made, t: float) -> GatewayStatus:
    engines = tuple(
        EngineStatus(
            name=name,
            version=made.versions[name],
            state="serving",
            running=made.rng.randint(0, 8),
            kv_usage=made.rng.random(),
        )
        for name in ENGINES
    )
    counters = {"trajectories_finished": 200, "turns_cut": 3, "turns_resumed": 3, "turns_lost": 0, "moves": 2}
    counters |= {"turns_mixed_version": 1, "repacks": 1, "tokens_generated": 27_000}
    histogram = {"0": 9000, "1": 4000, "2": 300}
    return GatewayStatus(
        t=ZERO + t,
        tokens_per_s=made.rng.uniform(50, 200),
        newest_version=1 + int(t // STEP_S),
        engines=engines,
        sessions=SessionsSeen(live=20, running_turns=14, queued=2),
        buffer=BufferSeen(trajectories=12),
        counters=counters,
        staleness={"generation": histogram, "finish": histogram, "use": histogram},
    )
