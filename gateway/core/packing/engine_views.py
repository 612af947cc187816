"""What the repack planner sees: the engines of one version, and what their sessions weigh together. Pure.

A publish has tens of thousands of turns to weigh at once. So turns are read into columns, one array for each number,
and summed by engine. An object for a session is made only where a plan names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from gateway.core.fleet.curves import SECONDS_PER_TOKEN
from gateway.core.fleet.state import FACTS, EngineState, FleetState, TurnLoad
from gateway.core.packing.lengths import Floats, Ints, TurnLengths
from gateway.core.types import EngineName, SessionId, TurnId, Version

HORIZONS = (0.25, 0.5, 1.0, 2.0)
"""Times at which a plan has to fit, in typical turns' lengths."""


class SessionLoad(msgspec.Struct, frozen=True, gc=False):
    """What a turn, or (`turn_id` None) a session that waits for a tool, weighs on its engine."""

    session_id: SessionId
    turn_id: TurnId | None
    kv_at: Sequence[int]  # KV tokens now and at each horizon; of one length in a plan, none below 0
    remaining_s: float = 0.0  # how long it will probably still hold its engine
    moves: int = 0
    stays: bool = False  # it has to end where it began

    @property
    def tokens(self) -> int:
        return self.kv_at[0]

    @property
    def key(self) -> str:
        """Tells it from others: a session may run several turns at once."""
        return self.turn_id or self.session_id


def steady(tokens: int) -> Sequence[int]:
    """KV tokens now and at each horizon, of what does not grow."""
    return (tokens,) * (1 + len(HORIZONS))


class Weight(msgspec.Struct, frozen=True):
    """What the sessions of an engine weigh together."""

    num: int  # of sessions
    num_turns: int  # of them, that run: others wait for a tool
    kv_at: Sequence[int]  # KV tokens now and at each horizon
    remaining_s: float = 0.0  # of the longest
    moves: int = 0  # of the one that has moved the most
    staying: int = 0  # how many have to end where they began

    @property
    def tokens(self) -> int:
        return self.kv_at[0]

    def plus(self, loads: Sequence[SessionLoad]) -> Weight:
        if not loads:
            return self
        return Weight(
            self.num + len(loads),
            self.num_turns + sum(load.turn_id is not None for load in loads),
            [sum(column) for column in zip(self.kv_at, *(load.kv_at for load in loads), strict=True)],
            max(self.remaining_s, *(load.remaining_s for load in loads)),
            max(self.moves, *(load.moves for load in loads)),
            self.staying + sum(load.stays for load in loads),
        )


NOTHING = Weight(0, 0, steady(0))


class EngineView(msgspec.Struct, frozen=True):
    """One engine as the planner sees it. `batch_max` is B and `kv_max` C_max, as learnt."""

    name: EngineName
    version: Version
    kv_capacity_tokens: int
    batch_max: int
    kv_max: float
    intake_open: bool
    queued: int
    weight: Weight  # of its sessions, running or waiting for a tool
    list_sessions: Callable[[], Sequence[SessionLoad]]
    inbound: Sequence[SessionLoad] = ()  # planned onto it, not there yet
    leaving: bool = False  # an earlier plan is emptying it


@dataclass(frozen=True, slots=True)
class Turns:
    """What turns weigh, in columns. `kv_at` has a row for now and for each horizon."""

    loads: Sequence[TurnLoad]
    kv_at: Ints
    remaining_s: Floats
    moves: Ints
    stays: npt.NDArray[np.bool_]

    def sessions(self, begin: int = 0, end: int | None = None) -> list[SessionLoad]:
        some = slice(begin, end)
        turns, kv_at = self.loads[some], self.kv_at[:, some].T.tolist()
        numbers = self.remaining_s[some].tolist(), self.moves[some].tolist(), self.stays[some].tolist()
        return list(map(SessionLoad, [t.session_id for t in turns], [t.turn_id for t in turns], kv_at, *numbers))

    def weights(self, nums: Ints) -> list[Weight]:
        """Of engines that have so many of the turns, one engine's after the other's."""
        some = nums > 0  # `reduceat` gives an empty stretch the number that follows it
        begins = (np.cumsum(nums) - nums)[some]
        columns = (
            np.add.reduceat(self.kv_at, begins, axis=1).T,
            np.maximum.reduceat(self.remaining_s, begins),
            np.maximum.reduceat(self.moves, begins),
            np.add.reduceat(self.stays, begins, dtype=np.int64),
        )
        full = nums[some].tolist()
        found = map(Weight, full, full, *(column.tolist() for column in columns))
        return [next(found) if any_turn else NOTHING for any_turn in some.tolist()]


