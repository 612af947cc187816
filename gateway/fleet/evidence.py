"""Evidence for a segment's version: the engine's report in the stream, or a look at the engine after the segment.

A segment begins on an engine whose incarnation and label were read, and only the gateway refreshes its engines; if a
look after its end finds the same incarnation with the same label, its tokens were sampled under that version. Looks are
shared: one after the last of many segments vouches for all of them.

Invariants:
- a proof holds for one incarnation under one version, from when it was met to when the last look at it began;
- before an engine is refreshed it is looked at once more, since afterwards nobody could tell.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from gateway.core.fleet import EngineState
from gateway.core.types import EngineName
from gateway.engines.base import EngineAdapter, EngineFailed, version_of
from gateway.runtime.clock import unix_s
from protos.trajectories import Segment

log = logging.getLogger(__name__)

PROOFS_MAX = 4096
"""Incarnations and versions remembered; a session's segments are vouched for at its finish, so the newest matter."""
LOOK_TIMEOUT_S = 2.0
"""For all looks that a finish waits for. An engine that is slower vouches for nothing."""


class Member(Protocol):
    adapter: EngineAdapter
    state: EngineState


class VersionEvidence:
    """`members`: the fleet's, live."""

    def __init__(self, members: Mapping[EngineName, Member]) -> None:
        self._members = members
        self._proved_until: OrderedDict[tuple[EngineName, str, int], float] = OrderedDict()
        self._looking: dict[EngineName, asyncio.Lock] = {}
        self.contradictions = 0

    async def vouch(self, segments: Sequence[Segment]) -> list[Segment]:
        """The same segments with their evidence."""
        open_ = {EngineName(s.engine) for s in segments if s.evidence == "none" and not self._proved(s)}
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                for name in sorted(open_):
                    last = max(s.ended_unix_s for s in segments if s.engine == name)
                    await self._look_after(name, last)
        except TimeoutError:
            log.warning("engines %s did not report their versions within %g s", sorted(open_), LOOK_TIMEOUT_S)
        return [self._with_evidence(segment) for segment in segments]

    async def prove(self, name: EngineName) -> None:
        """Looks now: the engine is about to change."""
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                await self._look_after(name, unix_s())
        except TimeoutError:
            log.warning("engine %s did not report its version before its refresh", name)

    async def _look_after(self, name: EngineName, moment: float) -> None:
        async with self._looking.setdefault(name, asyncio.Lock()):
            member = self._members.get(name)
            if member is None:
                return
            state = member.state
            key = (name, state.incarnation, int(state.version))
            if self._proved_until.get(key, 0.0) >= moment:
                return  # somebody looked meanwhile
            began = unix_s()
            try:
                report, label = await member.adapter.report(), await member.adapter.weight_version()
            except EngineFailed as e:
                log.info("engine %s vouches for nothing: %s", name, e)
                return
            if report.incarnation != key[1] or state.incarnation != key[1]:
                return
            if version_of(label) == key[2]:
                self._note(key, began)
            else:
                self.contradictions += 1
                log.error("engine %s says version %s where %d was loaded", name, label, key[2])
                self._note(key, -1.0)

    def _note(self, key: tuple[EngineName, str, int], until: float) -> None:
        self._proved_until[key] = until
        self._proved_until.move_to_end(key)
        while len(self._proved_until) > PROOFS_MAX:
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
