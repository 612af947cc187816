"""The gateway assembled: start, serve, drain, close. Shutdown order is numbered in `Gateway.close`."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.api.access import Access
from gateway.api.admin import AdminDeps, add_admin_routes
from gateway.api.anthropic.routes import add_anthropic_routes
from gateway.api.calls.service import Calls
from gateway.api.elsewhere import elsewhere
from gateway.api.errors import answer_errors
from gateway.api.experience import ExperienceDeps, add_experience_routes
from gateway.api.generate import add_generate_route
from gateway.api.groups import add_group_routes
from gateway.api.http_server import Admission, Bodies
from gateway.api.listeners import Listener, listen, listen_for_admins, peers_of
from gateway.api.openai.routes import OpenAIDeps, add_openai_routes
from gateway.api.openai.text_proxy import TextRoutes
from gateway.api.openapi import add_openapi_route
from gateway.api.records import add_record_routes
from gateway.api.responses.routes import add_responses_routes
from gateway.api.routes import ROUTES
from gateway.api.sessions import add_session_routes
from gateway.api.tasks import add_task_routes
from gateway.api.ui import reading
from gateway.api.ui.feed import Feed
from gateway.api.ui.routes import add_ui_routes
from gateway.config import GatewayConfig
from gateway.core.addresses import RedisAddress, StoreAddress
from gateway.core.connections import STRANGER_S, Connections
from gateway.core.fleet.machine import FleetMachine
from gateway.core.fleet.modes import mode_of
from gateway.core.fleet.state import FleetState
from gateway.core.packing.lengths import SessionDurations
from gateway.engines.base import AdapterContext
from gateway.experience import ExperienceBuffer, layout_1
from gateway.experience.buffer import BYTES_MAX, CAPACITY
from gateway.experience.readers import ReaderStore
from gateway.experience.shared import shared_store
from gateway.experience.stores import StoreMaker
from gateway.fleet.claims import TTL_S, ClaimStore
from gateway.fleet.fleet import Fleet
from gateway.fleet.registrations import Registrations
from gateway.fleet.text_proxy import TextProxy
from gateway.log.attempts import Namespace
from gateway.log.base import SharedStore
from gateway.log.gateways import GatewayLog, SharedGateways, of_group
from gateway.log.replicated import shared
from gateway.log.stores import kind_of
from gateway.operate.admin_place import AdminPlace, admin_place
from gateway.operate.status import GatewayStatus
from gateway.repack.loop import Repacker
from gateway.runtime.life import is_over, this_life
from gateway.runtime.supervisor import Supervisor
from gateway.sessions.endings import Endings
from gateway.sessions.group_registry import GroupRegistry
from gateway.sessions.group_service import GroupService
from gateway.sessions.known_groups import KnownGroups
from gateway.sessions.recovery import recover
from gateway.sessions.registry import SessionRegistry
from gateway.sessions.trainer import Trainer
from gateway.sessions.turn_service import TurnService
from gateway.store import Database, PartialResponsePool, Timeline
from gateway.store.database import CACHE_BYTES, CACHE_BYTES_WITHOUT, DATABASE_NAME
from gateway.store.groups import GroupStore
from gateway.store.layout import claim, gateway_name
from gateway.store.lineage import LineageStore
from gateway.store.sessions import SessionStore
from gateway.tasks import PromptPool
from gateway.tokens import Codec
from paramserver.client import EtcdClaims
from paramserver.membership import EtcdRegistry
from protos.access.key_file import KeyFile
from protos.access.listening import check_listening, warn_insecure
from protos.errors import InvalidRequest
from protos.telemetry.options import start as start_telemetry
from protos.telemetry.spans import Tracer

log = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 30.0
OPERATIONS_BY_ROUTE = {(route.method.upper(), route.path): route.operation for route in ROUTES}


@dataclass(frozen=True, slots=True)
class Stores:
    """What is on disk, each store in tables of its own; trajectories only where `--experience-store` says so."""

    database: Database
    pool: PartialResponsePool
    buffer: ExperienceBuffer
    timeline: Timeline
    sessions: SessionStore
    groups: GroupStore
    lineage: LineageStore
    reader: ReaderStore
    tasks: PromptPool


@dataclass(frozen=True, slots=True)
class Parts:
    """What decides and acts. Nothing of it runs before `Fleet.__aenter__`."""

    live: SessionRegistry
    trainer: Trainer
    fleet: Fleet
    sessions: TurnService
    endings: Endings
    groups: GroupService
    repacker: Repacker
    text_proxy: TextProxy | None


@dataclass(slots=True)
class Gateway:
    """A running gateway."""

    config: GatewayConfig
    stores: Stores
    parts: Parts
    status: GatewayStatus
    listener: Listener
    admin: Listener | None
    _loops: Supervisor
    _stack: AsyncExitStack

    @property
    def url(self) -> str:
        """Where clients reach it."""
        return self.listener.url

    @property
    def admin_url(self) -> str:
        """Where those who operate it reach it."""
        return self.url if self.admin is None else self.admin.url

    @property
    def fleet(self) -> Fleet:
        return self.parts.fleet

    @property
    def sessions(self) -> TurnService:
        return self.parts.sessions

    async def close(self, drain_timeout_s: float = DRAIN_TIMEOUT_S, hurry: asyncio.Event | None = None) -> None:
        # 1. No new connections, sessions or turns. Running turns finish and are answered, until the deadline or until
        #    `hurry` is set; what is left stays in flight on disk, for the next life of this gateway.
        await self._drain(drain_timeout_s, hurry or asyncio.Event())
        await self.listener.close()
        if self.admin is not None:  # until here it shows how the turns end
            await self.admin.close()
        # 2. No more decisions.
        await self._loops.close()
        self.status.close()
        # 3. Engines and relays are released, what is pending goes to disk, the database closes: the reverse of `start`.
        await self._stack.aclose()

    async def _drain(self, timeout_s: float, hurry: asyncio.Event) -> None:
        running, text_proxy = self.sessions.running, self.parts.text_proxy
        self.parts.live.draining = True
        await self.listener.stop()
        draining = [asyncio.create_task(turn.released()) for turn in running.values()]
        if text_proxy is not None:
            text_proxy.draining = True
            draining.append(asyncio.create_task(text_proxy.idle()))
        if draining:
            either: list[asyncio.Task[Any]] = [
                asyncio.create_task(asyncio.wait(draining)),
                asyncio.create_task(hurry.wait()),
            ]
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for waiting in (*either, *draining):
                waiting.cancel()
        if running:
            stored = self.config.data is not None
            end = "the next start resumes them" if stored else "they end here, for there is no --data to keep them in"
            log.warning("%d turns still run: %s", len(running), end)
        await self.sessions.suspend()


async def start(config: GatewayConfig) -> Gateway:
    """Serves when this returns; engines and relays may still be away. Raises LaminarError with what is wrong."""
    keys, place = open_keys(config), admin_place(config)
    codec = Codec.load(config.tokenizer, config.special_tokens_in_text)
    for note in (note for chat in codec.chats for note in chat.notes):
        log.info("the chat template %s", note)
    async with AsyncExitStack() as stack:
        telemetry = start_telemetry(config.telemetry, "laminar-gateway", model=config.model)
        # Last, and beside this loop, on which it reads the metrics once more.
        stack.push_async_callback(asyncio.to_thread, telemetry.close)
        registry = None
        if config.etcd is not None:
            registry = await EtcdRegistry.connect(config.etcd, access=config.etcd_access)
            stack.push_async_callback(registry.close)
        path = None if config.data is None else config.data / DATABASE_NAME
        cache_bytes = CACHE_BYTES if config.experience_store == "database" else CACHE_BYTES_WITHOUT
        database = await stack.enter_async_context(Database(path, cache_bytes=cache_bytes))
        await database.run(lambda opened: claim(opened, str(path), config.model, codec.vocabulary))
        experience = await _experience_store(config, codec.vocabulary, stack)
        stores = await open_stores(database, stack, experience, config.experience_max, config.experience_bytes_max)
        name = await database.run(gateway_name)
        gateways = None
        if not isinstance(experience, str):
            log_of_claims = GatewayLog(experience)
            stack.push_async_callback(log_of_claims.close)
            await log_of_claims.open()
            gateways = SharedGateways(log_of_claims, name, TTL_S, this_life(), is_over)
        claims = gateways if registry is None else EtcdClaims(registry, name, TTL_S, this_life(), is_over)
        parts = assemble(config, stores, codec, telemetry.tracer, claims, gateways)
        await recover(parts.sessions, stores.sessions, stores.pool)
        await parts.fleet.__aenter__()
        for close in (
            parts.fleet.close,
            parts.sessions.suspend,
            parts.groups.close,
            parts.endings.close,
            parts.repacker.close,
        ):
            stack.push_async_callback(close)  # in the reverse order
        stack.callback(database.hurry)  # a full disk delays no shutdown
        await parts.groups.restore()
        connections = _connections(config)
        status = GatewayStatus(
            config,
            connections=connections,
            fleet=parts.fleet,
            sessions=parts.sessions,
            trainer=parts.trainer,
            repacker=parts.repacker,
            buffer=stores.buffer,
            pool=stores.pool,
            tasks=stores.tasks,
            text_proxy=parts.text_proxy,
            database=database,
            keys=keys,
            meter=telemetry.meter,
        )
        access = None
        if keys is not None:
            access = Access(keys, parts.live, parts.groups, agents_may_reward=config.agents_may_reward)
        async with AsyncExitStack() as listening:
            deps = AdminDeps(
                status, parts.fleet, parts.live, parts.repacker, stores.timeline, parts.endings, parts.trainer
            )
            admin = None
            if place is not None:
                of_admins = Admission(_connections(config), strangers=access is not None and place.path is None)
                admin = await listen_for_admins(_admin_routes(config, deps, place, access), place, of_admins)
                listening.push_async_callback(admin.close)
                status.admin_url = admin.url
            app = _routes(config, codec, parts, stores, deps, access, gateways)
            admission = Admission(connections, strangers=access is not None)
            listener = await listen(app, config.host, config.port, admission)
            if gateways is not None:
                listening.push_async_callback(listener.close)
                await gateways.show(config.public_url or _reached_at(config.host, listener.url))
            listening.pop_all()
        loops = _start_loops(config, parts, stores, registry, access, gateways)
        return Gateway(config, stores, parts, status, listener, admin, loops, stack.pop_all())


def _reached_at(host: str, url: str) -> str:
    """Where gateways on other hosts send a client of this one, which listens at `url`."""
    return url.replace(host, socket.gethostname(), 1) if host in ("0.0.0.0", "::") else url  # noqa: S104 - compared


def open_keys(config: GatewayConfig) -> KeyFile | None:
    """The API keys; None: access control is off. Raises InvalidRequest for a key file that cannot be used, and where
    the gateway would serve other hosts without one."""
    if config.insecure and config.api_keys is not None:
        raise InvalidRequest("--insecure and API keys contradict each other", hint="leave one of them out")
    if config.agents_may_reward and config.api_keys is None:
        raise InvalidRequest("--agents-may-reward without API keys", hint="add --api-keys FILE, or leave it out")
    check_listening(
        "gateway serve",
        config.host,
        insecure=config.insecure,
        has_keys=config.api_keys is not None,
        mend="give --api-keys FILE, for which `gateway keys new` makes lines, or --insecure in a closed network",
    )
    if config.insecure:
        warn_insecure(log, "gateway serve", config.host)
    if config.api_keys is None:
        return None
    keys = KeyFile(config.api_keys)
    log.info("access control: %d API keys of %s", len(keys), config.api_keys)
    return keys


async def _experience_store(config: GatewayConfig, vocabulary: str, stack: AsyncExitStack) -> str | SharedStore:
    """`stack` closes the connection, if there is one."""
    if not isinstance(config.experience_store, StoreAddress):
        return config.experience_store
    address, namespace = config.experience_store, Namespace(config.redis_namespace, config.model, vocabulary)
    if isinstance(address, RedisAddress):
        await layout_1.migrate(address, namespace, accept_unchecked=config.redis_unchecked)
    store = await kind_of(config.experience_store).connect(
        config.experience_store,
        namespace=config.redis_namespace,
        model=config.model,
        vocabulary=vocabulary,
        accept_unchecked=config.redis_unchecked,
    )
    stack.push_async_callback(store.close)
    return store


async def open_stores(
    database: Database,
    stack: AsyncExitStack,
    experience: str | SharedStore = "database",
    experience_max: int = CAPACITY,
    experience_bytes_max: int = BYTES_MAX,
) -> Stores:
    """Makes the tables, and reads what an earlier life of this gateway left. `stack` closes the stores.

    `experience`: a connected store that gateways share, or the name of a store of this gateway's own."""
    if isinstance(experience, str):
        store: str | StoreMaker = experience
        tasks = PromptPool(database)
    else:
        store = shared_store(database, experience)
        tasks = PromptPool(await stack.enter_async_context(Database(None)), order=shared(experience, "tasks"))
    buffer = ExperienceBuffer(database, store=store, capacity=experience_max, bytes_max=experience_bytes_max)
    stores = Stores(
        database,
        PartialResponsePool(database),
        buffer,
        Timeline(database),
        SessionStore(database),
        GroupStore(database),
        LineageStore(database),
        ReaderStore(database),
        tasks,
    )
    for part in (stores.pool, stores.timeline):
        await part.open()
        stack.push_async_callback(part.close)
    for tables in (stores.buffer, stores.sessions, stores.groups, stores.lineage, stores.reader, stores.tasks):
        await tables.open()
    stack.push_async_callback(stores.buffer.close)
    stack.push_async_callback(stores.tasks.close)
    return stores


