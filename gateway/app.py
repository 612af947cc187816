"""The gateway assembled: start, serve, drain, close. Shutdown order is numbered in `Gateway.close`."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from gateway.api.admin import AdminDeps, add_admin_routes
from gateway.api.errors import answer_errors
from gateway.api.experience import ExperienceDeps, SampleRequest, add_experience_routes
from gateway.api.groups import add_group_routes
from gateway.api.http_server import BACKLOG, Runner, bodies_in_time
from gateway.api.openai.routes import OpenAIDeps, add_openai_routes
from gateway.api.openai.text_proxy import TextRoutes
from gateway.api.openapi import add_openapi_route
from gateway.api.sessions import add_session_routes
from gateway.config import GatewayConfig
from gateway.core.fleet import FleetState
from gateway.core.lengths import SessionDurations
from gateway.experience import ExperienceBuffer
from gateway.experience.readers import ReaderStore
from gateway.fleet.fleet import Fleet
from gateway.fleet.registrations import Registrations
from gateway.fleet.text_proxy import TextProxy
from gateway.operate.status import GatewayStatus
from gateway.repack.loop import Repacker
from gateway.runtime.standing import StandingTasks
from gateway.sessions.endings import Endings
from gateway.sessions.group_orders import Groups
from gateway.sessions.groups import GroupBook
from gateway.sessions.recovery import recover
from gateway.sessions.registry import SessionRegistry
from gateway.sessions.service import TurnService
from gateway.sessions.trainer import Trainer
from gateway.store import Database, PartialResponsePool, Timeline
from gateway.store.groups import GroupStore
from gateway.store.layout import claim
from gateway.store.lineage import LineageStore
from gateway.store.sessions import SessionStore
from gateway.tokens import Codec
from paramserver.membership import EtcdRegistry
from protos.process import cannot_listen

log = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 0.1  # for handlers, once draining is over: by default aiohttp would wait for them again
DATABASE_NAME = "gateway.sqlite"


@dataclass(slots=True)
class Gateway:
    """A running gateway. `url` is where it listens."""

    url: str
    sessions: TurnService
    fleet: Fleet
    status: GatewayStatus
    relay: TextProxy | None
    _runner: web.AppRunner
    _standing: StandingTasks
    _stack: AsyncExitStack

    async def close(self, drain_timeout_s: float = DRAIN_TIMEOUT_S, hurry: asyncio.Event | None = None) -> None:
        # 1. No new connections, sessions or turns; running turns finish and are told, up to the deadline, or until
        #    somebody is in a hurry; what is left stays in flight on disk, for the next life of this gateway.
        await self._drain(drain_timeout_s, hurry or asyncio.Event())
        await self._runner.cleanup()
        # 2. Nobody decides any more.
        await self._standing.close()
        self.status.close()
        # 3. Engines and relays are let go, what is known goes to disk, the disk is closed: the reverse of `start`.
        await self._stack.aclose()

    async def _drain(self, timeout_s: float, hurry: asyncio.Event) -> None:
        self.sessions.live.draining = True
        for site in list(self._runner.sites):
            await site.stop()
        under_way = [asyncio.create_task(run.told()) for run in self.sessions.runs.values()]
        if self.relay is not None:
            self.relay.draining = True
            under_way.append(asyncio.create_task(self.relay.idle()))
        if under_way:
            either: list[asyncio.Task[Any]] = [
                asyncio.create_task(asyncio.wait(under_way)),
                asyncio.create_task(hurry.wait()),
            ]
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for waiting in (*either, *under_way):
                waiting.cancel()
        if self.sessions.runs:
            kept = self.status.config.data is not None
            end = "the next start takes them up" if kept else "they end here, for there is no --data to keep them in"
            log.warning("%d turns still run: %s", len(self.sessions.runs), end)
        await self.sessions.suspend()


async def start(config: GatewayConfig) -> Gateway:
    """Serves when this returns; engines and relays may still be away. LaminarErrors say what is wrong."""
    codec = Codec.load(config.tokenizer)
    async with AsyncExitStack() as stack:
        registry = await EtcdRegistry.connect(config.etcd) if config.etcd is not None else None
        if registry is not None:
            stack.push_async_callback(registry.close)
        kept = await _open(config, codec, stack)
        parts = _assemble(config, codec, kept)
        await recover(parts.sessions, kept.sessions, kept.pool)
        await parts.fleet.__aenter__()
        for let_go in (
            parts.fleet.close,
            parts.sessions.suspend,
            parts.groups.close,
            parts.endings.close,
            parts.repacker.close,
        ):
            stack.push_async_callback(let_go)  # in the reverse order
        stack.callback(kept.database.hurry)  # a full disk holds up no end
        await parts.groups.restore()
        status = GatewayStatus(
            config,
            fleet=parts.fleet,
            sessions=parts.sessions,
            trainer=parts.trainer,
            repacker=parts.repacker,
            buffer=kept.buffer,
            pool=kept.pool,
            timeline=kept.timeline,
            relay=parts.relay,
            database=kept.database,
        )
        runner = await _listen(config, _routes(config, codec, parts, kept.buffer, kept.timeline, status))
        url = f"http://{config.host}:{runner.addresses[0][1]}"
        standing = _standing_tasks(config, parts, registry)
        return Gateway(url, parts.sessions, parts.fleet, status, parts.relay, runner, standing, stack.pop_all())


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is on disk, each part in tables of its own."""

    pool: PartialResponsePool
    buffer: ExperienceBuffer
    timeline: Timeline
    sessions: SessionStore
    groups: GroupStore
    lineage: LineageStore
    reader: ReaderStore
    database: Database


