"""Engines that relays register in etcd: they join the fleet when they appear there and leave when they vanish.

Invariants:
- only engines that joined this way leave this way: those of the configuration and of the admin API stay;
- a registration that is wrong affects its own engine alone;
- an engine that an operator removed stays out until its relay registers it anew.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from gateway.config import EngineSpec
from gateway.core.types import EngineName
from gateway.fleet.fleet import Fleet
from paramserver.client import RegisteredEngine, watch_engines
from paramserver.membership import Registry
from protos.engines import check_kind, is_address, is_host_port
from protos.errors import InvalidRequest, LaminarError

log = logging.getLogger(__name__)


class Registrations:
    """Owner of the engines that it added to `fleet`."""

    def __init__(self, registry: Registry, fleet: Fleet) -> None:
        self._registry, self._fleet = registry, fleet
        self._registered: dict[str, RegisteredEngine] = {}
        self._added: dict[str, EngineSpec] = {}

    async def run(self) -> None:
        """Until cancelled."""
        async for engines in watch_engines(self._registry):
            await self._follow(engines)

    async def _follow(self, engines: dict[str, RegisteredEngine]) -> None:
        """A registration that changed, such as its relay's address, leaves and joins again."""
        before, self._registered = self._registered, engines
        changed = sorted(name for name in before | engines if before.get(name) != engines.get(name))
        for name in (name for name in changed if name in before):
            try:
                await self._leave(name)
            except Exception:
                log.exception("engine %s is not registered any more, and could not be removed", name)
        for name in (name for name in changed if name in engines):
            try:
                self._join(engines[name])
            except LaminarError as error:
                log.warning("the registered engine %s does not join: %s", name, error)
            except Exception:
                log.exception("the registered engine %s could not be added", name)

    async def _leave(self, name: str) -> None:
        spec, handle = self._added.pop(name, None), self._fleet.handles.get(EngineName(name))
        if spec is not None and handle is not None and handle.spec is spec:
            log.info("engine %s leaves: the relay that registered it is gone", name)
            await self._fleet.remove(EngineName(name))

    def _join(self, engine: RegisteredEngine) -> None:
        spec = registered(engine)
        self._fleet.add(spec)
        self._added[spec.name] = spec
        log.info("engine %s joins: %s at %s, beside relay %s", spec.name, spec.kind, spec.url, engine.relay)


def registered(engine: RegisteredEngine) -> EngineSpec:
    """The engine that a relay registered; it loads from that relay, if its kind loads versions. Raises InvalidRequest
    for what cannot be one."""
    spec = EngineSpec(engine.name, engine.kind, engine.url, engine.relay)
    check_kind(spec.kind, f"engine {spec.name}, registered by {engine.relay}")
    if not (spec.name and is_address(spec.url) and is_host_port(engine.relay)):
        raise InvalidRequest(
            f"{spec.url[:200]!r} beside relay {engine.relay[:200]!r} is not the address of an engine",
            hint="register it as NAME=KIND=URL, such as e0=vllm=http://10.0.0.1:8000",
        )
    return spec if spec.loads else replace(spec, relay=None)