def assemble(
    config: GatewayConfig,
    stores: Stores,
    codec: Codec | None = None,
    tracer: Tracer | None = None,
    claims: ClaimStore | None = None,
    gateways: SharedGateways | None = None,
) -> Parts:
    """Puts the rooms together. Without a `codec`, as in tests, no id ends a turn, and every id is in the vocabulary.
    `claims`, `gateways`: where this gateway shares a store with others."""
    timeline = stores.timeline
    machine = FleetMachine(FleetState(config.fleet, prefill_tokens_per_s=config.prefill_tokens_per_s))
    known_groups = KnownGroups()
    live = SessionRegistry(config, machine, stores.sessions, timeline, known_groups, tracer, gateways)
    trainer = Trainer(config, machine.state, live, stores.buffer, stores.reader)
    adapters = AdapterContext(model=config.model, tokenizer=codec, stall_timeout_s=config.stall_timeout_s)
    context_tokens = 0 if codec is None else codec.context_tokens or 0
    admission = trainer.admission
    fleet = Fleet(config, machine, timeline, admission, adapters, stores.lineage, context_tokens, tracer, claims)
    sessions = TurnService(
        config,
        live,
        fleet,
        trainer,
        pool=stores.pool,
        timeline=timeline,
        eos_ids=frozenset() if codec is None else codec.eos_ids,
        vocab_size=1 << 31 if codec is None else codec.vocab_size,
    )
    registry, durations = GroupRegistry(known_groups, live, stores.buffer, stores.groups), SessionDurations()
    endings = Endings(
        sessions,
        trainer,
        registry,
        durations,
        pool=stores.pool,
        buffer=stores.buffer,
        store=stores.sessions,
        timeline=timeline,
    )
    groups = GroupService(live, endings, registry)
    repacker = Repacker(config, fleet, sessions, durations, timeline)
    text_proxy = TextProxy(fleet) if config.relay_text else None
    return Parts(live, trainer, fleet, sessions, endings, groups, repacker, text_proxy)


