"""The processes of a simulated tier: relays, trainers that publish with the SDK's own code, readers that map files."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramserver.client import publisher
from paramserver.client.relay import RelayClient
from paramserver.client.sources import TensorSource
from paramserver.client.ticket import Ticket
from paramserver.config import RelayConfig
from paramserver.core.layout import TensorSpec, plan_layout
from paramserver.core.notices import Notices
from paramserver.core.records import Member
from paramserver.daemon.memory import find_again
from paramserver.daemon.parts import RelayParts
from paramserver.daemon.provider import SnapshotProvider
from paramserver.daemon.service import RelayService
from paramserver.data.publish import Image
from paramserver.memory import stored
from paramserver.memory.pool import Pool
from paramserver.memory.store import Store
from paramserver.relay.member_lease import MemberLease
from paramserver.relay.recovery import Recovery
from protos.errors import InDoubt, LaminarError, Unavailable, VersionLost
from protos.laminar.v1 import relay_pb2 as pb
from tests.sim.registry import SimRegistry
from tests.sim.virtual import Process

if TYPE_CHECKING:
    from tests.sim.tier import World

TTL_S = 2.0
CHUNK_BYTES = 4096
TENSORS = (("embed", 9000), ("head", 5500))
VERSION_BYTES = 15_000  # both, and their header, rounded up
LATENCY_S = 0.002


class SimRelay:
    """One life of one relay: what `relay_process` assembles, without sockets."""

    def __init__(self, world: World, name: str, life: int, member: dict[str, Any], pool_bytes: int) -> None:
        self.world, self.name, self.address = world, name, f"{name}#{life}"
        self.process = Process(world.clock, world.rng, name)
        self.process.world = world
        self.pool_dir = world.directory / name
        self.pool_bytes = pool_bytes
        self.parts: RelayParts | None = None
        self.provider: SnapshotProvider | None = None
        self.service: RelayService | None = None
        self.store: Store | None = None
        self.refused: LaminarError | None = None  # it could not start, and said why
        self.streams: list[Callable[[Any], None]] = []
        self._member = Member(name, self.address, self.address, self.address, **member)
        self.life = self.process.create_task(self._live())

    async def _live(self) -> None:
        left = stored.find(self.pool_dir)
        pool = Pool(self.pool_dir, self.pool_bytes, keep=[path for one in left for path in one.paths])
        self.store = Store(pool, left)
        found = find_again(self.store, left, Notices())
        lease = MemberLease(SimRegistry(self.world.registry, self.process), self._member, ttl_s=TTL_S)
        config = RelayConfig(
            self.name, "", pool_dir=self.pool_dir, pool_bytes=self.pool_bytes, chunk_bytes=CHUNK_BYTES, retain=2
        )
        parts = RelayParts(config, lease, self.store, dial=lambda address: Client(self.world, self.process, address))
        try:
            await lease.take()
            await parts.relay.refresh()
        except LaminarError as error:
            self.refused = error
            return
        recovery = Recovery(lease.view, parts.elections, parts.models, parts.reconciler, parts.notices)
        await recovery.know_again(left, left)
        recovery.offer_again(found, self.store)
        self.service = RelayService(parts, data_address=self.address, publish_socket=Path("unused"))
        self.parts, self.provider = parts, SnapshotProvider(parts)
        await parts.run()

    def kill(self) -> None:
        """As by SIGKILL: its shared memory stays as it is."""
        self.process.kill()
        for tell in self.streams:
            tell(None)
        if self.store is not None:
            abandon(self.store.pool)


def abandon(pool: Pool) -> None:
    """What the kernel does with a dead process's descriptors and mappings; the files stay."""
    for file in [*pool._free, *pool._used, *pool._quarantined]:
        file._unmap()
        os.close(file.fd)
    os.close(pool._lock_fd)


class Client(RelayClient):
    """The SDK's client, speaking through the world instead of gRPC."""

    def __init__(self, world: World, process: Process, address: str) -> None:
        super().__init__(address, timeout_s=3.0)
        self._world, self._process = world, process

    @property
    def stub(self) -> Any:
        return _Stub(self._world, self._process, self.address)

    async def master_of(self, model: str) -> RelayClient:
        reply = await self.call(self.stub.Locate(pb.LocateRequest(model=model), timeout=15.0))
        if reply.grpc_address == self.address:
            return self
        return self._peer(reply.grpc_address)

    def _peer(self, address: str) -> RelayClient:
        if address == self.address:
            return self
        return self._peers.setdefault(address, Client(self._world, self._process, address))


class _Stub:
    def __init__(self, world: World, process: Process, address: str) -> None:
        self._world, self._process, self._address = world, process, address

    def HoldRun(self, request: pb.HoldRunRequest) -> AsyncIterator[Any]:  # noqa: N802
        return hold(self._world, self._process, self._address, request)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda request, timeout: call(self._world, self._process, self._address, method, request, timeout)


