"""Reports to the relay tier: which engine could not load which version, so that the trainer's ticket can say so.

Invariants:
- a report never fails a refresh, nor holds it up for longer than REPORT_S: it is one line of the log then;
- what was reported as refused is taken back when the engine has loaded that version after all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.core.types import Version
from gateway.engines.base import EngineFailed
from gateway.fleet.handle import EngineHandle
from gateway.fleet.relays import Relays
from protos.errors import LaminarError

log = logging.getLogger(__name__)

REPORT_S = 2.0
REPORTED_MAX = 16  # versions of one engine: a relay keeps no more


class LoadReports:
    """One per gateway. Reported is what an engine or a snapshot is at fault for, not a relay that is away."""

    def __init__(self, model: str, relays: Relays) -> None:
        self._model, self._relays = model, relays

    @asynccontextmanager
    async def refusing(self, member: EngineHandle, version: Version) -> AsyncIterator[None]:
        """What the engine does with the version: EngineFailed passes on, and is reported."""
        try:
            yield
        except EngineFailed as e:
            member.reported = {version, *sorted(member.reported)[-REPORTED_MAX:]}
            await self._report(member, version, str(e))
            raise

    async def loaded(self, member: EngineHandle, version: Version) -> None:
        """Takes back what was reported of this version. Older ones stay refused: it never loaded them."""
        reported, member.reported = member.reported, set()
        if version in reported:
            await self._report(member, version, "")

    async def _report(self, member: EngineHandle, version: Version, error: str) -> None:
        relay, engine = member.spec.relay, member.state.name
        assert relay is not None
        try:
            async with asyncio.timeout(REPORT_S):
                await self._relays.client(relay).report_load(self._model, version, engine, error)
        except (LaminarError, TimeoutError) as e:
            why = str(e) or f"no answer within {REPORT_S:g} s"
            log.warning(
                "the load of version %d on engine %s was not reported to relay %s: %s", version, engine, relay, why
            )
