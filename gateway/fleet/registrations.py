"""Engines that relays register in etcd: they join the fleet when they appear there and leave when they vanish.

- only what came this way leaves this way: engines of the configuration and of the admin API stay;
- one registration that cannot be followed costs its own engine, and nobody else's;
- one that an operator took out stays out until its relay registers it anew.
"""

from __future__ import annotations

import logging

from gateway.config import EngineSpec
from gateway.core.types import EngineName
from gateway.fleet.fleet import Fleet
from paramserver.client import RegisteredEngine, watch_engines
from paramserver.membership import Registry
from protos.engines import check_kind, is_address, is_host_port
from protos.errors import InvalidRequest, LaminarError

log = logging.getLogger(__name__)


class Registrations:
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
        changed = sorted(name for name in before | engines if before.get(name) != engines.get(name))
        for name in (name for name in changed if name in before):
            try:
                await self._leave(name)
            except Exception:
                log.exception("engine %s is gone, and cannot be let go as it should be", name)
        for name in (name for name in changed if name in engines):
            try:
                self._join(engines[name])
            except LaminarError as error:
                log.warning("engine %s is left out: %s", name, error)
            except Exception:
                log.exception("engine %s, as it was registered, cannot be followed", name)

    async def _leave(self, name: str) -> None:
        spec, member = self._brought.pop(name, None), self._fleet.members.get(EngineName(name))
        if spec is not None and member is not None and member.spec is spec:
            log.info("engine %s leaves: the relay that registered it is gone", name)
            await self._fleet.remove(EngineName(name))

    def _join(self, engine: RegisteredEngine) -> None:
        spec = EngineSpec(engine.name, engine.kind, engine.url, engine.relay)
        check_kind(spec.kind, f"engine {spec.name}, registered by {spec.relay}")
        if not (spec.name and is_address(spec.url) and is_host_port(engine.relay)):
            raise InvalidRequest(
                f"{spec.url[:200]!r} beside relay {engine.relay[:200]!r} is no engine's address",
                hint="register it as NAME=KIND=URL, such as e0=vllm=http://10.0.0.1:8000",
            )
        self._fleet.add(spec)
        self._brought[spec.name] = spec
        log.info("engine %s joins: %s at %s, beside relay %s", spec.name, spec.kind, spec.url, spec.relay)
