"""The trainer as the gateway sees it: the batches that it takes, their staleness, and how many sessions that admits.

Several readers may sample: `core.admission` decides whose batches count.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from gateway.config import GatewayConfig
from gateway.core.admission import Reader, Readers, WaitingGroup, stranded, waiting_groups
from gateway.core.retry_after import Pace, retry_for_a_batch
from gateway.core.scheduler import Admission
from gateway.core.selection import Entry
from gateway.experience import ExperienceBuffer
from gateway.experience.readers import KeptReader, ReaderStore
from gateway.sessions.registry import SessionRegistry

GROUPS_SHOWN_MAX = 20
"""Waiting groups in the status."""


@dataclass(slots=True)
class Staleness:
    """Tokens (generation) and trajectories (finish, use) by how many versions they were behind."""

    generation: dict[int, int] = field(default_factory=dict)
    finish: dict[int, int] = field(default_factory=dict)
    use: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AdmissionStatus:
    """What delays new sessions: `running` and `buffered` against the `bound` of `reader` (null: none has sampled).

    `stranded`: buffered trajectories of groups that lack a member and have none under way; they are not counted.
    `waiting_groups`: what each group that lacks members waits for.
    """

    reader: str | None
    batch: int | None
    bound: int | None
    running: int
    buffered: int
    stranded: int
    full: bool
    waiting_groups: Sequence[str]


class Trainer:
    """`version` is the newest that it reported; nothing bounds admission before a reader has sampled.

    With a `store` the bound outlives the gateway: sessions of its next life wait, even before the trainer is back.
    """

    def __init__(
        self, config: GatewayConfig, live: SessionRegistry, buffer: ExperienceBuffer, store: ReaderStore | None = None
    ) -> None:
        self.staleness = Staleness()
        self.version = 0
        self._config, self._live, self._buffer = config, live, buffer
        self._readers, self._store = Readers(), store
        if store is not None and (kept := store.reader) is not None:
            now = time.monotonic()
            self._readers.requested(kept.name, kept.batch, kept.group_size, kept.staleness_max, now, waits=True)
        self._took = Pace()

    def requested(
        self,
        batch: int,
        version: int,
        staleness_max: int | None,
        *,
        reader: str = "",
        group_size: int | None = None,
        waits: bool = True,
    ) -> None:
        """A reader requests a batch of trajectories; `waits`: until it is complete."""
        bound = self._config.fleet.staleness_max if staleness_max is None else staleness_max
        now = time.monotonic()
        self._readers.requested(reader, batch, group_size, bound, now, waits=waits)
        if self._store is not None and (found := self._readers.deciding(now)) is not None:
            self._store.keep(KeptReader(found.name, found.batch, found.group_size, found.staleness_max))
        self.published(version)

    def published(self, version: int) -> None:
        """The newest version that a reader reported."""
        self.version = max(self.version, version)

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
        now = time.monotonic()
        buffered, next_s = self._fresh(), retry_for_a_batch(self._took, now)
        reader = self._readers.deciding(now)
        if reader is None:
            return Admission(0, buffered, None, self._config.fleet.staleness_max, next_s)
        found = Admission(self._running(), buffered, reader.batch, reader.staleness_max, next_s)
        if found.full and (held := self._stranded(reader)):
            return replace(found, buffered=buffered - held)
        return found

    def status(self) -> AdmissionStatus:
        now, buffered = time.monotonic(), self._fresh()
        reader = self._readers.deciding(now)
        held = 0 if reader is None else self._stranded(reader)
        waiting = [] if reader is None else self._waiting(reader)
        return AdmissionStatus(
            reader=None if reader is None else reader.name,
            batch=None if reader is None else reader.batch,
            bound=None if reader is None else reader.bound,
            running=self._running(),
            buffered=buffered - held,
            stranded=held,
            full=self.admission().full,
            waiting_groups=[str(group) for group in waiting[:GROUPS_SHOWN_MAX]],
        )

    def _stranded(self, reader: Reader) -> int:
        """Trajectories in the buffer that the reader could not take."""
        if reader.group_size is None:
            return 0
        buffered, closed = self._buffer.groups()
        return stranded(buffered, closed, reader.group_size, {group for _, group in self._expected()})

    def _waiting(self, reader: Reader) -> list[WaitingGroup]:
        if reader.group_size is None:
            return []
        buffered, closed = self._buffer.groups()
        return waiting_groups(buffered, closed, reader.group_size, self._expected())

    def _expected(self) -> Iterator[tuple[str, str]]:
        """Live sessions for training, with their groups."""
        return ((s.session_id, s.spec.group_id) for s in self._live if s.spec.trains)

    def _fresh(self) -> int:
        """Buffered trajectories that nobody has used: those that wait for another use delay no session."""
        found = self._buffer.statistics()
        return found.trajectories - found.used_before

    def _running(self) -> int:
        return sum(1 for s in self._live if s.version is not None and s.spec.trains)


def count(histogram: dict[int, int], behind: int, by: int = 1) -> None:
    behind = max(0, behind)
    histogram[behind] = histogram.get(behind, 0) + by
