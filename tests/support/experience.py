"""The routes of the experience buffer over a gateway's own parts, which run nothing: no engine, no loop."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web

from gateway.api.errors import answer_errors
from gateway.api.experience import ExperienceDeps, add_experience_routes
from gateway.app import Parts, Stores, assemble, open_stores
from gateway.config import GatewayConfig
from gateway.core.fleet.config import FleetConfig
from gateway.store import Database


@contextlib.asynccontextmanager
async def experience_app(
    database: Database, staleness_max: int = 4, store: str = "database"
) -> AsyncIterator[tuple[web.Application, Stores, Parts]]:
    config = GatewayConfig(model="policy", tokenizer=Path(), fleet=FleetConfig(staleness_max=staleness_max))
    async with contextlib.AsyncExitStack() as stack:
        stores = await open_stores(database, stack, store)
        parts = assemble(config, stores)
        app = web.Application(middlewares=[answer_errors])
        add_experience_routes(
            app, ExperienceDeps(stores.buffer, parts.trainer, parts.fleet, staleness_max, "policy", "digest")
        )
        yield app, stores, parts
