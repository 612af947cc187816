"""A client of one relay: status, versions, watch, acquire, and what publishing builds on.

Invariants:
- only sealed versions that the relay holds complete are ever shown or acquired;
- a lease that lapsed is never quietly taken for one that was held: `release` raises NotFound.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar, cast

import grpc
import grpc.aio

from paramserver.client.channel import Connection
from paramserver.client.doubts import Doubts
from paramserver.core.lineage import UNKNOWN, Lineage, Origin
from paramserver.core.notices import Notice
from paramserver.core.records import SOLE, Rank
from paramserver.core.refused_loads import RefusedLoad
from paramserver.data.publisher_link import Mappings
from paramserver.data.secured import DataAccess
from protos import grpc_errors
from protos.access.credentials import Credentials, from_environment
from protos.errors import LaminarError, NotFound, StaleEpoch, Unavailable
from protos.laminar.v1 import relay_pb2 as pb
from protos.laminar.v1 import relay_pb2_grpc as pb_grpc
from protos.version_labels import VersionLabels, read_labels

log = logging.getLogger(__name__)

FIND_S = 1.5  # for one relay to name the master, while the master may be dead
OTHERS_MAX = 8
DROP_TIMEOUT_S = 30.0
RECONNECT_S = (0.1, 0.2, 0.5, 1.0, 2.0)

T = TypeVar("T")

EventKind = Literal["sealed", "available", "retired", "lost"]


@dataclass(frozen=True, slots=True)
class SealedVersion:
    """A sealed version as one relay sees it. `labels["note"]`, and so on: what its publisher said of it."""

    model: str
    version: int
    step: int
    run: str
    root_digest: str
    size_bytes: int
    sealed_unix_s: float
    labels: VersionLabels = field(default_factory=lambda: read_labels({}), hash=False)


@dataclass(frozen=True, slots=True)
class VersionEvent:
    """A change of a version; `available` means sealed and held complete by the watched relay."""

    kind: EventKind
    version: SealedVersion
    origin: Origin = UNKNOWN


@dataclass(frozen=True, slots=True)
class Lease:
    """A pin on the local relay: until `ttl_s` after the last renewal, `path` is not retired."""

    lease_id: str
    model: str
    version: int
    path: Path
    root_digest: str
    step: int
    ttl_s: float
    traceparent: str = ""  # of the span with which the version came to the relay; empty if that is not traced


@dataclass(frozen=True, slots=True)
class TransferStatus:
    """One version on its way into a relay."""

    model: str
    version: int
    upstream: str
    bytes_done: int
    bytes_total: int
    transport: str = ""


@dataclass(frozen=True, slots=True)
class PinStatus:
    """One pin on a relay's snapshot."""

    model: str
    version: int
    holder: str
    expires_in_s: float
    copies: int = 0


