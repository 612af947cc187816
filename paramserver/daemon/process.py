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
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paramserver.config import RelayConfig
from paramserver.core.records import Member, RegisteredEngine
from paramserver.daemon.metrics import serve_metrics
from paramserver.daemon.service import RelayService
from paramserver.data.nixl_processes import NixlProcesses
from paramserver.data.server import DataServer
from paramserver.data.spill import Spill
from paramserver.host import address_of
from paramserver.master.publications import Publications
from paramserver.membership.etcd import CALL_TIMEOUT_S, START_TIMEOUT_S, EtcdRegistry
from paramserver.memory import kept
from paramserver.memory.pool import Pool
from paramserver.memory.store import Snapshot, Store
from paramserver.relay.member_lease import MemberLease
from paramserver.relay.relay import Relay
from protos.errors import Conflict, Corrupt, OutOfCapacity
from protos.laminar.v1 import relay_pb2, relay_pb2_grpc
from protos.process import cannot_listen

log = logging.getLogger(__name__)

DRAIN_S = 2.0
HEALTH_S = 1.0
SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),  # a port that is taken must be refused, not shared
    ("grpc.max_receive_message_length", 64 << 20),  # an announcement names every tensor
    ("grpc.keepalive_time_ms", 10_000),  # a publisher whose host vanished must not hold its run for ever
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # a minute by default, and it rules over the one before
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # the clients' keepalive on idle watches is welcome
    ("grpc.http2.max_ping_strikes", 0),
]
SOCKET_PATH_MAX = 100  # the kernel takes 107
SERVICE = relay_pb2.DESCRIPTOR.services_by_name["Relay"].full_name


@dataclass
class _Provider:
    """What the data port sees of the relay; both halves appear once the relay has its seat."""

    relay: Relay | None = None
    publishing: Publications | None = None

    def find(self, model: str, version: int, timeout_s: float) -> Snapshot | None:
        return self.relay.find(model, version, timeout_s) if self.relay else None

    def writable(self, model: str, version: int, token: str) -> Snapshot:
        if self.publishing is None:
            raise Conflict("this relay is still starting")
        return self.publishing.writable(model, version, token)

    def chunk_is_bad(self, snapshot: Snapshot, error: Corrupt) -> None:
        if self.relay is not None:
            self.relay.chunk_is_bad(snapshot, error)


async def serve(config: RelayConfig, on_ready: Callable[[dict[str, str]], None]) -> None:
    """Runs one relay until SIGTERM or SIGINT. `on_ready` gets its addresses once it serves."""
    log.info("configuration: %s", config)
    stop = _stop_event()  # a SIGTERM while starting waits for the end of it, so that the memory goes back
    async with relay_process(config) as (addresses, failed):
        on_ready(addresses)
        log.info("relay %s serves gRPC on %s, bytes on %s", config.name, addresses["grpc"], addresses["data"])
        failed.add_done_callback(lambda _: stop.set())
        await stop.wait()
        if failed.done():
            failed.result()


@contextlib.asynccontextmanager
async def relay_process(config: RelayConfig) -> AsyncIterator[tuple[dict[str, str], asyncio.Future[None]]]:
    """A relay, serving; yields its addresses and the task in which it lives (done only when it broke)."""
    data_host = address_of(config.bind_interface) if config.bind_interface else config.host
    server = grpc.aio.server(options=SERVER_OPTIONS)
    grpc_address = _bind(server, config)
    async with contextlib.AsyncExitStack() as stack:
        # Closing runs in the reverse order: streams end, control stops taking calls, fetches end, the seat is given up,
        # the data port closes, and last the memory goes.
        registry = await EtcdRegistry.connect(config.etcd, timeout_s=START_TIMEOUT_S)
        stack.push_async_callback(registry.close)
        store, found = await _open_store(config, stack)
        movers = await _start_movers(config, stack)

        provider = _Provider()
        data = DataServer(provider, max_rate=config.max_rate, movers=movers)
        stack.push_async_callback(asyncio.to_thread, data.close)
        data_address = data.listen_tcp(data_host, config.data_port)
        if not config.bind_interface:
            data_address = f"{config.reached_by}:{data_address.rpartition(':')[2]}"
        socket_path = None if config.distrust_publisher else _socket_path(config.pool_dir)
        if socket_path is not None:
            data.listen_unix(socket_path)

        seat = MemberLease(registry, _member(config, grpc_address, data_address), ttl_s=config.lease_ttl_s)
        await seat.take()
        stack.push_async_callback(seat.leave)
        seat.register([RegisteredEngine(e.name(config.name), e.kind, e.url, grpc_address) for e in config.engines])

        bind_host = data_host if config.bind_interface else ""
        relay = _make_relay(config, seat, store, stack, bind_host=bind_host, movers=movers)
        await relay.refresh()
        spilled = relay.spill.manifests() if relay.spill is not None else []
        await relay.heed_earlier_registry([*(snapshot.manifest for snapshot in found), *spilled])
        relay.offer_again(found)
        registry.timeout_s = CALL_TIMEOUT_S  # from now on it is asked again
        publishing = Publications(relay)
        provider.relay, provider.publishing = relay, publishing
        life = asyncio.ensure_future(_live(relay, publishing))
        stack.push_async_callback(_end, life, relay, publishing)

        service = RelayService(relay, publishing, data_address=data_address, publish_socket=socket_path)
        checks = await _add_services(server, service)
        tell = asyncio.ensure_future(_tell_health(checks, seat))
        stack.push_async_callback(_cancel, tell)
        addresses = {"grpc": grpc_address, "data": data_address, "name": config.name}
        if config.metrics_port is not None:
            addresses["metrics"], stop_metrics = serve_metrics(
                config.host, config.metrics_port, relay, publishing, data
            )
            stack.push_async_callback(asyncio.to_thread, stop_metrics)
        await server.start()
        stack.push_async_callback(server.stop, DRAIN_S)
        stack.push_async_callback(relay.dismiss)
        yield addresses, life