def weigh(turns: Sequence[TurnLoad], *, lengths: TurnLengths, each_s: Floats, back_s: float, context: int) -> Turns:
    """What turns weigh now and will weigh. One that may outgrow the `context`, if that is not 0, stays.

    `each_s`: an engine's seconds per token. A call without session frees its KV at its end; any other session comes
    back for about `back_s`. What is forwarded as text is not known to grow.
    """
    tokens = np.array([turn.tokens for turn in turns], np.int64)
    facts = np.frombuffer(b"".join([turn.facts for turn in turns]), np.int64).reshape(-1, len(FACTS))
    prompt, tokens_max, expected, moves, ends, in_place, relayed = np.ascontiguousarray(facts.T)
    frees, forwarded = ends > 0, relayed > 0
    generated, left = tokens - prompt, tokens_max - tokens
    remaining = lengths.remaining(generated, left, expected)
    ahead = np.rint(np.multiply(HORIZONS, lengths.mean)).astype(int) if lengths.known else remaining
    rows = np.broadcast_to(ahead[:, None] if lengths.known else ahead, (len(HORIZONS), len(turns)))
    growth = lengths.growth(tokens, generated, left, rows, frees=frees, expected=expected)
    return Turns(
        turns,
        np.vstack((tokens, tokens + np.where(forwarded, 0, growth))),
        np.where(forwarded, 0.0, np.maximum(remaining * each_s, np.where(frees, 0.0, back_s))),
        moves,
        forwarded | (in_place > 0) | (context > 0) & (tokens_max > context),
    )


Loads = Mapping[EngineName, Sequence[SessionLoad]]


def engine_views(
    engines: Sequence[EngineState],
    fleet: FleetState,
    lengths: TurnLengths,
    *,
    waiting: Loads,
    inbound: Loads,
    back_s: float,
    context: int,
) -> list[EngineView]:
    """Engines with what is on them. `context`: the smallest of their version."""
    nums = np.array([len(engine.turns) for engine in engines], np.int64)
    pace = [engine.curve.seconds_per_token(len(engine.turns)) or SECONDS_PER_TOKEN for engine in engines]
    loads = [load for engine in engines for load in engine.turns.values()]
    turns = weigh(loads, lengths=lengths, each_s=np.repeat(pace, nums), back_s=back_s, context=context)
    views, ends = list[EngineView](), np.cumsum(nums)
    stretches = zip((ends - nums).tolist(), ends.tolist(), strict=True)
    for engine, weight, (begin, end) in zip(engines, turns.weights(nums), stretches, strict=True):
        idle = waiting.get(engine.name, ())
        views.append(
            EngineView(
                engine.name,
                engine.version,
                engine.kv_capacity_tokens,
                engine.curve.roofline_batch(fleet.config.max_running),
                fleet.kv_max(engine),
                engine.intake_open,
                engine.waiting_reported,
                weight.plus(idle),
                partial(_sessions, turns, begin, end, idle),
                inbound.get(engine.name, ()),
                engine.leaving,
            )
        )
    return views


def _sessions(turns: Turns, begin: int, end: int, waiting: Sequence[SessionLoad]) -> Sequence[SessionLoad]:
    return [*turns.sessions(begin, end), *waiting]
