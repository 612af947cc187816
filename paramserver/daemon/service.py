"""The relay's gRPC service: turns messages into calls on the relay's parts, and errors into statuses."""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio

from paramserver.core import access
from paramserver.core.layout import PlainFile, TensorSpec
from paramserver.core.records import Epoch, Rank, check_model_name
from paramserver.core.spans import relay_trace
from paramserver.core.ticket_status import GivenUp, TicketQuery, ticket_status
from paramserver.daemon.access import caller_of
from paramserver.daemon.operations import Operations
from paramserver.daemon.parts import RelayParts
from paramserver.daemon.status import StatusReport, epoch_message, sealed_message
from paramserver.data.engine_ports import EnginePort
from protos import grpc_errors
from protos.announce_options import master_options
from protos.errors import InvalidRequest, LaminarError, NotFound, OutOfCapacity, Unavailable, UnsupportedField
from protos.failures import FailureLog
from protos.laminar.v1 import relay_pb2 as pb
from protos.laminar.v1 import relay_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)

STAGE_WAIT_MAX_S = 60.0
STAGE_WAITS_MAX = 4096
"""Calls that wait for a stage at one relay: each change on it has every one of them look again."""
OTHERS_MAX = 8  # further relays that a client gets the addresses of

_failures = FailureLog(log)

Context = grpc.aio.ServicerContext[Any, Any]
Reply = TypeVar("Reply")


def _unary(
    method: Callable[[RelayService, Any, Context], Awaitable[Reply]],
) -> Callable[[RelayService, Any, Context], Awaitable[Reply]]:
    @functools.wraps(method)
    async def call(self: RelayService, request: Any, context: Context) -> Reply:
        try:
            _check_names(request)
            return await method(self, request, context)
        except LaminarError as error:
            await grpc_errors.abort(context, error)
        except Exception as error:  # noqa: BLE001  (it costs this call)
            await grpc_errors.abort(context, _unforeseen(method.__name__, error))

    return call


def _stream(
    method: Callable[[RelayService, Any, Context], AsyncIterator[Reply]],
) -> Callable[[RelayService, Any, Context], AsyncIterator[Reply]]:
    @functools.wraps(method)
    async def call(self: RelayService, request: Any, context: Context) -> AsyncIterator[Reply]:
        try:
            _check_names(request)
            async for reply in method(self, request, context):
                yield reply
        except LaminarError as error:
            await grpc_errors.abort(context, error)
        except Exception as error:  # noqa: BLE001  (it costs this call)
            await grpc_errors.abort(context, _unforeseen(method.__name__, error))

    return call


def _unforeseen(method: str, error: Exception) -> LaminarError:
    _failures.failed(f"{method} failed", error)
    return LaminarError(f"{method} failed: {type(error).__name__}: {error}", hint="the relay's log has the traceback")


def _check_names(request: Any) -> None:
    """Whatever names a model is looked at here, once for all calls."""
    model = getattr(request, "model", None)
    may_be_absent = isinstance(request, pb.AdoptRequest)  # of a registry with all its models
    if model is not None and not (may_be_absent and not model):
        check_model_name(model)


