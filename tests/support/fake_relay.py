"""A relay's control port without a relay: it holds whatever versions a test says, in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from protos import grpc_errors
from protos.errors import NotFound
from protos.laminar.v1 import relay_pb2 as pb
from protos.laminar.v1 import relay_pb2_grpc as pb_grpc
from tests.support.cutting_engine import MODEL


class FakeRelay(pb_grpc.RelayServicer):
    """A relay's control port, holding whatever versions a test says; `leases` tells what is acquired now."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.leases: list[str] = []
        self.port = 0
        self.asked = 0  # renewals that wait for `answering`
        self.answering = asyncio.Event()
        self.answering.set()
        self._changed = asyncio.Event()

    def publish(self, version: int) -> None:
        self.versions.append(version)
        self._changed.set()

    def _sealed(self, version: int) -> pb.SealedVersion:
        return pb.SealedVersion(model=MODEL, version=version, root_digest=f"d{version}")

    async def Versions(self, request: pb.VersionsRequest, context: Any) -> pb.VersionsReply:  # noqa: N802
        return pb.VersionsReply(versions=map(self._sealed, self.versions))

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
                yield pb.VersionEvent(kind="available", version=self._sealed(version))
            await self._changed.wait()

    async def Acquire(self, request: pb.AcquireRequest, context: Any) -> pb.Lease:  # noqa: N802
        version = request.version if request.HasField("version") else self.versions[-1]
        if version not in self.versions:
            await grpc_errors.abort(context, NotFound(f"version {version} is not here"))
        self.leases.append(f"{request.holder}@{version}" + f"x{request.copies}" * bool(request.copies))
        path, digest = f"/snapshots/{version}", f"d{version}"
        return pb.Lease(
            lease_id=self.leases[-1], model=MODEL, version=version, path=path, root_digest=digest, ttl_s=60.0
        )

    async def Renew(self, request: pb.LeaseRequest, context: Any) -> pb.RenewReply:  # noqa: N802
        self.asked += not self.answering.is_set()
        await self.answering.wait()
        if request.lease_id not in self.leases:
            await grpc_errors.abort(context, NotFound(f"lease {request.lease_id} is not held"))
        return pb.RenewReply()

    async def Release(self, request: pb.LeaseRequest, context: Any) -> pb.ReleaseReply:  # noqa: N802
        self.leases.remove(request.lease_id)
        return pb.ReleaseReply()


@contextlib.asynccontextmanager
async def relay() -> AsyncIterator[tuple[FakeRelay, str]]:
    """A fake relay and its address."""
    found, server = FakeRelay(), grpc.aio.server()  # type: ignore[abstract]  # what no gateway calls is left out
    pb_grpc.add_RelayServicer_to_server(found, server)
    port = found.port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield found, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
