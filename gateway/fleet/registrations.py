"""Engines that relays register in etcd: they join the fleet when they appear there and leave when they vanish.

Invariants:
- only engines that joined this way leave this way: those of the configuration and of the admin API stay;
- a registration that is wrong affects its own engine alone;
- an engine that an operator removed stays out until its relay registers it anew;
- an engine that another gateway has claimed joins once that gives it up.
"""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import replace

from gateway.config import EngineSpec
from gateway.core.types import EngineName
from gateway.fleet.claims import Claimed
from gateway.fleet.fleet import Fleet
from paramserver.client import RegisteredEngine, watch_engines
from paramserver.membership import Registry
from protos.engines import URL_NAME, check_kind, is_address, is_host_port
from protos.errors import InvalidRequest, LaminarError

log = logging.getLogger(__name__)

CLAIM_AGAIN_S = 5.0
"""Between two tries of an engine that another gateway has."""


class Registrations:
    """Owner of the engines that it added to `fleet`."""

    def __init__(self, registry: Registry, fleet: Fleet) -> None:
        self._registry, self._fleet = registry, fleet
        self._registered: dict[str, RegisteredEngine] = {}
        self._added: dict[str, EngineSpec] = {}
        self._claimed: set[str] = set()  # names of engines that another gateway has
        self._changing = asyncio.Lock()  # one of the two loops looks at the fleet and changes it

    async def run(self) -> None:
        """Until cancelled."""
        async for engines in watch_engines(self._registry):
            async with self._changing:
                await self._follow(engines)

    async def claim_again(self) -> None:
        """Tries the engines of other gateways again, until cancelled."""
        while True:
            await asyncio.sleep(CLAIM_AGAIN_S)
            async with self._changing:
                for name in sorted(self._claimed | (self._fleet.lost & self._added.keys())):
                    await self._join(name)

    async def _follow(self, engines: dict[str, RegisteredEngine]) -> None:
        """A registration that changed, such as its relay's address, leaves and joins again."""
        before, self._registered = self._registered, engines
        changed = sorted(name for name in before | engines if before.get(name) != engines.get(name))
        for name in (name for name in changed if name in before):
            try:
                await self._leave(name, before[name].relay)
            except Exception:
                log.exception("engine %s is not registered any more, and could not be removed", name)
        for name in (name for name in changed if name in engines):
            await self._join(name)

    async def _leave(self, name: str, relay: str) -> None:
        self._claimed.discard(name)
        self._fleet.lost.discard(name)
        self._fleet.elsewhere.pop(name, None)
        spec, handle = self._added.pop(name, None), self._fleet.handles.get(EngineName(name))
        if spec is not None and handle is not None and handle.spec is spec:
            log.info("engine %s leaves: the relay that registered it is gone", name)
            await self._fleet.remove(EngineName(name))
            left = f"engine {name} left with relay {relay}, which registered it: it joins again when that is started"
            self._fleet.note_elsewhere(name, left)

    async def _join(self, name: str) -> None:
        """An error costs this engine alone."""
        engine = self._registered[name]
        try:
            spec = registered(engine)
            await self._fleet.join(spec)
        except Claimed as error:
            if self._fleet.elsewhere.get(name) != error.message:
                log.warning("the registered engine %s does not join: %s", name, error)
            self._claimed.add(name)
            self._fleet.note_elsewhere(name, error.message)
            return
        except LaminarError as error:
            self._fleet.lost.discard(name)
            log.warning("the registered engine %s does not join: %s", name, error)
            return
        except Exception:
            log.exception("the registered engine %s could not be added", name)
            return
        self._claimed.discard(name)
        self._added[spec.name] = spec
        log.info("engine %s joins: %s at %s, beside relay %s", spec.name, spec.kind, spec.url, engine.relay)


def registered(engine: RegisteredEngine) -> EngineSpec:
    """The engine that a relay registered; it loads from that relay, if its kind loads versions. Raises InvalidRequest
    for what cannot be one."""
    spec = EngineSpec(engine.name, engine.kind, engine.url, engine.relay)
    check_kind(spec.kind, f"engine {spec.name}, registered by {engine.relay}")
    if not (re.fullmatch(URL_NAME, spec.name) and is_address(spec.url) and is_host_port(engine.relay)):
        raise InvalidRequest(
            f"{spec.url[:200]!r} beside relay {engine.relay[:200]!r} is not the address of an engine",
            hint="register it as NAME=KIND=URL, such as e0=vllm=http://10.0.0.1:8000",
        )
    return spec if spec.loads else replace(spec, relay=None)