@dataclass(frozen=True, slots=True)
class HopStatus:
    """One relay of the chain: how the newest version came to it, what it holds, and why it is at the tail if it is."""

    relay: str
    upstream: str
    rate_bytes_s: float
    versions: tuple[int, ...]
    slow: str
    alive: bool
    transport: str = ""


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model at one relay: its master, the chain of the newest plan, the versions held there.

    `sealed` are those of `versions`; a relay of an earlier release does not send them. `newest_announced`: the highest
    number given, sealed or not; 0 of an earlier release, too.
    """

    model: str
    master: str
    epoch: str
    plan: int
    chain: tuple[str, ...]
    versions: tuple[int, ...]
    newest_sealed: int | None
    plan_reason: str
    hops: tuple[HopStatus, ...]
    refused_loads: tuple[RefusedLoad, ...] = ()
    sealed: tuple[SealedVersion, ...] = ()
    newest_announced: int = 0


@dataclass(frozen=True, slots=True)
class AccessStatus:
    """The credentials of a relay: see `Access` in relay.proto."""

    identity: str
    expires_unix_s: float
    cas: tuple[str, ...]
    num_fleet_keys: int
    failure: str


@dataclass(frozen=True, slots=True)
class EnginePortStatus:
    """A port of TLS in front of an engine: see `EnginePort` in relay.proto."""

    engine: str
    url: str
    target: str
    open: int
    handshakes: int
    accepted: int
    refused: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RelayStatus:
    """One relay's own view of itself and of its models."""

    relay: str
    instance: str
    members: tuple[str, ...]
    models: tuple[ModelStatus, ...]
    transfers: tuple[TransferStatus, ...]
    pins: tuple[PinStatus, ...]
    pool_bytes: int
    used_bytes: int
    quarantined_bytes: int
    cut_off: tuple[str, ...]
    registry_reachable: bool
    data_address: str
    transport: str = "tcp"
    draining: bool = False
    trouble: str = ""
    store_id: str = ""
    continues: tuple[str, ...] = ()
    insecure: bool = False  # it was started with --insecure
    access: AccessStatus | None = None  # None: it has no credentials
    engine_ports: tuple[EnginePortStatus, ...] = ()
    notices: tuple[Notice, ...] = ()  # for people: what was lost, damaged or offered again since it started
    watched: tuple[str, ...] = ()  # models that gateways and others watch there

    @property
    def origin(self) -> Origin:
        """The registry that its versions come from."""
        return Origin.of(self.store_id, self.continues)

    @property
    def held(self) -> dict[str, tuple[int, ...]]:
        """Versions held complete and sealed, per model."""
        return {model.model: model.versions for model in self.models}