async def _open(config: GatewayConfig, codec: Codec, stack: AsyncExitStack) -> _Kept:
    path = None if config.data is None else config.data / DATABASE_NAME
    database = await stack.enter_async_context(Database(path))
    await database.run(lambda opened: claim(opened, str(path), config.model, codec.vocabulary))
    kept = _Kept(
        PartialResponsePool(database),
        ExperienceBuffer(database),
        Timeline(database),
        SessionStore(database),
        GroupStore(database),
        LineageStore(database),
        ReaderStore(database),
        database,
    )
    for part in (kept.pool, kept.timeline):
        await part.open()
        stack.push_async_callback(part.close)
    for tables in (kept.buffer, kept.sessions, kept.groups, kept.lineage, kept.reader):
        await tables.open()
    stack.push_async_callback(kept.buffer.close)
    return kept


@dataclass(frozen=True, slots=True)
class _Parts:
    """What decides and does. Nothing of it runs yet when it is made."""

    live: SessionRegistry
    trainer: Trainer
    fleet: Fleet
    sessions: TurnService
    endings: Endings
    groups: Groups
    repacker: Repacker
    relay: TextProxy | None


def _assemble(config: GatewayConfig, codec: Codec, kept: _Kept) -> _Parts:
    timeline = kept.timeline
    state = FleetState(config.fleet, prefill_tokens_per_s=config.prefill_tokens_per_s)
    live = SessionRegistry(config, state, kept.sessions, timeline)
    trainer = Trainer(config, live, kept.buffer, kept.reader)
    fleet = Fleet(config, state, timeline, trainer.admission, kept.lineage, codec.encode)
    sessions = TurnService(
        config,
        live,
        fleet,
        trainer,
        pool=kept.pool,
        timeline=timeline,
        context_tokens=lambda: _context(fleet),
        eos_ids=codec.eos_ids,
        vocab_size=codec.vocab_size,
    )
    book, durations = GroupBook(live, kept.buffer, kept.groups), SessionDurations()
    endings = Endings(
        sessions,
        trainer,
        book,
        durations,
        pool=kept.pool,
        buffer=kept.buffer,
        store=kept.sessions,
        timeline=timeline,
    )
    groups = Groups(live, endings, book)
    repacker = Repacker(config, fleet, sessions, durations, timeline)
    relay = TextProxy(fleet) if config.relay_text else None
    return _Parts(live, trainer, fleet, sessions, endings, groups, repacker, relay)


def _routes(
    config: GatewayConfig,
    codec: Codec,
    parts: _Parts,
    buffer: ExperienceBuffer,
    timeline: Timeline,
    status: GatewayStatus,
) -> web.Application:
    app = web.Application(client_max_size=config.body_bytes_max, middlewares=[answer_errors, bodies_in_time])
    from_user = config.session_from_user
    text = None
    if parts.relay is not None:
        text = TextRoutes(parts.relay, parts.sessions, config.model, session_from_user=from_user)
    add_openai_routes(app, OpenAIDeps(parts.sessions, codec, text, from_user))
    add_session_routes(app, parts.live, parts.endings, parts.groups, parts.fleet.pinning)
    add_group_routes(app, parts.groups)
    add_admin_routes(app, AdminDeps(status, parts.fleet, parts.repacker, timeline))
    add_openapi_route(app)
    add_experience_routes(app, _experience(config, parts.trainer, parts.fleet, buffer))
    return app


async def _listen(config: GatewayConfig, app: web.Application) -> web.AppRunner:
    runner = Runner(app, access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_TIMEOUT_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, config.host, config.port, backlog=BACKLOG).start()
    except OSError as error:
        await runner.cleanup()
        raise cannot_listen(config.host, config.port, error) from error
    return runner


def _standing_tasks(config: GatewayConfig, parts: _Parts, registry: EtcdRegistry | None) -> StandingTasks:
    standing = StandingTasks()
    standing.keep(parts.endings.expire, "session-expiry")
    if parts.relay is not None:
        standing.keep(parts.relay.watch, "relay-watch")
    if registry is not None:
        standing.keep(Registrations(registry, parts.fleet).run, "registered-engines")
    if config.fleet.mode == "repack":
        standing.keep(parts.repacker.run, "repack")
    return standing


def _context(fleet: Fleet) -> int:
    """The largest context of an engine that told its own, dead ones included: they may come back. A turn is placed only
    where all of it fits."""
    return max((e.context_tokens for e in fleet.state.engines.values()), default=0)


def _experience(config: GatewayConfig, trainer: Trainer, fleet: Fleet, buffer: ExperienceBuffer) -> ExperienceDeps:
    def asked(wanted: SampleRequest) -> None:
        batch = wanted.trajectories or (wanted.groups or 0) * (wanted.group_size or 0)
        trainer.asked(
            batch,
            wanted.trainer_version,
            wanted.staleness_max,
            reader=wanted.reader,
            group_size=wanted.group_size if wanted.groups is not None else None,
            waits=wanted.wait_s > 0,
        )
        fleet.changed()

    return ExperienceDeps(
        buffer,
        config.fleet.staleness_max,
        asked=asked,
        used=lambda wanted, trajectories: trainer.took(wanted.trainer_version, trajectories),
        newest=lambda: fleet.state.newest,
    )