async def _open_store(config: RelayConfig, stack: contextlib.AsyncExitStack) -> tuple[Store, list[Snapshot]]:
    """The pool, touched, and what an earlier life left whole in it."""
    left = kept.find(config.pool_dir)
    pool = Pool(config.pool_dir, config.pool_bytes, keep=[path for one in left for path in one.paths])
    store = Store(pool, left)
    stack.callback(store.close)
    found = await asyncio.to_thread(_find_again, store, left)
    await asyncio.to_thread(pool.preallocate)
    return store, found


async def _start_movers(config: RelayConfig, stack: contextlib.AsyncExitStack) -> NixlProcesses | None:
    if config.transport != "nixl":
        return None
    movers = NixlProcesses(idle_max=2 * config.num_stripes, interface=config.bind_interface)
    stack.push_async_callback(asyncio.to_thread, movers.close)
    await asyncio.to_thread(movers.warm, config.num_stripes)
    return movers


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


def _make_relay(
    config: RelayConfig,
    seat: MemberLease,
    store: Store,
    stack: contextlib.AsyncExitStack,
    *,
    bind_host: str,
    movers: NixlProcesses | None,
) -> Relay:
    spill = None
    if config.spill is not None:
        spill = Spill(config.spill, retain=config.spill_retain, wrote=lambda _: relay.spill_changed())
        stack.push_async_callback(asyncio.to_thread, spill.close)
    relay = Relay(config, seat, store, spill=spill, bind_host=bind_host, movers=movers)
    if spill is not None:
        relay.spill_changed()
    return relay


def _find_again(store: Store, left: list[kept.Kept]) -> list[Snapshot]:
    """What an earlier life left whole in shared memory, newest first, as far as the pool holds it."""
    found = []
    for one in left:
        started = time.monotonic()
        try:
            found.append(store.find_again(one))
        except (Corrupt, OutOfCapacity) as error:
            log.warning("%s", error)
        else:
            log.info("found %s again, hashed in %.2f s", found[-1], time.monotonic() - started)
    return found


async def _live(relay: Relay, publishing: Publications) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(relay.seat.keep())
        group.create_task(relay.seat.tell_holdings())
        group.create_task(relay.follow())
        group.create_task(relay.housekeep())
        group.create_task(publishing.presiding.preside())


async def _end(life: asyncio.Future[None], relay: Relay, publishing: Publications) -> None:
    life.cancel()
    await asyncio.wait([life])
    await publishing.close()
    await relay.close()


def _bind(server: grpc.aio.Server, config: RelayConfig) -> str:
    wanted = f"{config.host}:{config.port}"
    try:
        socket.create_server((config.host, config.port)).close()  # gRPC would not say what is wrong
    except OSError as error:
        raise cannot_listen(config.host, config.port, error) from error
    try:
        port = server.add_insecure_port(wanted)
    except RuntimeError as error:
        raise Conflict(f"cannot listen on {wanted}", hint="choose another --port, or 0 for any free one") from error
    if port == 0:
        raise Conflict(f"cannot listen on {wanted}", hint="choose another --port, or 0 for any free one")
    return f"{config.reached_by}:{port}"


async def _add_services(server: grpc.aio.Server, service: RelayService) -> health.aio.HealthServicer:
    relay_pb2_grpc.add_RelayServicer_to_server(service, server)
    checks = health.aio.HealthServicer()
    await checks.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return checks


async def _tell_health(checks: health.aio.HealthServicer, seat: MemberLease) -> None:
    """A relay whose name another one has is no member, however well it serves what it held: others should be asked."""
    while True:
        found = health_pb2.HealthCheckResponse
        await checks.set(SERVICE, found.NOT_SERVING if seat.name_taken else found.SERVING)
        await asyncio.sleep(HEALTH_S)


async def _cancel(task: asyncio.Future[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _socket_path(pool_dir: Path) -> Path:
    """In the pool directory; beside the temporary files when that path is too long for a unix socket."""
    path = pool_dir.resolve() / "publish.sock"
    if len(str(path)) <= SOCKET_PATH_MAX:
        return path
    return Path(tempfile.gettempdir()) / f"laminar-{hashlib.sha256(str(path).encode()).hexdigest()[:16]}.sock"


def _stop_event() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
