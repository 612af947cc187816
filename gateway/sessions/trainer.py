"""The trainer as the gateway sees it: the batches that it takes, their staleness, and how many sessions that admits.

Several readers may sample: `core.admission` decides whose batches count.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gateway.config import GatewayConfig
from gateway.core.admission import (
    READER_S,
    Keeper,
    Reader,
    WaitingGroup,
    is_silent,
    stranded,
    waiting_groups,
)
from gateway.core.experience_commands import DeclareReader
from gateway.core.fleet.state import FleetState
from gateway.core.placing.retry_after import Pace, retry_for_a_batch
from gateway.core.placing.scheduler import Admission
from gateway.core.reward_curve import RewardCurve
from gateway.core.selection import ANY, Bound, Entry
from gateway.core.sessions import SessionState
from gateway.experience import ExperienceBuffer
from gateway.experience.readers import KeptReader, ReaderStore
from gateway.runtime.clock import unix_s
from gateway.sessions.registry import SessionRegistry
from gateway.tasks import PromptPool
from protos.foreign_text import quoted

log = logging.getLogger(__name__)

GROUPS_SHOWN_MAX = 20
"""Waiting groups in the status."""
NOTES_MAX = 20
"""Readers of which a note is kept for the status; the oldest goes first."""
NOTE_AGAIN_S = 600.0
"""Between two lines in the log about one reader."""
LEASES_LOOK_S = 5.0
"""Between two looks at which samples runners have."""
LOOKED_AT_ONCE = 1000
"""Silent sessions, without a pause: some milliseconds."""


@dataclass(slots=True)
class Staleness:
    """Tokens (generation) and trajectories (finish, use) by how many versions they were behind."""

    generation: dict[int, int] = field(default_factory=dict)
    finish: dict[int, int] = field(default_factory=dict)
    use: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AdmissionStatus:
    """What delays new sessions: `running` and `buffered` against the `bound` of `reader` (null: none has sampled
    lately).

    `idle`: sessions that do not count, since nobody has used them for --idle-after-s; `silent`: those of `running` that
    count only for a runner's lease, a child or their reward. `excess`: how many there are beyond the bound, as when
    idle ones came back.
    `stranded`: buffered trajectories of groups that lack a member and have none under way; they are not counted.
    `waiting_groups`: what each group that lacks members waits for. `notes`: by reader, why it got nothing at its last
    sample, or what is wrong with the version that it says.
    """

    reader: str | None
    batch: int | None
    bound: int | None
    running: int
    buffered: int
    stranded: int
    full: bool
    waiting_groups: Sequence[str]
    silent: int
    idle: int
    excess: int
    notes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Note:
    """What is wrong with what a reader samples; empty: nothing any more. Times of the monotonic clock."""

    text: str
    noted_at: float
    logged_at: float

    def shown(self, now: float) -> bool:
        return bool(self.text) and now - self.noted_at <= READER_S


class Trainer:
    """Nothing bounds admission before a reader has sampled.

    What readers declare is in the experience's own state: gateways that share a log admit alike. For a gateway that is
    alone a `store` keeps the bound: sessions of its next life wait, even before the trainer is back.
    """

    def __init__(
        self,
        config: GatewayConfig,
        fleet: FleetState,
        live: SessionRegistry,
        buffer: ExperienceBuffer,
        store: ReaderStore | None = None,
    ) -> None:
        self.staleness = Staleness()
        self.rewards = RewardCurve()  # of sessions for training, as they finish
        self._said = 0  # the version that a reader reported last
        self._config, self._fleet, self._live, self._buffer = config, fleet, live, buffer
        self._store = None if buffer.is_shared else store
        self._notes: dict[str, Note] = {}
        self._leased: frozenset[tuple[str, int]] = frozenset()  # group and index of samples that runners have
        if self._store is not None and (kept := self._store.reader) is not None:
            buffer.declare(DeclareReader(kept.name, kept.batch, kept.group_size, kept.staleness_max, waits=True))
        self._took = Pace()
        live.presence.keeps = lambda state, now: self._silent_kept_by(state, now, config.idle_after_s) is not None

    async def follow_leases(self, tasks: PromptPool) -> None:
        """Which samples runners have, until cancelled."""
        while True:
            before, self._leased = self._leased, await tasks.leased() if tasks.statistics().leases else frozenset()
            if self._leased != before:
                await self._look_again()
            await asyncio.sleep(LEASES_LOOK_S)

    async def _look_again(self) -> None:
        """Other samples are leased: other sessions are kept."""
        for number, session_id in enumerate(self._live.presence.silent(), 1):
            if (state := self._live.find(session_id)) is not None:
                self._live.presence.look_again(state, unix_s())
            if number % LOOKED_AT_ONCE == 0:
                await asyncio.sleep(0)

    @property
    def version(self) -> int:
        """The newest version that a relay announced, also to another gateway over the same log, or the one that the
        reader says that bounds admission, if that is more; while none does, the one that a reader said last."""
        counting = self._counting()
        return max(counting[0].version if counting else self._said, self._newest)

    @property
    def _newest(self) -> int:
        return max(self._fleet.newest, self._buffer.own.version)

    @property
    def own_bound(self) -> Bound:
        """Beyond it a trajectory is evicted: the newest of its tokens is too far behind what relays announced."""
        return Bound(self._newest, self._config.fleet.staleness_max, by_token=True)

    def requested(
        self,
        batch: int,
        version: int,
        staleness_max: int | None,
        *,
        reader: str = "",
        group_size: int | None = None,
        waits: bool = True,
        by_token: bool = False,
    ) -> None:
        """A reader requests a batch of trajectories; `waits`: until it is complete."""
        bound = self._config.fleet.staleness_max if staleness_max is None else staleness_max
        self._buffer.declare(DeclareReader(reader, batch, group_size, bound, waits, version, by_token))
        if self._store is not None and (counting := self._counting()):
            found = counting[0]
            self._store.keep(KeptReader(found.name, found.batch, found.group_size, found.staleness_max))
        self.published(version)

    def published(self, version: int) -> None:
        """The newest version, as a reader reports it."""
        self._said = version

    def note(self, reader: str, text: str) -> None:
        """What is wrong with what the reader samples, for the log and the status; empty: nothing any more."""
        now, before = time.monotonic(), self._notes.pop(reader, None)
        if before is None and not text:
            return
        logged_at = -math.inf if before is None else before.logged_at
        if text and now - logged_at >= NOTE_AGAIN_S:
            log.warning("reader %s: %s", quoted(reader), text)
            logged_at = now
        self._notes[reader] = Note(text, now, logged_at)
        while len(self._notes) > NOTES_MAX:
            del self._notes[next(iter(self._notes))]

    def took(self, version: int, entries: Sequence[Entry]) -> None:
        """A reader got trajectories: staleness at use, by the oldest version of each."""
        if entries:
            self._took.happened(time.monotonic())
        for entry in entries:
            oldest = entry.oldest_version if entry.facts.versions else version
            count(self.staleness.use, version - oldest)

    def admission(self) -> Admission:
        """Running and buffered trajectories against what the trainer will use. Running ones are counted only once a
        reader has sampled, and stranded ones only where they decide: with thousands of sessions, these counts are most
        of a placement's cost."""
        return self._admission(self._counting())

    def _counting(self) -> list[Reader]:
        return self._buffer.readers.counting(self._buffer.now(), self._buffer.holds_lease)

    def _admission(self, counting: Sequence[Reader]) -> Admission:
        bounds, next_s = self._bounds(counting), retry_for_a_batch(self._took, time.monotonic())
        buffered = self._buffer.num_unused(bounds)
        if not counting:
            return Admission(0, buffered, None, self._config.fleet.staleness_max, next_s)
        reader, sessions = counting[0], self._live.presence.sessions(unix_s())
        found = Admission(
            sessions.running,
            buffered,
            reader.batch,
            reader.staleness_max,
            next_s,
            sessions.silent,
            sessions.idle,
            self._config.idle_after_s,
        )
        if found.full and (held := self._stranded(reader, bounds)):
            return replace(found, buffered=buffered - held)
        return found

    def status(self) -> AdmissionStatus:
        counting, now = self._counting(), time.monotonic()
        found, bounds = self._admission(counting), self._bounds(counting)
        reader, sessions = (counting[0] if counting else None), self._live.presence.sessions(unix_s())
        held = 0 if reader is None else self._stranded(reader, bounds)
        waiting = [] if reader is None else self._waiting(reader, bounds)
        return AdmissionStatus(
            reader=None if reader is None else reader.name,
            batch=None if reader is None else reader.batch,
            bound=None if reader is None else reader.bound,
            running=sessions.running,
            buffered=self._buffer.num_unused(bounds) - held,
            stranded=held,
            full=found.full,
            waiting_groups=[str(group) for group in waiting[:GROUPS_SHOWN_MAX]],
            silent=sessions.silent,
            idle=sessions.idle,
            excess=max(0, found.over),
            notes={name: note.text for name, note in self._notes.items() if note.shown(now)},
        )

    def _bounds(self, counting: Sequence[Reader]) -> Sequence[Bound]:
        """What the readers that count may take; anything, while there are none."""
        return [reader.takes(self._newest) for reader in counting] or [ANY]

    def _stranded(self, reader: Reader, bounds: Sequence[Bound]) -> int:
        """Trajectories in the buffer that the reader could not take."""
        if reader.group_size is None:
            return 0
        buffered, closed = self._buffer.groups(bounds)
        return stranded(buffered, closed, reader.group_size, self._live.training.keys())

    def _waiting(self, reader: Reader, bounds: Sequence[Bound]) -> list[WaitingGroup]:
        if reader.group_size is None:
            return []
        buffered, closed = self._buffer.groups(bounds)
        return waiting_groups(buffered, closed, reader.group_size, self._live.training)

    def kept_by(self, state: SessionState, now_unix_s: float, idle_after_s: float | None = None) -> Keeper | None:
        """What keeps the session; None: it is idle. `idle_after_s`: default `--idle-after-s`."""
        after_s = self._config.idle_after_s if idle_after_s is None else idle_after_s
        return "turn" if not is_silent(state, now_unix_s, after_s) else self._silent_kept_by(state, now_unix_s, after_s)

    def _silent_kept_by(self, state: SessionState, now_unix_s: float, after_s: float) -> Keeper | None:
        if state.unrewarded is not None:
            return "reward"
        if self._leased and self._is_leased(state):
            return "runner"
        if (children := self._live.children(state.session_id)) and any(
            child.spec.blocks_parent and self.kept_by(child, now_unix_s, after_s) for child in children
        ):
            return "child"
        return None

    def _is_leased(self, state: SessionState | None) -> bool:
        """A runner has the sample of the session, or of one above it."""
        while state is not None:
            if (state.spec.group_id, state.spec.sample_index) in self._leased:
                return True
            parent = state.spec.parent_session_id
            state = None if parent is None else self._live.find(parent)
        return False


def count(histogram: dict[int, int], behind: int, by: int = 1) -> None:
    behind = max(0, behind)
    histogram[behind] = histogram.get(behind, 0) + by
