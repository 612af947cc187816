"""The relay's gRPC face: turns messages into calls on the relay and its publishing, and errors into statuses."""

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

from paramserver.core.layout import TensorSpec
from paramserver.core.records import Epoch, Rank, Sealed, check_model_name
from paramserver.core.ticket_status import GivenUp, TicketQuery, ticket_status
from paramserver.core.versions import ModelVersions
from paramserver.daemon.operations import Operations
from paramserver.master.publications import Publications
from paramserver.relay.relay import Relay
from paramserver.troubles import Troubles
from protos import grpc_errors
from protos.errors import InvalidRequest, LaminarError, NotFound, UnsupportedField
from protos.laminar.v1 import relay_pb2 as pb
from protos.laminar.v1 import relay_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)

STAGE_WAIT_MAX_S = 60.0
OTHERS_MAX = 8  # further relays that a client is told of

_troubles = Troubles(logging.getLogger(__name__))

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
    _troubles.met(f"{method} failed", error)
    return LaminarError(f"{method} failed: {type(error).__name__}: {error}", hint="the relay's log says where")


def _check_names(request: Any) -> None:
    """Whatever names a model is looked at here, once for all calls."""
    model = getattr(request, "model", None)
    may_be_absent = isinstance(request, pb.AdoptRequest)  # of a registry with all its models
    if model is not None and not (may_be_absent and not model):
        check_model_name(model)


