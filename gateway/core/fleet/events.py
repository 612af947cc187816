"""What happens to the fleet, and what follows: the events that `machine` takes, and the effects that it returns.

An event of an engine names it; one that has left the fleet meanwhile is as if it had not happened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from gateway.core.fleet.intake import IntakeChange
from gateway.core.fleet.refresh import RefreshDecision
from gateway.core.fleet.state import EngineState, TurnLoad, Wanted
from gateway.core.sessions import SessionState
from gateway.core.types import EngineName, TurnId, Version


class Event(msgspec.Struct, frozen=True, gc=False):
    """Something that happened."""


class EngineEvent(Event, frozen=True, gc=False):
    engine: EngineName


# -- engines come, go, and report


class Added(Event, frozen=True, gc=False):
    """`state`: with what its relay has reported so far."""

    state: EngineState


class Removed(EngineEvent, frozen=True, gc=False):
    """By an operator, or since its registration ended."""


class Polled(EngineEvent, frozen=True, gc=False):
    """It reported its state, on a request that was sent at `began`."""

    began: float
    incarnation: str
    kv_usage: float
    running: int
    waiting: int
    ready: bool = True


class Described(EngineEvent, frozen=True, gc=False):
    """It reported what it is and holds, too, since it is not known as this incarnation, or not trusted."""

    began: float
    incarnation: str
    label: str  # of its weights
    context_tokens: int
    kv_capacity_tokens: int
    ready: bool = True
    fenced: bool = False
    seeds: bool = True


class DtypeReported(EngineEvent, frozen=True, gc=False):
    dtype: str


class PollFailed(EngineEvent, frozen=True, gc=False):
    """`dead_after`: polls that fail in a row before it counts as dead."""

    error: str
    dead_after: int


class ConnectionBroke(EngineEvent, frozen=True, gc=False):
    """To an engine that may have ended, or restarted, with it."""


class RelayReported(Event, frozen=True, gc=False):
    """What the relay holds, for the first time or since that changed. `version`: the one that came to it, if any."""

    relay: str
    version: Version
    held: frozenset[Version] | None


# -- loads


class Loaded(EngineEvent, frozen=True, gc=False):
    version: Version


class NotAcquired(EngineEvent, frozen=True, gc=False):
    """The older version that it was to load again: nothing was done to it."""

    version: Version


class LoadFailed(EngineEvent, frozen=True, gc=False):
    """`by_engine`: by fault of the engine or the snapshot, not of the relay or the network. `untouched`: it still
    holds what it served before, whole."""

    decision: RefreshDecision
    error: str
    by_engine: bool
    untouched: bool


class Emptying(EngineEvent, frozen=True, gc=False):
    """A plan moves its turns elsewhere; or (not `began`) every such move has ended, however."""

    began: bool


# -- turns


class Placed(EngineEvent, frozen=True, gc=False):
    """A placement is booked. `session` None: a request that is forwarded as text. `load` None: no turn runs yet."""

    session: SessionState | None
    load: TurnLoad | None
    prefix: Sequence[int] = ()
    turn_id: TurnId | None = None
    reason: str = ""


class TurnEntered(EngineEvent, frozen=True, gc=False):
    load: TurnLoad


class TurnLeft(EngineEvent, frozen=True, gc=False):
    """May be sent for a turn that never ran there."""

    turn_id: TurnId


class TurnFailed(EngineEvent, frozen=True, gc=False):
    """Its stream was cut. `to_blame`: the engine is, and neither its end, nor a pause, nor that it is full."""

    turn_id: TurnId
    cut: str
    to_blame: bool


class TurnEndedWell(EngineEvent, frozen=True, gc=False):
    pass


class TokensCame(EngineEvent, frozen=True, gc=False):
    """So many tokens of one turn, `seconds` after those before them; while `batch` turns ran, if not all its turns."""

    tokens: int
    seconds: float
    batch: int | None = None


# -- sessions


class SessionMade(Event, frozen=True, gc=False):
    """It has no turn yet."""

    session: SessionState


class SessionRestored(Event, frozen=True, gc=False):
    """A session of an earlier life of the gateway, on its version."""

    session: SessionState


class SessionEnded(Event, frozen=True, gc=False):
    """It will have no more turns; `forgotten`: it is not live any more, either."""

    session: SessionState
    forgotten: bool = False


# -- what is learnt, and the round of decisions


class Learnt(Event, frozen=True, gc=False):
    """Tokens that a turn typically generates, or the price of prefill, as measured."""

    turn_tokens: float | None = None
    prefill_tokens_per_s: float | None = None


class RoundBegan(Event, frozen=True, gc=False):
    """It is time to decide, for the engines that changed, or for all: by the clock alone ages and holds run out.

    `insisted`: versions without which turns wait. `waiting_since`: when turns began to wait that any engine with room
    would take."""

    insisted: Mapping[Version, Wanted] = {}
    waiting_since: Sequence[float] = ()
    everything: bool = False


# -- effects


class Noted(msgspec.Struct, frozen=True):
    """For the timeline, unless `state` is empty, and for the log, unless `text` is: it follows the engine's name."""

    engine: EngineName
    state: str = ""
    reason: str = ""
    text: str = ""
    warns: bool = False
    version: Version | None = None  # that it is about; None: the engine's


class PollMissed(msgspec.Struct, frozen=True):
    """The first of several polls in a row failed: for the timeline, since the next that succeeds ends it."""

    engine: EngineName
    error: str


class PollWanted(msgspec.Struct, frozen=True):
    """Another poll, before the interval is over."""

    engine: EngineName
    after_s: float = 0.0


class HoldBegan(msgspec.Struct, frozen=True):
    """It stays on its version for live sessions."""

    engine: EngineName


class Emptied(msgspec.Struct, frozen=True):
    """The last turn has left an engine that does not serve: it may load now."""

    engine: EngineName


class VersionCame(msgspec.Struct, frozen=True):
    """Some engine could load a newer version. By now intakes have closed for it, so that a plan can be made."""


Effect = Noted | PollMissed | PollWanted | HoldBegan | Emptied | VersionCame | IntakeChange | RefreshDecision