def _routes(
    config: GatewayConfig,
    codec: Codec,
    parts: Parts,
    stores: Stores,
    admin: AdminDeps,
    access: Access | None = None,
    gateways: SharedGateways | None = None,
) -> web.Application:
    """`access` None: no middleware asks for keys. `gateways` None: no other one has sessions."""
    first = [] if gateways is None else [elsewhere(gateways)]
    app = _application(config, first if access is None else [*first, access.control(OPERATIONS_BY_ROUTE)])
    from_user = config.session_from_user
    text = None
    if parts.text_proxy is not None:
        text = TextRoutes(
            parts.text_proxy, parts.sessions, config.model, parts.live.bounds, session_from_user=from_user
        )
    calls = Calls(
        parts.sessions,
        codec,
        session_from_user=from_user,
        controlled=access is not None,
        traced=parts.live.tracer is not None,
    )
    add_openai_routes(app, OpenAIDeps(calls, text))
    add_generate_route(app, calls)
    add_responses_routes(app, calls)
    add_anthropic_routes(app, calls)
    add_session_routes(app, parts.live, parts.endings, parts.groups, parts.fleet.pins, config.public_url)
    add_record_routes(app, parts.live, stores.buffer, codec)
    add_group_routes(app, parts.groups, parts.live, config.public_url)
    add_admin_routes(app, admin, operate_at=admin.status.admin_url)
    add_task_routes(app, stores.tasks)
    shown = reading.Parts(
        admin.status, parts.fleet, parts.sessions, parts.trainer, parts.repacker, stores.buffer, stores.timeline
    )
    add_ui_routes(app, Feed(reading.Reading(shown, config.model)))
    add_openapi_route(app)
    add_experience_routes(
        app,
        ExperienceDeps(
            stores.buffer, parts.trainer, parts.fleet, config.fleet.staleness_max, config.model, codec.vocabulary
        ),
    )
    return app


