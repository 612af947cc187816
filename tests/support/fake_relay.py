"""A relay's control port without a relay: it holds whatever versions a test says, in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc.aio

from gateway.fleet.pins import FALLBACK_HOLDER
from protos import grpc_errors
from protos.errors import NotFound
from protos.laminar.v1 import relay_pb2 as pb
from protos.laminar.v1 import relay_pb2_grpc as pb_grpc
from tests.support.scripted_engine import MODEL


class FakeRelay(pb_grpc.RelayServicer):
    """A relay's control port, holding whatever versions a test says; `leases` tells what is acquired now, and
    `fallbacks` what is for engines to go back to. With `retain` it retires all but the newest ones and the pinned."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.num_listed = 0  # how often it was asked for its versions
        self.store_id = "store"  # of its registry
        self.continues: list[str] = []  # and of those that it goes on with
        self.leases: list[str] = []
        self.reports: list[tuple[int, str, str]] = []  # version, engine, why it was refused
        self.fallbacks: list[int] = []
        self.others: dict[str, int] = {}  # other models, with their newest version
        self.coming = 0  # a version on its way to it
        self.retain: int | None = None
        self.port = 0
        self.stop: Callable[[], Awaitable[None]]
        self.asked = 0  # renewals that wait for `answering`
        self.answering = asyncio.Event()
        self.answering.set()
        self._changed = asyncio.Event()

    def publish(self, version: int) -> None:
        self.versions.append(version)
        if self.retain is not None:
            pinned = {*self.fallbacks, *(int(lease.partition("@")[2].partition("x")[0]) for lease in self.leases)}
            self.versions = [v for v in self.versions if v in self.versions[-self.retain :] or v in pinned]
        self._changed.set()

    def replace_registry(self, store_id: str, *versions: int, continues: Sequence[str] = ()) -> None:
        """Another registry stands in the place of the one before, with those versions."""
        self.store_id, self.continues, self.versions = store_id, list(continues), list(versions)
        self._changed.set()

    def _sealed(self, version: int) -> pb.SealedVersion:
        return pb.SealedVersion(model=MODEL, version=version, root_digest=f"d{version}", run=f"run-{version}")

    async def Versions(self, request: pb.VersionsRequest, context: Any) -> pb.VersionsReply:  # noqa: N802
        self.num_listed += 1
        origin = {"store_id": self.store_id, "continues": self.continues}
        return pb.VersionsReply(versions=map(self._sealed, self.versions), **origin)  # type: ignore[arg-type]

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:  # noqa: N802
        models = {MODEL: max(self.versions, default=0), **self.others}
        return pb.StatusReply(
            registry_reachable=True,
            models=[pb.ModelStatus(model=name, newest_sealed=newest) for name, newest in models.items() if newest],
            transfers=[pb.TransferStatus(model=MODEL, version=self.coming)] if self.coming else [],
        )

    def retire(self, version: int) -> None:
        self.versions.remove(version)
        self._changed.set()

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.VersionEvent]:  # noqa: N802
        told: set[int] = set()
        while True:
            self._changed.clear()
            for version in sorted(told - set(self.versions)):
                yield pb.VersionEvent(kind="retired", version=self._sealed(version))
            told = set(self.versions)
            for version in self.versions:
                origin = {"store_id": self.store_id, "continues": self.continues}
                yield pb.VersionEvent(kind="available", version=self._sealed(version), **origin)  # type: ignore[arg-type]
            await self._changed.wait()

    async def Acquire(self, request: pb.AcquireRequest, context: Any) -> pb.Lease:  # noqa: N802
        version = request.version if request.HasField("version") else self.versions[-1]
        if version not in self.versions:
            await grpc_errors.abort(context, NotFound(f"version {version} is not here"))
        lease_id = f"{request.holder}@{version}" + f"x{request.copies}" * bool(request.copies)
        if request.holder == FALLBACK_HOLDER:
            self.fallbacks.append(version)
        else:
            self.leases.append(lease_id)
        path, digest = f"/snapshots/{version}", f"d{version}"
        return pb.Lease(lease_id=lease_id, model=MODEL, version=version, path=path, root_digest=digest, ttl_s=60.0)

    async def Renew(self, request: pb.LeaseRequest, context: Any) -> pb.RenewReply:  # noqa: N802
        self.asked += not self.answering.is_set()
        await self.answering.wait()
        if request.lease_id not in self.leases and not request.lease_id.startswith(FALLBACK_HOLDER):
            await grpc_errors.abort(context, NotFound(f"lease {request.lease_id} is not held"))
        return pb.RenewReply()

    async def Locate(self, request: pb.LocateRequest, context: Any) -> pb.LocateReply:  # noqa: N802
        return pb.LocateReply(master="fake", grpc_address=f"127.0.0.1:{self.port}")

    async def ReportLoad(self, request: pb.LoadReport, context: Any) -> pb.LoadReportReply:  # noqa: N802
        self.reports.append((request.version, request.engine, request.error))
        return pb.LoadReportReply()

    async def Release(self, request: pb.LeaseRequest, context: Any) -> pb.ReleaseReply:  # noqa: N802
        if request.lease_id.startswith(FALLBACK_HOLDER):
            self.fallbacks.remove(int(request.lease_id.partition("@")[2].partition("x")[0]))
        else:
            self.leases.remove(request.lease_id)
        return pb.ReleaseReply()


@contextlib.asynccontextmanager
async def relay() -> AsyncIterator[tuple[FakeRelay, str]]:
    """A fake relay and its address."""
    found, server = FakeRelay(), grpc.aio.server()  # type: ignore[abstract]  # what no gateway calls is left out
    pb_grpc.add_RelayServicer_to_server(found, server)
    port = found.port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    found.stop = lambda: server.stop(None)
    try:
        yield found, f"127.0.0.1:{port}"
    finally:
        await found.stop()