class RelayService(pb_grpc.RelayServicer):
    """One relay's control interface."""

    def __init__(
        self, relay: Relay, publishing: Publications, *, data_address: str, publish_socket: Path | None
    ) -> None:
        self._relay = relay
        self._publishing = publishing
        self._operating = Operations(relay, publishing)
        self._data_address = data_address
        self._publish_socket = publish_socket

    # ---- readers

    @_unary
    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:  # noqa: N802
        relay, pool = self._relay, self._relay.store.pool.statistics()
        now = time.monotonic()
        return pb.StatusReply(
            relay=relay.config.name,
            instance=relay.seat.member.instance,
            members=sorted(relay.view.members),
            models=[self._model_status(model) for model in sorted(relay.view.models | set(relay.models))],
            transfers=[
                pb.TransferStatus(model=m, version=v, upstream=up, transport=by, bytes_done=done, bytes_total=total)
                for m, v, up, by, done, total in relay.transfers()
            ],
            pins=[
                pb.PinStatus(
                    model=p.model, version=p.version, holder=p.holder, expires_in_s=p.expires_at - now, copies=p.copies
                )
                for p in relay.pins.all()
            ],
            pool_bytes=pool.pool_bytes,
            used_bytes=pool.used_bytes,
            quarantined_bytes=pool.quarantined_bytes,
            cut_off=sorted(relay.cut_off()),
            registry_reachable=relay.seat.reachable,
            data_address=self._data_address,
            transport=relay.config.transport,
            draining=relay.seat.member.draining,
            trouble=relay.seat.trouble,
            store_id=relay.view.store_id,
            continues=sorted(relay.view.continues),
        )

    def _model_status(self, model: str) -> pb.ModelStatus:
        view = self._relay.view
        seen, plan = view.masters.get(model), view.plans.get(model)
        versions = self._relay.models.get(model)
        return pb.ModelStatus(
            model=model,
            master=seen.master.name if seen else "",
            epoch=_epoch(view.epoch(model)),
            plan=plan.number if plan else 0,
            chain=plan.order if plan else (),
            versions=[record.version for record in versions.shown()] if versions else (),
            newest_sealed=versions.newest_sealed if versions else None,
            plan_reason=plan.reason if plan else "",
            hops=self._hops(model, plan.order if plan else (), versions),
            refused_loads=self._refused_loads(model),
        )

    def _hops(self, model: str, order: Sequence[str], versions: ModelVersions | None) -> list[pb.HopStatus]:
        judged = self._relay.stragglers(model)
        held: dict[str, list[int]] = {}
        for version, state in versions.items() if versions else []:
            for name in state.holders if state.ended is None else ():
                held.setdefault(name, []).append(version)
        hops = []
        for name in [*order, *sorted(held.keys() - set(order))]:
            last = judged.last(name)
            hops.append(
                pb.HopStatus(
                    relay=name,
                    upstream=last.upstream if last else "",
                    rate_bytes_s=last.rate_bytes_s if last else 0.0,
                    versions=held.get(name, ()),
                    slow=judged.reasons.get(name, ""),
                    alive=name in self._relay.view.members,
                    transport=last.transport if last else "",
                )
            )
        return hops

    @_unary
    async def Versions(self, request: pb.VersionsRequest, context: Context) -> pb.VersionsReply:  # noqa: N802
        view = self._relay.view
        return pb.VersionsReply(
            versions=[_sealed(record) for record in self._relay.versions(request.model)],
            store_id=view.store_id,
            continues=sorted(view.continues),
        )

    @_stream
    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.VersionEvent]:  # noqa: N802
        await context.send_initial_metadata(())
        async for event in self._relay.watch(request.model):
            view = self._relay.view
            yield pb.VersionEvent(
                kind=event.kind,
                version=_sealed(event.sealed),
                store_id=view.store_id,
                continues=sorted(view.continues),
            )

    @_unary
    async def Acquire(self, request: pb.AcquireRequest, context: Context) -> pb.Lease:  # noqa: N802
        version = request.version if request.HasField("version") else None
        pin, sealed = self._relay.acquire(
            secrets.token_hex(12), request.model, version, request.holder, request.ttl_s, request.copies
        )
        await self._relay.fleet_pins.tell(pin)
        return pb.Lease(
            lease_id=pin.lease_id,
            model=pin.model,
            version=pin.version,
            path=self._relay.path_of(pin),
            root_digest=sealed.root_digest,
            step=sealed.step,
            ttl_s=pin.ttl_s,
        )

    @_unary
    async def Renew(self, request: pb.LeaseRequest, context: Context) -> pb.RenewReply:  # noqa: N802
        await self._relay.fleet_pins.tell(self._relay.pins.renew(request.lease_id, time.monotonic()))
        return pb.RenewReply()

    @_unary
    async def Release(self, request: pb.LeaseRequest, context: Context) -> pb.ReleaseReply:  # noqa: N802
        pin = self._relay.pins.release(request.lease_id, time.monotonic())
        await self._relay.fleet_pins.end(pin)
        self._relay.tidy(pin.model)
        return pb.ReleaseReply()

    # ---- publishers

    @_unary
    async def Locate(self, request: pb.LocateRequest, context: Context) -> pb.LocateReply:  # noqa: N802
        master = await self._publishing.locate(request.model)
        member = self._relay.view.members.get(master)
        if member is None:
            raise NotFound(f"{master}, master of {request.model}, is not a member now", hint="try again")
        others = [m.grpc_address for name, m in sorted(self._relay.view.members.items()) if name != master]
        return pb.LocateReply(
            master=master,
            grpc_address=member.grpc_address,
            epoch=_epoch(self._relay.view.epoch(request.model)),
            others=others[:OTHERS_MAX],
        )

    @_stream
    async def HoldRun(self, request: pb.HoldRunRequest, context: Context) -> AsyncIterator[pb.HoldRunReply]:  # noqa: N802
        publishing, model = self._publishing, request.model
        claim = publishing.claim(model, request.run, request.publisher, _rank(request), client=request.client)
        try:
            yield pb.HoldRunReply(epoch=_epoch(self._relay.seat.epoch(model)))
            async with self._relay.changed:
                await self._relay.changed.wait_for(
                    lambda: self._relay.closing or not publishing.is_claimed_by(model, claim)
                )
        finally:
            publishing.unclaim(model, claim)

    @_unary
    async def Announce(self, request: pb.AnnounceRequest, context: Context) -> pb.AnnounceReply:  # noqa: N802
        if request.HasField("base_version"):
            raise UnsupportedField("base_version is reserved for deltas", hint="announce whole versions")
        draft = await self._publishing.announce(
            request.model,
            request.run,
            request.step,
            [TensorSpec(t.name, t.dtype, tuple(t.shape)) for t in request.tensors],
            file_bytes_max=request.file_bytes_max,
            metadata=dict(request.metadata) or None,
            wait_room_s=request.wait_room_s,
            rank=_rank(request),
            refuse_change=request.refuse_change,
        )
        manifest = draft.manifest
        return pb.AnnounceReply(
            version=manifest.version,
            epoch=_epoch(manifest.epoch),
            files=[pb.FileSpec(name=file.name, size_bytes=file.size_bytes) for file in manifest.files],
            chunk_bytes=manifest.chunk_bytes,
            token=draft.token,
            publish_socket=str(self._publish_socket or ""),
            data_address=self._data_address,
            owners=draft.owners,
            continues=sorted(self._relay.view.continues),
            warnings=draft.warnings,
        )

    @_unary
    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitReply:  # noqa: N802
        await self._publishing.commit(request.model, request.version, request.token, request.root_digest, request.rank)
        return pb.CommitReply()

    @_unary
    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortReply:  # noqa: N802
        self._publishing.abort(request.model, request.version, request.token, request.reason)
        return pb.AbortReply()

    @_unary
    async def Stage(self, request: pb.StageRequest, context: Context) -> pb.StageReply:  # noqa: N802
        if request.want not in ("", "sealed", "copies", "all"):
            raise InvalidRequest(f"want is {request.want!r}", hint='use "", "sealed", "copies" or "all"')
        reply = self._stage(request)
        if not _reached(reply, request):
            try:
                async with asyncio.timeout(min(max(0.0, request.wait_s), STAGE_WAIT_MAX_S)), self._relay.changed:
                    await self._relay.changed.wait_for(
                        lambda: self._relay.closing or _reached(self._stage(request), request)
                    )
            except TimeoutError:
                pass
            reply = self._stage(request)
        reply.reached = _reached(reply, request)
        return reply

    @_unary
    async def ReportLoad(self, request: pb.LoadReport, context: Context) -> pb.LoadReportReply:  # noqa: N802
        versions = self._relay.models.get(request.model)
        if versions is None or versions.get(request.version) is None:
            raise NotFound(f"version {request.version} of {request.model} is not known to {self._relay.config.name}")
        refused = self._publishing.refused_loads
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
        return pb.DrainReply(waiting_for=await self._operating.drain())

    @_unary
    async def Adopt(self, request: pb.AdoptRequest, context: Context) -> pb.AdoptReply:  # noqa: N802
        if request.continues:
            store_id, versions = await self._operating.go_on_with(request.continues, request.model, request.above)
        else:
            store_id, versions = await self._operating.adopt()
        return pb.AdoptReply(store_id=store_id, versions=versions)

    @_unary
    async def Drop(self, request: pb.DropRequest, context: Context) -> pb.DropReply:  # noqa: N802
        return pb.DropReply(versions=await self._operating.drop(request.model))

    def _stage(self, request: pb.StageRequest) -> pb.StageReply:
        relay, draft = self._relay, self._publishing.draft(request.model, request.version)
        versions: ModelVersions | None = relay.models.get(request.model)
        epoch = request.epoch if request.HasField("epoch") else None
        told = ticket_status(
            TicketQuery(request.run, Epoch(epoch.store_id, epoch.revision) if epoch else None),
            versions.get(request.version) if versions else None,
            GivenUp(draft.manifest.epoch, draft.reason) if draft is not None and draft.state == "failed" else None,
            relay.view.members,
            relay.view.store_id,
        )
        if told is None:
            raise NotFound(f"version {request.version} of {request.model} is not known to {relay.config.name}")
        return pb.StageReply(
            stage=told.stage,
            reason=told.reason,
            holders=told.holders,
            chain=told.chain,
            refused_loads=self._refused_loads(request.model, request.version),
        )

    def _refused_loads(self, model: str, version: int | None = None) -> list[pb.RefusedLoad]:
        return [
            pb.RefusedLoad(version=one.version, engine=one.engine, error=one.error, times=one.times, unix_s=one.unix_s)
            for one in self._publishing.refused_loads.of(model, version)
        ]


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


def _epoch(epoch: Epoch | None) -> pb.Epoch:
    return pb.Epoch(store_id=epoch.store_id, revision=epoch.revision) if epoch else pb.Epoch()


def _sealed(record: Sealed) -> pb.SealedVersion:
    return pb.SealedVersion(
        model=record.model,
        version=record.version,
        step=record.step,
        run=record.run,
        root_digest=record.root_digest,
        size_bytes=record.size_bytes,
        sealed_unix_s=record.sealed_unix_s,
    )