async def call(world: World, process: Process, address: str, method: str, request: Any, timeout_s: float) -> Any:
    """One RPC, answered by the relay's own service."""
    future: asyncio.Future[Any] = process.create_future()

    def settle(result: Any) -> None:
        if not process.dead and not future.done():
            future.set_result(result)

    def answer(server: SimRelay, result: Any) -> None:
        if world.net.passes(server.name, process.name):
            world.clock.after(world.rng.expovariate(1 / LATENCY_S), lambda: settle(result))

    def arrive() -> None:
        server = world.listening(address)
        if not world.net.passes(process.name, address.partition("#")[0]):
            return
        if server is None or server.service is None:
            settle(Unavailable("connection refused"))
        else:
            server.process.create_task(serve(server))

    async def serve(server: SimRelay) -> None:
        try:
            result = await getattr(RelayService, method).__wrapped__(server.service, request, None)
        except LaminarError as error:
            result = error
        answer(server, result)

    world.clock.after(world.rng.expovariate(1 / LATENCY_S), arrive)
    try:
        async with asyncio.timeout(timeout_s):
            result = await future
    except TimeoutError as error:
        raise Unavailable(f"{address} did not answer {method}") from error
    if isinstance(result, LaminarError):
        raise type(result)(result.message, hint=result.hint)
    return result


async def hold(world: World, process: Process, address: str, request: Any) -> AsyncIterator[Any]:
    """The stream that holds a run; the relay notices its end a moment after this side's death."""
    heard: asyncio.Queue[Any] = asyncio.Queue()
    server = world.listening(address)
    if server is None or server.service is None or not world.net.passes(process.name, server.name):
        raise Unavailable("connection refused")

    def tell(what: Any) -> None:
        if not process.dead:
            world.clock.after(LATENCY_S, lambda: process.dead or heard.put_nowait(what))

    async def serve() -> None:
        stream = RelayService.HoldRun.__wrapped__(server.service, request, None)
        async with contextlib.aclosing(stream):
            try:
                async for reply in stream:
                    tell(reply)
            except LaminarError as error:
                tell(error)
        tell(None)

    task = server.process.create_task(serve())
    server.streams.append(tell)
    try:
        while (what := await heard.get()) is not None:
            if isinstance(what, LaminarError):
                raise type(what)(what.message, hint=what.hint)
            yield what
    finally:
        world.clock.after(0.05, lambda: None if server.process.dead else task.cancel())


async def write(master: Client, model: str, opened: pb.AnnounceReply, image: Image, force_tcp: bool) -> list[bytes]:
    """Stands where `publisher._write` does: chunk by chunk, through a mapping of its own or over the data port."""
    process, world = master._process, master._world
    mapped = world.rng.random() < 0.5

    def begin(server: SimRelay) -> Any:
        assert server.provider is not None
        snapshot = server.provider.writable(model, opened.version, opened.token)
        snapshot.written_elsewhere = snapshot.written_elsewhere or mapped
        with snapshot.reading():
            return snapshot, {index: snapshot.place(index) for index in image.indices}

    snapshot, places = await _on_port(world, process, master.address, begin)
    digests = []
    for index in image.indices:
        await asyncio.sleep(world.rng.expovariate(50))
        copy = bytearray(len(places[index]))
        digests.append(image.fill(image.chunks.chunk(index), memoryview(copy)))
        if mapped:
            places[index][:] = copy

        def present(server: SimRelay, index: int = index, copy: bytes = bytes(copy), known: bytes = digests[-1]) -> Any:
            with snapshot.reading():
                if not mapped:
                    snapshot.place(index)[:] = copy
                snapshot.present(index, known)
            return True

        await _on_port(world, process, master.address, present)
    return digests


async def _on_port(world: World, process: Process, address: str, work: Callable[[SimRelay], Any]) -> Any:
    """One exchange with the threads of a relay's data port."""
    future: asyncio.Future[Any] = process.create_future()

    def settle(result: Any) -> None:
        if not process.dead and not future.done():
            future.set_result(result)

    def attend(server: SimRelay) -> None:
        try:
            result = work(server)
        except LaminarError as error:
            result = error
        world.clock.after(LATENCY_S, lambda: settle(result))

    def arrive() -> None:
        server = world.listening(address)
        if not world.net.passes(process.name, address.partition("#")[0]):
            return
        if server is None:
            settle(Unavailable("connection reset"))
        else:
            server.process.threads(lambda: attend(server))

    world.clock.after(LATENCY_S, arrive)
    try:
        async with asyncio.timeout(10.0):
            result = await future
    except TimeoutError as error:
        raise Unavailable("the data port made no progress") from error
    if isinstance(result, LaminarError):
        raise type(result)(result.message, hint=result.hint)
    return result