class RelayClient:
    """A connection to one relay's gRPC port, "host:port". Every call has `timeout_s` as its deadline."""

    def __init__(self, address: str, *, timeout_s: float = 10.0, credentials: Credentials | None = None) -> None:
        """`credentials`: the fleet's; None: those in the directory that LAMINAR_CREDENTIALS names, if it does. Raises
        InvalidRequest where these cannot be used."""
        self.address = address
        self.timeout_s = timeout_s
        self._credentials = from_environment() if credentials is None else credentials
        self._connection = Connection(address, self._credentials)
        self._peers: dict[str, RelayClient] = {}
        self._masters: dict[str, RelayClient] = {}
        self._claims: dict[tuple[str, str], RunHold] = {}
        self.origin = UNKNOWN  # of the registry that this relay belonged to at its last reply about versions
        self.lineages: dict[str, Lineage] = {}  # of the models published through this client
        self.doubts = Doubts()
        self._others: tuple[str, ...] = ()  # addresses of further relays, for when this one is silent
        self._id = secrets.token_hex(8)
        self.mappings = Mappings()
        self.port_was_logged = False  # why bytes for this relay go over its data port

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Gives up the runs claimed through this client, and its connections."""
        for hold in self._claims.values():
            await hold.close()
        self._claims.clear()
        for peer in self._peers.values():
            await peer.close()
        self._peers.clear()
        self._masters.clear()
        self.mappings.close()
        await self._connection.close()

    async def status(self) -> RelayStatus:
        return _status(await self.call(self.stub.Status(pb.StatusRequest(), timeout=self.timeout_s)))

    async def versions(self, model: str) -> list[SealedVersion]:
        """Sealed versions that this relay holds complete, ascending. UnknownModel names those that exist."""
        reply = await self.call(self.stub.Versions(pb.VersionsRequest(model=model), timeout=self.timeout_s))
        self.origin = Origin.of(reply.store_id, reply.continues)
        return [_sealed(version) for version in reply.versions]

    async def newest(self, model: str) -> SealedVersion | None:
        """The newest of `versions`; None while there is none."""
        held = await self.versions(model)
        return held[-1] if held else None

    @property
    def data_access(self) -> DataAccess | None:
        """With which connections to relays' data ports are opened; None without credentials."""
        return DataAccess(self._credentials) if self._credentials is not None else None

    @property
    def connected(self) -> bool:
        """Whether a connection to the relay stands now: False before the first call."""
        return self._connection.is_ready

    async def watch(self, model: str) -> AsyncIterator[VersionEvent]:
        """The current state, then every change. Reconnects by itself; the state then comes again, without repeats."""
        seen: dict[int, EventKind] = {}
        attempt = 0
        waits = not self._connection.is_secure  # else by tries: a certificate that expired is replaced between two
        while True:
            try:
                async for message in self.stub.Watch(pb.WatchRequest(model=model), wait_for_ready=waits):
                    attempt = 0
                    origin = Origin.of(message.store_id, message.continues)
                    event = VersionEvent(cast(EventKind, message.kind), _sealed(message.version), origin)
                    self.origin = origin
                    if seen.get(event.version.version) != event.kind:
                        seen[event.version.version] = event.kind
                        yield event
            except grpc.aio.AioRpcError as error:
                found = grpc_errors.from_rpc_error(error, self.address)
                if not isinstance(found, Unavailable):
                    raise found from error
                log.info("watch on %s at %s ended, watching again: %s", model, self.address, found)
            await asyncio.sleep(RECONNECT_S[min(attempt, len(RECONNECT_S) - 1)])
            attempt += 1

    async def acquire(
        self, model: str, version: int | None = None, *, holder: str, ttl_s: float = 60.0, copies: int = 0
    ) -> Lease:
        """Pins `version` (None: the newest). NotFound when this relay does not hold it sealed and complete.

        With `copies` it is a pin for the fleet: so many relays keep the version, this one among them. It outlives this
        relay by `ttl_s`, and gives way, the oldest first, to a version that finds no other room.
        """
        request = pb.AcquireRequest(model=model, version=version, holder=holder, ttl_s=ttl_s, copies=copies)
        lease = await self.call(self.stub.Acquire(request, timeout=self.timeout_s))
        return Lease(
            lease.lease_id,
            lease.model,
            lease.version,
            Path(lease.path),
            lease.root_digest,
            lease.step,
            lease.ttl_s,
            lease.traceparent,
        )

    async def renew(self, lease: Lease) -> None:
        """The pin holds for another `ttl_s` from now. NotFound when it had lapsed."""
        await self.call(self.stub.Renew(pb.LeaseRequest(lease_id=lease.lease_id), timeout=self.timeout_s))

    async def keep_pinned(self, lease: Lease) -> None:
        """Renews the pin until it is cancelled, or the pin has lapsed, which `release` reports as well.

        A renewal that did not reach the relay is tried again: there are two more before the pin lapses.
        """
        while True:
            await asyncio.sleep(lease.ttl_s / 3)
            try:
                await self.renew(lease)
            except NotFound:
                return
            except LaminarError as error:
                log.warning("the pin of %s version %d is not renewed: %s", lease.model, lease.version, error)

    async def release(self, lease: Lease) -> None:
        """Ends the pin. NotFound when it had lapsed: what was loaded under it does not count."""
        await self.call(self.stub.Release(pb.LeaseRequest(lease_id=lease.lease_id), timeout=self.timeout_s))

    async def report_load(self, model: str, version: int, engine: str, error: str) -> None:
        """Reports that an engine could not load a version, and why; `error` empty: it has loaded it after all.

        This relay and the model's master keep it for a while, for the ticket of who published the version.
        """
        report = pb.LoadReport(model=model, version=version, engine=engine, error=error)
        await self.call(self.stub.ReportLoad(report, timeout=self.timeout_s))
        master = await self.master_of(model)
        if master is not self:
            await master.call(master.stub.ReportLoad(report, timeout=self.timeout_s))

    # ---- for operators

    async def drain(self) -> list[str]:
        """Makes the relay take no more; what it is still needed for. To be called again until that is nothing."""
        return list((await self.call(self.stub.Drain(pb.DrainRequest(), timeout=self.timeout_s))).waiting_for)

    async def adopt(self, *, continues: str = "", model: str = "", above: int = 0) -> tuple[str, list[str]]:
        """Makes the relay join a registry that replaced its own: the store's id, and the versions it brings along.

        With `continues`, an earlier registry's id, the relay stays where it is, and records that versions of that one
        go on there, those of `model` above `above`.
        """
        request = pb.AdoptRequest(continues=continues, model=model, above=above)
        reply = await self.call(self.stub.Adopt(request, timeout=self.timeout_s))
        return reply.store_id, list(reply.versions)

    async def drop(self, model: str) -> list[int]:
        """Ends a model and all its versions on every relay. Conflict while somebody publishes to it."""
        reply = await self.call(self.stub.Drop(pb.DropRequest(model=model), timeout=DROP_TIMEOUT_S))
        return list(reply.versions)

    # ---- what the publisher and the CLI build on

    @property
    def stub(self) -> pb_grpc.RelayAsyncStub:
        return pb_grpc.RelayStub(self._connection.channel())

    async def call(self, reply: Awaitable[T]) -> T:
        """Awaits an RPC; its failure in the error vocabulary."""
        try:
            return await reply
        except grpc.aio.AioRpcError as error:
            raise grpc_errors.from_rpc_error(error, self.address) from error

    async def master_of(self, model: str) -> RelayClient:
        """A client of the model's master relay; this one, when it is the master itself."""
        timeout_s = max(self.timeout_s, 15.0)  # an election may have to run first
        reply = await self.call(self.stub.Locate(pb.LocateRequest(model=model), timeout=timeout_s))
        self._others = tuple(reply.others)
        self._masters[model] = self._peer(reply.grpc_address)
        return self._masters[model]

    async def find_master(self, model: str) -> RelayClient | None:
        """The model's master, named by this relay, or by another one where this is silent; None when none answers."""
        for relay in (self, *map(self._peer, self._others)):
            with contextlib.suppress(LaminarError):  # whatever it was: another relay may name the master
                request = pb.LocateRequest(model=model)
                reply = await relay.call(relay.stub.Locate(request, timeout=min(FIND_S, self.timeout_s)))
                self._others = tuple({*reply.others, *self._others} - {self.address})[:OTHERS_MAX]
                self._masters[model] = self._peer(reply.grpc_address)
                return self._masters[model]
        return None

    async def statuses(self) -> list[RelayStatus]:
        """Of this relay, and of others that a reply has named; those that answer at once."""

        async def status(relay: RelayClient) -> RelayStatus:
            async with asyncio.timeout(FIND_S):
                return await relay.status()

        relays = (self, *(self._peer(address) for address in self._others[:OTHERS_MAX]))
        found = await asyncio.gather(*map(status, relays), return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException) and not isinstance(error, LaminarError | TimeoutError):
                raise error
        return [one for one in found if isinstance(one, RelayStatus)]

    async def last_master_of(self, model: str) -> RelayClient:
        """The master of the last reply. One that is master no longer refuses calls, which is how that is noticed."""
        return self._masters.get(model) or await self.master_of(model)

    def _peer(self, address: str) -> RelayClient:
        if address == self.address:
            return self
        if address not in self._peers:
            self._peers[address] = RelayClient(address, timeout_s=self.timeout_s, credentials=self._credentials)
        return self._peers[address]

    async def hold_run(self, model: str, run: str, publisher: str, rank: Rank = SOLE) -> None:
        """Claims the model for `run` until this client closes. Conflict when another publisher is connected."""
        hold = self._claims.get((model, run))
        if hold is not None and hold.alive:
            return
        request = pb.HoldRunRequest(
            model=model, run=run, publisher=publisher, rank=rank.index, num_ranks=rank.count, client=self._id
        )
        self._claims[model, run] = await RunHold.open(self, request)

    async def release_run(self, model: str, run: str) -> None:
        """Ends the claim, so that the next `hold_run` opens one anew."""
        if hold := self._claims.pop((model, run), None):
            await hold.close()