def _admin_routes(config: GatewayConfig, admin: AdminDeps, place: AdminPlace, access: Access | None) -> web.Application:
    """What the admin listener answers: whatever an operator looks at, and does."""
    control = [] if access is None else [access.control(OPERATIONS_BY_ROUTE)]
    app = _application(config, control if place.path is None else [peers_of(place)])
    add_admin_routes(app, admin)
    return app


def _connections(config: GatewayConfig) -> Connections[Any]:
    return Connections(config.connections_max, config.connections_per_address, STRANGER_S)


def _application(config: GatewayConfig, control: Sequence[Middleware]) -> web.Application:
    bodies = Bodies(config.bodies_bytes_max, config.body_bytes_max)
    return web.Application(client_max_size=config.body_bytes_max, middlewares=[answer_errors, *control, bodies.in_time])


def _claimed_names(parts: Parts) -> list[str]:
    """Of live sessions and open groups, among gateways that share a store."""
    sessions = [state.session_id for state in parts.live if not state.spec.ephemeral]
    return [*sessions, *map(of_group, parts.groups.open())]


def _start_loops(
    config: GatewayConfig,
    parts: Parts,
    stores: Stores,
    registry: EtcdRegistry | None,
    access: Access | None,
    gateways: SharedGateways | None,
) -> Supervisor:
    loops = Supervisor()
    if gateways is not None:
        loops.keep_running(gateways.run, "shared-gateways")
        loops.keep_running(lambda: gateways.renew(lambda: _claimed_names(parts)), "session-names")
    if access is not None:
        loops.keep_running(access.follow, "api-keys")
    loops.keep_running(parts.endings.expire, "session-expiry")
    loops.keep_running(lambda: parts.trainer.follow_leases(stores.tasks), "runners-leases")
    if parts.text_proxy is not None:
        loops.keep_running(parts.text_proxy.watch, "text-proxy-watch")
    if registry is not None:
        registrations = Registrations(registry, parts.fleet)
        loops.keep_running(registrations.run, "registered-engines")
        loops.keep_running(registrations.claim_again, "claimed-engines")
    if mode_of(config.fleet).packs:
        loops.keep_running(parts.repacker.run, "repack")
    return loops
