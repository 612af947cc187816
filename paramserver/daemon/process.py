"""A relay process: start, serve, drain, close."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paramserver.config import RelayConfig
from paramserver.core.notices import Notices
from paramserver.core.records import Member, RegisteredEngine
from paramserver.daemon.access import check_serves
from paramserver.daemon.engines import opened_engine_ports, registered
from paramserver.daemon.grpc_server import grpc_server
from paramserver.daemon.health import Health, report_health
from paramserver.daemon.memory import Memory, group_of, opened_memory
from paramserver.daemon.metrics import Sources, export_metrics, serve_metrics
from paramserver.daemon.parts import RelayParts
from paramserver.daemon.provider import SnapshotProvider
from paramserver.daemon.service import RelayService
from paramserver.data.engine_ports import EnginePort
from paramserver.data.nixl.processes import NixlProcesses
from paramserver.data.server import DataServer, listen_tcp
from paramserver.host import address_of
from paramserver.membership.etcd import CALL_TIMEOUT_S, START_TIMEOUT_S, EtcdRegistry
from paramserver.memory.stored import PUBLISH_SOCKET
from paramserver.relay.member_lease import MemberLease
from paramserver.relay.recovery import Recovery
from protos.access.credentials import Credentials
from protos.access.listening import check_listening, warn_insecure
from protos.errors import InvalidRequest
from protos.laminar.v1 import relay_pb2, relay_pb2_grpc
from protos.telemetry import options as telemetry_options
from protos.telemetry.options import Telemetry

log = logging.getLogger(__name__)

DRAIN_S = 2.0
SOCKET_PATH_MAX = 100  # the kernel takes 107
SERVICE = relay_pb2.DESCRIPTOR.services_by_name["Relay"].full_name


def check_open(config: RelayConfig) -> None:
    """Raises InvalidRequest where a port would be off loopback, and nobody has decided who may use it."""
    if config.insecure and config.credentials is not None:
        raise InvalidRequest("--insecure and credentials contradict each other", hint="leave one of them out")
    hosts = [config.host, *([address_of(config.bind_interface)] if config.bind_interface else ())]
    for host in hosts:
        check_listening(
            "paramserver serve",
            host,
            insecure=config.insecure,
            has_keys=config.credentials is not None,
            mend="give --credentials DIR, which `paramserver credentials init` makes, or --insecure in a closed "
            "network",
        )
    if config.insecure:
        warn_insecure(log, "paramserver serve", " and ".join(dict.fromkeys(hosts)))


def open_credentials(config: RelayConfig) -> Credentials | None:
    """The fleet's credentials; None: everybody who reaches the relay may do everything. Raises InvalidRequest where
    they cannot be used, and where the relay would serve other hosts without any."""
    check_open(config)
    if config.credentials is None:
        return None
    credentials = Credentials(config.credentials)
    check_serves(credentials, config.reached_by)
    log.info("access control: %s has the certificate of %s", config.credentials, credentials.identity)
    if config.transport == "nixl":
        log.warning("bytes by nixl are neither sealed nor by TLS: whoever is on its network may read and change them")
    return credentials


async def serve(
    config: RelayConfig, credentials: Credentials | None, on_ready: Callable[[dict[str, str]], None]
) -> None:
    """Runs one relay until SIGTERM or SIGINT. `credentials`: what `open_credentials` gave. `on_ready` gets its
    addresses once it serves."""
    log.info("configuration: %s", config)
    stop = _stop_event()  # a SIGTERM while starting waits for the end of it, so that the memory goes back
    async with relay_process(config, credentials) as (addresses, failed):
        on_ready(addresses)
        log.info("relay %s serves gRPC on %s, bytes on %s", config.name, addresses["grpc"], addresses["data"])
        failed.add_done_callback(lambda _: stop.set())
        await stop.wait()
        if failed.done():
            failed.result()


@contextlib.asynccontextmanager
async def relay_process(
    config: RelayConfig, credentials: Credentials | None = None
) -> AsyncIterator[tuple[dict[str, str], asyncio.Future[None]]]:
    """A relay, serving; yields its addresses and the task in which it lives (done only when it broke).

    It closes in the reverse order: the calls of others end, then its own life; its lease is revoked, so that nobody
    looks for it; the ports of engines and of bytes close; the memory goes back; and last its telemetry.
    """
    notices = Notices()
    async with (
        _telemetry(config) as telemetry,
        _bound_grpc(config, credentials) as (server, grpc_address),
        _registry(config) as registry,
        opened_memory(config, notices) as memory,
        _bound_data(config) as listener,
    ):
        # The ports are bound before anything is made that names their addresses; bytes are served once the parts exist.
        data_address = f"{_data_host(config)[1]}:{listener.getsockname()[1]}"
        lease = MemberLease(registry, _member(config, grpc_address, data_address), ttl_s=config.lease_ttl_s)
        parts = RelayParts(
            config,
            lease,
            memory.store,
            notices=notices,
            spill=memory.spill,
            nixl=memory.nixl,
            bind_host=_data_host(config)[0] if config.bind_interface else "",
            credentials=credentials,
            tracer=telemetry.tracer,
        )
        async with (
            _data_port(parts, listener, data_address, memory.nixl) as data,
            opened_engine_ports(config, credentials) as engine_ports,
            _membership(lease, registered(config, engine_ports, grpc_address)),
            _life(parts, registry, memory) as life,
            _control(server, parts, data, list(engine_ports.values()), telemetry) as addresses,
        ):
            yield addresses, life


@contextlib.asynccontextmanager
async def _telemetry(config: RelayConfig) -> AsyncIterator[Telemetry]:
    telemetry = telemetry_options.start(config.telemetry, "laminar-relay", relay=config.name)
    try:
        yield telemetry
    finally:
        await asyncio.to_thread(telemetry.close)


@contextlib.asynccontextmanager
async def _bound_grpc(
    config: RelayConfig, credentials: Credentials | None
) -> AsyncIterator[tuple[grpc.aio.Server, str]]:
    """A server that answers nobody yet, and the address by which others reach it. Before the pool is touched: a port
    that is taken is refused at once."""
    server, port = grpc_server(config.host, config.port, credentials)
    try:
        yield server, f"{config.reached_by}:{port}"
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def _registry(config: RelayConfig) -> AsyncIterator[EtcdRegistry]:
    registry = await EtcdRegistry.connect(config.etcd, timeout_s=START_TIMEOUT_S, access=config.etcd_access)
    try:
        yield registry
    finally:
        await registry.close()


@contextlib.asynccontextmanager
async def _bound_data(config: RelayConfig) -> AsyncIterator[socket.socket]:
    with contextlib.closing(listen_tcp(_data_host(config)[0], config.data_port)) as listener:
        yield listener


@contextlib.asynccontextmanager
async def _data_port(
    parts: RelayParts, listener: socket.socket, address: str, nixl: NixlProcesses | None
) -> AsyncIterator[DataServer]:
    """Serves bytes to other relays, and to publishers on this host."""
    config = parts.config
    data = DataServer(
        SnapshotProvider(parts),
        max_rate=config.max_rate,
        nixl=nixl,
        access=parts.data_access,
        address=address,
        instance=parts.lease.member.instance,
    )
    try:
        data.serve_tcp(listener)
        if (path := _publish_socket(config)) is not None:
            data.serve_unix(path, group=group_of(config))
        yield data
    finally:
        await asyncio.to_thread(data.close)


@contextlib.asynccontextmanager
async def _membership(lease: MemberLease, engines: Sequence[RegisteredEngine]) -> AsyncIterator[None]:
    await lease.take()
    try:
        lease.holdings.register(engines)
        yield
    finally:
        await lease.leave()


@contextlib.asynccontextmanager
async def _life(parts: RelayParts, registry: EtcdRegistry, memory: Memory) -> AsyncIterator[asyncio.Future[None]]:
    """Its standing tasks, once it knows what its earlier life left."""
    await parts.relay.refresh()
    await memory.recover(Recovery(parts.lease.view, parts.elections, parts.models, parts.reconciler, parts.notices))
    registry.timeout_s = CALL_TIMEOUT_S  # a call that fails from now on is made again
    life = asyncio.ensure_future(parts.run())
    try:
        yield life
    finally:
        await _cancelled(life)
        await parts.close()


@contextlib.asynccontextmanager
async def _control(
    server: grpc.aio.Server,
    parts: RelayParts,
    data: DataServer,
    engine_ports: Sequence[EnginePort],
    telemetry: Telemetry,
) -> AsyncIterator[dict[str, str]]:
    """Answers calls, and questions for health and metrics; yields all addresses. At its end streams end, then calls
    have DRAIN_S."""
    config, member = parts.config, parts.lease.member
    service = RelayService(
        parts, data_address=member.data_address, publish_socket=_publish_socket(config), engine_ports=engine_ports
    )
    checks, found_healthy = await _add_services(server, service), Health()
    addresses = {"grpc": member.grpc_address, "data": member.data_address, "name": config.name}
    sources = Sources(parts, data, engine_ports)
    reporting = asyncio.ensure_future(report_health(checks, SERVICE, found_healthy, lambda: parts.lease.name_taken))
    stop_metrics = None
    try:
        if config.metrics_port is not None:
            addresses["metrics"], stop_metrics = serve_metrics(config.host, config.metrics_port, sources, found_healthy)
        if telemetry.meter is not None:
            export_metrics(telemetry.meter, sources)
        await server.start()
        try:
            yield addresses
        finally:
            parts.end_streams()
            await server.stop(DRAIN_S)
    finally:
        if stop_metrics is not None:
            await asyncio.to_thread(stop_metrics)
        await _cancelled(reporting)


def _member(config: RelayConfig, grpc_address: str, data_address: str) -> Member:
    return Member(
        config.name,
        secrets.token_hex(8),
        grpc_address,
        data_address,
        config.publish_host,
        config.zone,
        config.rack,
        transport=config.transport,
    )


async def _add_services(server: grpc.aio.Server, service: RelayService) -> health.aio.HealthServicer:
    relay_pb2_grpc.add_RelayServicer_to_server(service, server)
    checks = health.aio.HealthServicer()
    await checks.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return checks


async def _cancelled(task: asyncio.Future[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _data_host(config: RelayConfig) -> tuple[str, str]:
    """Where the data port listens, and by what others reach it."""
    if config.bind_interface:
        host = address_of(config.bind_interface)
        return host, host
    return config.host, config.reached_by


def _publish_socket(config: RelayConfig) -> Path | None:
    """In the pool directory; beside the temporary files when that path is too long for a unix socket. None where
    publishers are not trusted with the memory."""
    if config.distrust_publisher:
        return None
    path = config.pool_dir.resolve() / PUBLISH_SOCKET
    if len(str(path)) <= SOCKET_PATH_MAX:
        return path
    return Path(tempfile.gettempdir()) / f"laminar-{hashlib.sha256(str(path).encode()).hexdigest()[:16]}.sock"


def _stop_event() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
