"""A relay process: start, serve, drain, close."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paramserver.config import RelayConfig, show_bytes
from paramserver.core.notices import Notices
from paramserver.core.records import Member
from paramserver.daemon.access import check_serves
from paramserver.daemon.engines import open_engine_ports, registered
from paramserver.daemon.grpc_server import grpc_server
from paramserver.daemon.health import Health, report_health
from paramserver.daemon.metrics import Sources, export_metrics, serve_metrics
from paramserver.daemon.parts import RelayParts
from paramserver.daemon.provider import SnapshotProvider
from paramserver.daemon.service import RelayService
from paramserver.data.nixl.processes import NixlProcesses
from paramserver.data.server import DataServer, listen_tcp
from paramserver.data.spill import Spill
from paramserver.host import address_of
from paramserver.membership.etcd import CALL_TIMEOUT_S, START_TIMEOUT_S, EtcdRegistry
from paramserver.memory import stored
from paramserver.memory.pool import Pool
from paramserver.memory.private import keep_private
from paramserver.memory.store import Snapshot, Store
from paramserver.memory.stored import PUBLISH_SOCKET
from paramserver.relay.member_lease import MemberLease
from paramserver.relay.recovery import Recovery
from protos.access.credentials import Credentials
from protos.access.listening import check_listening, warn_insecure
from protos.access.unix_socket import group_id
from protos.errors import Corrupt, InvalidRequest, OutOfCapacity
from protos.laminar.v1 import relay_pb2, relay_pb2_grpc
from protos.telemetry import options as telemetry_options

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
    """A relay, serving; yields its addresses and the task in which it lives (done only when it broke)."""
    data_host = address_of(config.bind_interface) if config.bind_interface else config.host
    async with contextlib.AsyncExitStack() as stack:
        # Closing runs in the reverse order: streams end, control stops taking calls, fetches end, the lease is revoked,
        # the data port closes, the memory goes, and last the telemetry.
        telemetry = telemetry_options.start(config.telemetry, "laminar-relay", relay=config.name)
        stack.push_async_callback(asyncio.to_thread, telemetry.close)
        server, port = grpc_server(config.host, config.port, credentials)
        grpc_address = f"{config.reached_by}:{port}"
        registry = await EtcdRegistry.connect(config.etcd, timeout_s=START_TIMEOUT_S, access=config.etcd_access)
        stack.push_async_callback(registry.close)
        notices = Notices()
        store, left, found = await _open_store(config, stack, notices)
        nixl = await _start_nixl(config, stack)

        # The ports are bound before anything is made that names their addresses; bytes are served once the parts exist.
        data_listener = listen_tcp(data_host, config.data_port)
        stack.callback(data_listener.close)
        data_port = data_listener.getsockname()[1]
        data_address = f"{data_host if config.bind_interface else config.reached_by}:{data_port}"

        lease = MemberLease(registry, _member(config, grpc_address, data_address), ttl_s=config.lease_ttl_s)
        spill = _open_spill(config, stack, notices)
        bind_host = data_host if config.bind_interface else ""
        tracer = telemetry.tracer
        parts = RelayParts(
            config,
            lease,
            store,
            notices=notices,
            spill=spill,
            nixl=nixl,
            bind_host=bind_host,
            credentials=credentials,
            tracer=tracer,
        )

        data = DataServer(
            SnapshotProvider(parts),
            max_rate=config.max_rate,
            nixl=nixl,
            access=parts.data_access,
            address=data_address,
            instance=lease.member.instance,
        )
        stack.push_async_callback(asyncio.to_thread, data.close)
        data.serve_tcp(data_listener)
        socket_path = None if config.distrust_publisher else _socket_path(config.pool_dir, PUBLISH_SOCKET)
        if socket_path is not None:
            data.serve_unix(socket_path, group=_group(config))

        engine_ports = await open_engine_ports(config, credentials, stack)

        await lease.take()
        stack.push_async_callback(lease.leave)
        lease.holdings.register(registered(config, engine_ports, grpc_address))

        await parts.relay.refresh()
        recovery = Recovery(parts.lease.view, parts.elections, parts.models, parts.reconciler, notices)
        spilled = spill.versions() if spill is not None else []
        again = {snapshot.directory for snapshot in found}
        await recovery.know_again([*spilled, *left], [*spilled, *(one for one in left if one.directory in again)])
        recovery.offer_again(found, store)
        registry.timeout_s = CALL_TIMEOUT_S  # a call that fails from now on is made again
        life = asyncio.ensure_future(parts.run())
        stack.push_async_callback(_end, life, parts)

        opened = list(engine_ports.values())
        service = RelayService(parts, data_address=data_address, publish_socket=socket_path, engine_ports=opened)
        checks = await _add_services(server, service)
        found_healthy = Health()
        health_task = asyncio.ensure_future(report_health(checks, SERVICE, found_healthy, lambda: lease.name_taken))
        stack.push_async_callback(_cancel, health_task)
        addresses = {"grpc": grpc_address, "data": data_address, "name": config.name}
        if config.metrics_port is not None:
            sources = Sources(parts, data, opened)
            addresses["metrics"], stop_metrics = serve_metrics(config.host, config.metrics_port, sources, found_healthy)
            stack.push_async_callback(asyncio.to_thread, stop_metrics)
        if telemetry.meter is not None:
            export_metrics(telemetry.meter, Sources(parts, data, opened))
        await server.start()
        stack.push_async_callback(server.stop, DRAIN_S)
        stack.callback(parts.end_streams)
        yield addresses, life


async def _open_store(
    config: RelayConfig, stack: contextlib.AsyncExitStack, notices: Notices
) -> tuple[Store, list[stored.StoredSnapshot], list[Snapshot]]:
    """The pool, touched, what an earlier life left in it, and what of that is whole."""
    keep_private(config.pool_dir, _group(config), "--pool-dir")
    left = stored.find(config.pool_dir)
    pool = Pool(config.pool_dir, config.pool_bytes, keep=[path for one in left for path in one.paths])
    store = Store(pool, left)
    stack.callback(_close_store, store, config)
    found = await asyncio.to_thread(find_again, store, left, notices)
    await asyncio.to_thread(pool.preallocate)
    return store, left, found


def _close_store(store: Store, config: RelayConfig) -> None:
    """Gives the memory back, and reports how much of it stays."""
    kept = store.close(forget=config.forget)
    if kept:
        log.info(
            "%s stay in memory, in %s, with %s: the next start finds them, and %s gives them back",
            show_bytes(sum(one.manifest.size_bytes for one in kept)),
            config.pool_dir,
            ", ".join(sorted(f"version {one.manifest.version} of {one.manifest.model}" for one in kept)),
            f"`paramserver clear --pool-dir {config.pool_dir}`",
        )


async def _start_nixl(config: RelayConfig, stack: contextlib.AsyncExitStack) -> NixlProcesses | None:
    if config.transport != "nixl":
        return None
    nixl = NixlProcesses(idle_max=2 * config.stripes, interface=config.bind_interface)
    stack.push_async_callback(asyncio.to_thread, nixl.close)
    await asyncio.to_thread(nixl.warm, config.stripes)
    return nixl


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


def _open_spill(config: RelayConfig, stack: contextlib.AsyncExitStack, notices: Notices) -> Spill | None:
    if config.spill is None:
        return None
    keep_private(config.spill, _group(config), "--spill")
    spill = Spill(config.spill, retain=config.spill_retain, notices=notices)
    stack.push_async_callback(asyncio.to_thread, spill.close)
    return spill


def find_again(store: Store, left: list[stored.StoredSnapshot], notices: Notices) -> list[Snapshot]:
    """The snapshots that an earlier life left whole in shared memory, as far as the pool holds them."""
    found = []
    for one in left:
        started = time.monotonic()
        try:
            found.append(store.find_again(one))
        except (Corrupt, OutOfCapacity) as error:
            log.warning("%s", error)
            notices.add(str(error), time.time())
        else:
            log.info("found %s again, hashed in %.2f s", found[-1], time.monotonic() - started)
    return found


async def _end(life: asyncio.Future[None], parts: RelayParts) -> None:
    await _cancel(life)
    await parts.close()


async def _add_services(server: grpc.aio.Server, service: RelayService) -> health.aio.HealthServicer:
    relay_pb2_grpc.add_RelayServicer_to_server(service, server)
    checks = health.aio.HealthServicer()
    await checks.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return checks


async def _cancel(task: asyncio.Future[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _group(config: RelayConfig) -> int | None:
    """The group of `--group`, by its number. InvalidRequest for one that this host does not have."""
    return group_id(config.group) if config.group else None


def _socket_path(pool_dir: Path, name: str) -> Path:
    """In the pool directory; beside the temporary files when that path is too long for a unix socket."""
    path = pool_dir.resolve() / name
    if len(str(path)) <= SOCKET_PATH_MAX:
        return path
    return Path(tempfile.gettempdir()) / f"laminar-{hashlib.sha256(str(path).encode()).hexdigest()[:16]}.sock"


def _stop_event() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
