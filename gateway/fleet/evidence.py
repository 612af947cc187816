"""Evidence for a segment's version: the engine's report in the stream, or a check of the engine after the segment.

A segment begins on an engine whose incarnation and label were read, and only the gateway refreshes its engines. If a
check after the segment's end finds the same incarnation with the same label, no load can have happened in between: the
segment's tokens were sampled under that version. One check covers every segment that ended before it began.

Invariants:
- a check proves one incarnation under one version, from when it joined to when the check began: what is sampled while
  the request is under way may already belong to the next version;
- an engine is checked once more before it is refreshed, since afterwards its earlier version cannot be read any more;
- a label contradicts only where no load may have given it: an engine has the new one before its load is over, and
  either of them after a load that failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import msgspec

from gateway.core.fleet.labels import version_of
from gateway.core.fleet.state import EngineStatus
from gateway.core.types import EngineName
from gateway.engines.base import EngineFailed
from gateway.fleet.handle import EngineHandle
from gateway.runtime.clock import unix_s
from protos.foreign_text import quoted
from protos.trajectories import Segment

log = logging.getLogger(__name__)

CHECKS_MAX = 4096
"""Incarnations and versions remembered. A session's segments need them at its finish, so the newest matter."""
CHECK_TIMEOUT_S = 2.0
"""For all checks that one finish waits for. A slower engine leaves its segments without evidence."""

UNSETTLED: frozenset[EngineStatus] = frozenset({"refreshing", "fenced"})
"""A load gives, or gave, the engine a label that is not of what it served."""

_Key = tuple[EngineName, str, int]
"""Engine, incarnation, version."""


class VersionEvidence:
    """`handles` is the fleet's own mapping, which changes as engines come and go."""

    def __init__(self, handles: Mapping[EngineName, EngineHandle]) -> None:
        self._handles = handles
        self._proved_until: OrderedDict[_Key, float] = OrderedDict()  # Unix time; negative: contradicted
        self._checking: dict[EngineName, asyncio.Lock] = {}
        self.contradictions = 0

    async def collect(self, segments: Sequence[Segment]) -> list[Segment]:
        """The same segments with their evidence. Checks each engine at most once, however many are its."""
        engines = {EngineName(s.engine) for s in segments if s.evidence == "none" and not self._proved(s)}
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                for name in sorted(engines):
                    last = max(s.ended_unix_s for s in segments if s.engine == name)
                    await self._check_since(name, last)
        except TimeoutError:
            log.warning("engines %s did not report their versions within %g s", sorted(engines), CHECK_TIMEOUT_S)
        return [self._with_evidence(segment) for segment in segments]

    async def check(self, name: EngineName) -> None:
        """Checks the engine now, because it is about to change."""
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                await self._check_since(name, unix_s(), before_load=True)
        except TimeoutError:
            log.warning("engine %s did not report its version before its refresh", name)

    async def _check_since(self, name: EngineName, moment: float, *, before_load: bool = False) -> None:
        """Checks the engine, unless a check that began at `moment` or later has covered it already.

        `before_load`: its refresh waits for it.
        """
        async with self._checking.setdefault(name, asyncio.Lock()):
            handle = self._handles.get(name)
            if handle is None:
                return
            state = handle.state
            key = (name, state.incarnation, int(state.version))
            if self._proved_until.get(key, 0.0) >= moment:
                return  # checked by another session's finish, while this one waited for the lock
            began, settled = unix_s(), before_load or state.status not in UNSETTLED
            try:
                report, label = await handle.adapter.report(), await handle.adapter.weight_version()
            except EngineFailed as e:
                log.info("engine %s gives no evidence of its version: %s", name, e)
                return
            # Either may have changed during the two requests: the label is then another incarnation's.
            if report.incarnation != key[1] or state.incarnation != key[1]:
                return
            if version_of(label, state.started_with) == key[2]:
                self._note(key, began)
                return
            settled &= before_load or state.status not in UNSETTLED
            if settled and state.version == key[2]:
                self.contradictions += 1
                log.error("engine %s reports version %s where it had %d", name, quoted(label), key[2])
                self._note(key, -1.0)

    def _note(self, key: _Key, until: float) -> None:
        self._proved_until[key] = until
        self._proved_until.move_to_end(key)
        while len(self._proved_until) > CHECKS_MAX:
            self._proved_until.popitem(last=False)

    def _until(self, segment: Segment) -> float:
        return self._proved_until.get((EngineName(segment.engine), segment.incarnation, segment.version), 0.0)

    def _proved(self, segment: Segment) -> bool:
        return self._until(segment) >= segment.ended_unix_s

    def _with_evidence(self, segment: Segment) -> Segment:
        if segment.evidence != "none":
            return segment
        if self._until(segment) < 0:
            return msgspec.structs.replace(segment, evidence="contradicted")
        return msgspec.structs.replace(segment, evidence="looked") if self._proved(segment) else segment
