"""The engines beside a relay: the ports that it opens in front of them, and how gateways learn of them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Mapping

from paramserver.config import RelayConfig
from paramserver.core.records import RegisteredEngine
from paramserver.data import engine_ports
from paramserver.data.engine_ports import EnginePort
from protos.access.credentials import Credentials

log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def opened_engine_ports(
    config: RelayConfig, credentials: Credentials | None
) -> AsyncIterator[dict[str, EnginePort]]:
    """A port for each engine on loopback, by the engine's name; none without credentials."""
    async with contextlib.AsyncExitStack() as stack:
        yield {} if credentials is None else await _opened(config, credentials, stack)


async def _opened(
    config: RelayConfig, credentials: Credentials, stack: contextlib.AsyncExitStack
) -> dict[str, EnginePort]:
    for engine in config.engines:
        if not engine.on_loopback:
            log.warning(
                "engine %s at %s takes whoever reaches it: let it listen on loopback, and name it so to this relay, "
                "which then opens a port with TLS in front of it",
                engine.name(config.name),
                engine.url,
            )
    hidden = [engine for engine in config.engines if engine.on_loopback]
    found: dict[str, EnginePort] = {}
    for engine in hidden:
        name = engine.name(config.name)
        listener = engine_ports.listen(config.host, engine.port or 0)
        most = engine_ports.connections_max(len(hidden))
        tls = engine_ports.tls_of(credentials)
        found[name] = EnginePort(name, engine.url, listener, config.reached_by, tls, connections_max=most)
        stack.push_async_callback(found[name].close)
        await found[name].serve()
    return found


def registered(config: RelayConfig, ports: Mapping[str, EnginePort], grpc_address: str) -> list[RegisteredEngine]:
    """The engines beside this relay, by the addresses at which gateways call them."""
    found = []
    for engine in config.engines:
        name = engine.name(config.name)
        url = ports[name].url if name in ports else engine.url
        found.append(RegisteredEngine(name, engine.kind, url, grpc_address))
    return found