class RelayService(pb_grpc.RelayServicer):
    """The control interface of one relay."""

    def __init__(
        self,
        parts: RelayParts,
        *,
        data_address: str,
        publish_socket: Path | None,
        engine_ports: Sequence[EnginePort] = (),
    ) -> None:
        self._name, self._view, self._elections = parts.config.name, parts.lease.view, parts.elections
        self._models, self._pins, self._watchers = parts.models, parts.pins, parts.watchers
        self._reconciler, self._changes = parts.reconciler, parts.changes
        self._duties, self._claims, self._publications = parts.duties, parts.claims, parts.publications
        self._drafts, self._refused_loads = parts.drafts, parts.refused_loads
        self._operations = Operations(parts)
        self._status = StatusReport(parts, data_address=data_address, engine_ports=engine_ports)
        self._data_address, self._publish_socket = data_address, publish_socket
        self._credentials = parts.credentials
        self._instance = parts.lease.member.instance
        self._stage_waits = 0

    # ---- readers

    @_unary
    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:  # noqa: N802
        return self._status.reply()

    @_unary
    async def Versions(self, request: pb.VersionsRequest, context: Context) -> pb.VersionsReply:  # noqa: N802
        return pb.VersionsReply(
            versions=[sealed_message(record) for record in self._models.shown(request.model)],
            store_id=self._view.store_id,
            continues=sorted(self._view.continues),
        )

    @_stream
    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.VersionEvent]:  # noqa: N802
        await context.send_initial_metadata(())
        async for event in self._watchers.watch(request.model):
            yield pb.VersionEvent(
                kind=event.kind,
                version=sealed_message(event.sealed),
                store_id=self._view.store_id,
                continues=sorted(self._view.continues),
            )

    @_unary
    async def Acquire(self, request: pb.AcquireRequest, context: Context) -> pb.Lease:  # noqa: N802
        version = request.version if request.HasField("version") else None
        pin, sealed, path = await self._pins.acquire(
            secrets.token_hex(12), request.model, version, request.holder, request.ttl_s, request.copies
        )
        trace = relay_trace(sealed.labels, self._name)
        return pb.Lease(
            lease_id=pin.lease_id,
            model=pin.model,
            version=pin.version,
            path=path,
            root_digest=sealed.root_digest,
            step=sealed.step,
            ttl_s=pin.ttl_s,
            traceparent="" if trace is None else trace.traceparent,
        )

    @_unary
    async def Renew(self, request: pb.LeaseRequest, context: Context) -> pb.RenewReply:  # noqa: N802
        await self._pins.renew(request.lease_id)
        return pb.RenewReply()

    @_unary
    async def Release(self, request: pb.LeaseRequest, context: Context) -> pb.ReleaseReply:  # noqa: N802
        pin = await self._pins.release(request.lease_id)
        self._reconciler.reconcile(pin.model)
        return pb.ReleaseReply()

    # ---- publishers

    @_unary
    async def Locate(self, request: pb.LocateRequest, context: Context) -> pb.LocateReply:  # noqa: N802
        begins = self._credentials is None or access.may_publish(caller_of(context))
        master = await self._duties.locate(request.model, begins=begins)
        member = self._view.members.get(master)
        if member is None:
            raise Unavailable(f"{master}, master of {request.model}, is not a member now", hint="try again")
        others = [m.grpc_address for name, m in sorted(self._view.members.items()) if name != master]
        return pb.LocateReply(
            master=master,
            grpc_address=member.grpc_address,
            epoch=epoch_message(self._view.epoch(request.model)),
            others=others[:OTHERS_MAX],
        )

    @_stream
    async def HoldRun(self, request: pb.HoldRunRequest, context: Context) -> AsyncIterator[pb.HoldRunReply]:  # noqa: N802
        model = request.model
        claim = self._claims.claim(model, request.run, request.publisher, _rank(request), client=request.client)
        try:
            yield pb.HoldRunReply(epoch=epoch_message(self._elections.epoch(model)))
            await self._changes.wait_until(lambda: not self._claims.holds(model, claim))
        finally:
            self._claims.release(model, claim)

    @_unary
    async def Announce(self, request: pb.AnnounceRequest, context: Context) -> pb.AnnounceReply:  # noqa: N802
        if request.HasField("base_version"):
            raise UnsupportedField("base_version is reserved for deltas", hint="announce whole versions")
        draft = await self._publications.announce(
            request.model,
            request.run,
            request.step,
            [TensorSpec(t.name, t.dtype, tuple(t.shape)) for t in request.tensors],
            metadata=dict(request.metadata) or None,
            rank=_rank(request),
            refuse_change=request.refuse_change,
            plain=[PlainFile(file.name, file.size_bytes) for file in request.plain_files],
            labels=request.labels,
            **master_options(request),
        )
        manifest = draft.manifest
        return pb.AnnounceReply(
            version=manifest.version,
            epoch=epoch_message(manifest.epoch),
            files=[pb.FileSpec(name=file.name, size_bytes=file.size_bytes) for file in manifest.files],
            chunk_bytes=manifest.chunk_bytes,
            token=draft.token,
            publish_socket=str(self._publish_socket or ""),
            data_address=self._data_address,
            owners=draft.owners,
            continues=sorted(self._view.continues),
            warnings=[*draft.warnings, *filter(None, [self._watchers.unwatched(request.model, request.run)])],
            instance=self._instance,
        )

    @_unary
    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitReply:  # noqa: N802
        await self._publications.commit(
            request.model, request.version, request.token, request.root_digest, request.rank
        )
        return pb.CommitReply()

    @_unary
    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortReply:  # noqa: N802
        self._publications.abort(request.model, request.version, request.token, request.reason)
        return pb.AbortReply()

    @_unary
    async def Stage(self, request: pb.StageRequest, context: Context) -> pb.StageReply:  # noqa: N802
        if request.want not in ("", "sealed", "copies", "all"):
            raise InvalidRequest(f"want is {request.want!r}", hint='use "", "sealed", "copies" or "all"')
        reply = self._stage(request)
        if request.wait_s > 0 and not _reached(reply, request):
            await self._wait_for_stage(request)
            reply = self._stage(request)
        reply.reached = _reached(reply, request)
        return reply

    async def _wait_for_stage(self, request: pb.StageRequest) -> None:
        if self._stage_waits >= STAGE_WAITS_MAX:
            raise OutOfCapacity(
                f"{STAGE_WAITS_MAX} calls wait for a stage of a version at this relay, and it takes no more",
                hint="wait in fewer programs, or ask without waiting (`wait_s` 0)",
            )
        self._stage_waits += 1
        try:
            async with asyncio.timeout(min(request.wait_s, STAGE_WAIT_MAX_S)):
                await self._changes.wait_until(lambda: _reached(self._stage(request), request))
        except TimeoutError:
            pass  # the answer says how far the version is
        finally:
            self._stage_waits -= 1

    @_unary
    async def ReportLoad(self, request: pb.LoadReport, context: Context) -> pb.LoadReportReply:  # noqa: N802
        versions, refused = self._models.get(request.model), self._refused_loads
        if versions is None or versions.get(request.version) is None:
            raise NotFound(f"version {request.version} of {request.model} is not known to {self._name}")
        if request.error:
            one = refused.refused(request.model, request.version, request.engine, request.error, time.time())
            if one.times == 1:
                log.warning("engine %r refused version %d of %s: %r", one.engine, one.version, request.model, one.error)
        else:
            refused.loaded(request.model, request.version, request.engine)
        return pb.LoadReportReply()

    # ---- operators

    @_unary
    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainReply:  # noqa: N802
        return pb.DrainReply(waiting_for=await self._operations.drain())

    @_unary
    async def Adopt(self, request: pb.AdoptRequest, context: Context) -> pb.AdoptReply:  # noqa: N802
        if request.continues:
            store_id, versions = await self._operations.continue_store(request.continues, request.model, request.above)
        else:
            store_id, versions = await self._operations.adopt()
        return pb.AdoptReply(store_id=store_id, versions=versions)

    @_unary
    async def Drop(self, request: pb.DropRequest, context: Context) -> pb.DropReply:  # noqa: N802
        return pb.DropReply(versions=await self._operations.drop(request.model))

    def _stage(self, request: pb.StageRequest) -> pb.StageReply:
        draft, versions = self._drafts.get(request.model, request.version), self._models.get(request.model)
        epoch = request.epoch if request.HasField("epoch") else None
        status = ticket_status(
            TicketQuery(request.run, Epoch(epoch.store_id, epoch.revision) if epoch else None),
            versions.get(request.version) if versions else None,
            GivenUp(draft.manifest.epoch, draft.reason) if draft is not None and draft.state == "failed" else None,
            self._view.members,
            self._view.store_id,
        )
        if status is None:
            raise NotFound(f"version {request.version} of {request.model} is not known to {self._name}")
        return pb.StageReply(
            stage=status.stage,
            reason=status.reason,
            holders=status.holders,
            chain=status.chain,
            refused_loads=self._status.refused_loads(request.model, request.version),
        )


def _reached(reply: pb.StageReply, request: pb.StageRequest) -> bool:
    if reply.stage == "lost":
        return True
    match request.want:
        case "sealed":
            return reply.stage != "copied"
        case "copies":
            return reply.stage != "copied" and len(reply.holders) >= request.copies
        case "all":
            return reply.stage == "all"
    return True


def _rank(request: pb.HoldRunRequest | pb.AnnounceRequest) -> Rank:
    return Rank(request.rank, request.num_ranks or 1)
