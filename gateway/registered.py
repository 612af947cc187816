"""Engines that relays register in etcd: they join the fleet when they appear there and leave when they vanish.

- only what came this way leaves this way: engines of the configuration and of the admin API stay;
- one that an operator took out stays out until its relay registers it anew.
"""

from __future__ import annotations

import logging

from gateway.config import EngineSpec
from gateway.core.types import EngineName
from gateway.fleet import Fleet
from paramserver.client import RegisteredEngine, watch_engines
from paramserver.membership import Registry
from protos.engines import check_kind
from protos.errors import Conflict, UnsupportedField

log = logging.getLogger(__name__)


class Registered:
    """Owns the engines that it brought into `fleet`."""

    def __init__(self, registry: Registry, fleet: Fleet) -> None:
        self._registry, self._fleet = registry, fleet
        self._known: dict[str, RegisteredEngine] = {}
        self._brought: dict[str, EngineSpec] = {}

    async def run(self) -> None:
        async for engines in watch_engines(self._registry):
            await self._follow(engines)

    async def _follow(self, engines: dict[str, RegisteredEngine]) -> None:
        """One that changed, such as its relay's address, leaves and comes again."""
        before, self._known = self._known, engines
        for name in sorted(name for name in before if before[name] != engines.get(name)):
            await self._leave(name)
        for name in sorted(name for name in engines if before.get(name) != engines[name]):
            self._join(engines[name])

    async def _leave(self, name: str) -> None:
        spec, member = self._brought.pop(name, None), self._fleet.members.get(EngineName(name))
        if spec is not None and member is not None and member.spec is spec:
            log.info("engine %s leaves: the relay that registered it is gone", name)
            await self._fleet.remove(EngineName(name))

    def _join(self, engine: RegisteredEngine) -> None:
        spec = EngineSpec(engine.name, engine.kind, engine.url, engine.relay)
        try:
            check_kind(spec.kind, f"engine {spec.name}, registered by {spec.relay}")
            self._fleet.add(spec)
        except (Conflict, UnsupportedField) as error:
            log.warning("engine %s at %s is left out: %s", spec.name, spec.url, error)
            return
        self._brought[spec.name] = spec
        log.info("engine %s joins: %s at %s, beside relay %s", spec.name, spec.kind, spec.url, spec.relay)