def content(model: str, run: str, step: int) -> dict[str, bytes]:
    """The tensors of one step: what every reader of that version must find."""
    return {name: random.Random(f"{model} {run} {step} {name}").randbytes(size) for name, size in TENSORS}


def file_bytes(tensors: dict[str, bytes]) -> bytes:
    (file,) = plan_layout([TensorSpec(name, "U8", (len(data),)) for name, data in tensors.items()])
    return file.head + b"".join(tensors[place.name] for place in file.tensors)


class SimTrainer:
    """One life of one training job: a run of its own."""

    def __init__(self, world: World, model: str, life: int) -> None:
        self.world, self.model, self.run = world, model, f"run-{life}"
        self.process = Process(world.clock, world.rng, f"trainer-{model}")
        self.process.world = world
        self.step = 0
        self.life = self.process.create_task(self._train())

    async def _train(self) -> None:
        world, rng = self.world, self.world.rng
        while True:
            await asyncio.sleep(rng.expovariate(1.0))
            client = Client(
                world, self.process, rng.choice(sorted(world.relays.values(), key=lambda r: r.name)).address
            )
            with contextlib.suppress(LaminarError):
                for _ in range(rng.randint(1, 6)):
                    await self._publish(client)
                    await asyncio.sleep(rng.expovariate(1.0))
            await client.close()

    async def _publish(self, client: Client) -> None:
        self.step += 1
        tensors = content(self.model, self.run, self.step)
        sources = [
            TensorSource(name, "U8", (len(data),), lambda data=data: memoryview(data)) for name, data in tensors.items()
        ]
        ticket = await publisher.publish(
            client, self.model, sources, step=self.step, run=self.run, wait_room_s=self.world.rng.uniform(0, 3)
        )
        if self.world.rng.random() < 0.7 or self.world.healing:
            await self._ask(ticket)

    async def _ask(self, ticket: Ticket) -> None:
        try:
            await ticket.wait_sealed(5.0)
        except VersionLost:
            self.world.told_lost(ticket)
        except InDoubt:
            return
        else:
            self.world.told_sealed(ticket)


class SimReader:
    """An engine beside one relay: it maps what it acquires, and looks again and again while it holds it."""

    def __init__(self, world: World, host: str, model: str) -> None:
        self.world, self.host, self.model = world, host, model
        self.process = Process(world.clock, world.rng, f"reader-{host}-{model}")
        self.process.world = world
        self.newest: tuple[str, int] = ("", 0)
        self._maps: list[tuple[mmap.mmap, bytes]] = []
        self.life = self.process.create_task(self._read())

    async def _read(self) -> None:
        rng = self.world.rng
        while True:
            await asyncio.sleep(rng.expovariate(1.0))
            with contextlib.suppress(LaminarError):
                await self._load(Client(self.world, self.process, self.world.relays[self.host].address))

    async def _load(self, client: Client) -> None:
        rng = self.world.rng
        ttl_s = rng.choice((0.3, 2.0, 10.0))
        exact = rng.choice([None, None, self.newest[1] or None, self.newest[1] + 1])
        lease = await client.acquire(self.model, exact, holder=self.process.name, ttl_s=ttl_s)
        record = self.world.sealed[self.model, lease.version]
        assert lease.root_digest == record.root_digest, "what was acquired is not what was sealed"
        assert exact is None or lease.version == exact, "another version than the one asked for"
        if exact is None:
            self._check_growth(client.address, lease.version)
        expected = file_bytes(content(self.model, record.run, record.step))
        try:
            fd = os.open(f"{lease.path}/model.safetensors", os.O_RDONLY)
        except FileNotFoundError:  # the pin lapsed before it was used
            return
        mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        os.close(fd)
        self._maps.append((mapped, expected))
        if self.world.is_tainted(self.host, self.model, lease.version):
            self._let_go()
            return
        await self._hold(client, lease, ttl_s)

    async def _hold(self, client: Client, lease: Any, ttl_s: float) -> None:
        """Some let the pin lapse and keep the mapping: its bytes stay as they are all the same."""
        rng = self.world.rng
        careless = rng.random() < 0.2
        until = self.process.time() + rng.expovariate(0.5)
        try:
            while self.process.time() < until and not self.world.healing:
                await asyncio.sleep(ttl_s / 3)
                if not careless:
                    await client.renew(lease)
                if not self.world.is_tainted(self.host, self.model, lease.version):
                    self.look()
            await client.release(lease)
        finally:
            self._let_go()

    def look(self) -> None:
        for mapped, expected in self._maps:
            assert mapped[:] == expected, f"{self.process.name} reads other bytes than were published"

    def _let_go(self) -> None:
        while self._maps:
            self._maps.pop()[0].close()

    def _check_growth(self, address: str, version: int) -> None:
        life, newest = self.newest
        gone = life != address or self.world.was_dropped(self.host, self.model, newest)
        assert version >= newest or gone, f"the newest version on {address} went back from {newest} to {version}"
        self.newest = address, version