class RunHold:
    """A claim on a model for one run; it lives as long as its stream."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    @classmethod
    async def open(cls, relay: RelayClient, request: pb.HoldRunRequest) -> RunHold:
        stream = aiter(relay.stub.HoldRun(request))
        await relay.call(_first(stream, relay.timeout_s))
        held = asyncio.create_task(_drain(stream))
        held.add_done_callback(lambda _: relay.mappings.close())
        return cls(held)

    @property
    def alive(self) -> bool:
        return not self._task.done()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def _first(stream: AsyncIterator[pb.HoldRunReply], timeout_s: float) -> pb.HoldRunReply:
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(stream)
    except TimeoutError as error:
        raise Unavailable(f"the relay did not grant the run within {timeout_s} s") from error
    except StopAsyncIteration as error:
        raise StaleEpoch("the relay is not master any more") from error


async def _drain(stream: AsyncIterator[pb.HoldRunReply]) -> None:
    """Returns when the relay ends the claim or goes away; cancelling ends the stream."""
    try:
        async for _ in stream:
            pass
    except grpc.aio.AioRpcError as error:
        log.info("the claim on a run ended: %s", error.details())


def _access(message: pb.Access) -> AccessStatus:
    return AccessStatus(
        message.identity,
        message.expires_unix_s,
        tuple(message.cas),
        message.num_fleet_keys,
        message.failure,
    )


def _sealed(message: pb.SealedVersion) -> SealedVersion:
    return SealedVersion(
        message.model,
        message.version,
        message.step,
        message.run,
        message.root_digest,
        message.size_bytes,
        message.sealed_unix_s,
        read_labels(message.labels),
    )


def _status(reply: pb.StatusReply) -> RelayStatus:
    return RelayStatus(
        relay=reply.relay,
        instance=reply.instance,
        members=tuple(reply.members),
        models=tuple(_model_status(model) for model in reply.models),
        transfers=tuple(
            TransferStatus(t.model, t.version, t.upstream, t.bytes_done, t.bytes_total, t.transport)
            for t in reply.transfers
        ),
        pins=tuple(PinStatus(p.model, p.version, p.holder, p.expires_in_s, p.copies) for p in reply.pins),
        pool_bytes=reply.pool_bytes,
        used_bytes=reply.used_bytes,
        quarantined_bytes=reply.quarantined_bytes,
        cut_off=tuple(reply.cut_off),
        registry_reachable=reply.registry_reachable,
        data_address=reply.data_address,
        transport=reply.transport or "tcp",
        draining=reply.draining,
        trouble=reply.trouble,
        store_id=reply.store_id,
        continues=tuple(reply.continues),
        insecure=reply.insecure,
        access=_access(reply.access) if reply.HasField("access") else None,
        engine_ports=tuple(
            EnginePortStatus(p.engine, p.url, p.target, p.open, p.handshakes, p.accepted, dict(p.refused))
            for p in reply.engine_ports
        ),
        notices=tuple(Notice(one.unix_s, one.text) for one in reply.notices),
        watched=tuple(reply.watched),
    )


def _model_status(model: pb.ModelStatus) -> ModelStatus:
    return ModelStatus(
        model=model.model,
        master=model.master,
        epoch=f"{model.epoch.store_id}/{model.epoch.revision}",
        plan=model.plan,
        chain=tuple(model.chain),
        versions=tuple(model.versions),
        newest_sealed=model.newest_sealed if model.HasField("newest_sealed") else None,
        plan_reason=model.plan_reason,
        hops=tuple(
            HopStatus(h.relay, h.upstream, h.rate_bytes_s, tuple(h.versions), h.slow, h.alive, h.transport)
            for h in model.hops
        ),
        refused_loads=refused_loads(model.refused_loads),
        sealed=tuple(map(_sealed, model.sealed)),
        newest_announced=model.newest_announced,
    )


def refused_loads(messages: Iterable[pb.RefusedLoad]) -> tuple[RefusedLoad, ...]:
    return tuple(RefusedLoad(m.version, m.engine, m.error, m.times, m.unix_s) for m in messages)
