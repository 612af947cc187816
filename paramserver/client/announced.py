"""One version at its master, from the announcement on, whoever writes its bytes; `commits` ends it.

Invariants:
- what fails is aborted at the master, so that its memory goes back and the next version may begin;
- when the master dies before the commit, the version may be announced again at the next one: it was reported to nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Required, TypeVar, Unpack, cast

import msgspec

from paramserver.client.relay import RelayClient
from paramserver.config import show_bytes
from paramserver.core.layout import (
    INDEX_NAME,
    FileLayout,
    PlainFile,
    TensorSpec,
    check_step,
    check_text,
    plan_layout,
)
from paramserver.core.lineage import Lineage, Origin
from paramserver.core.records import SOLE, Rank, check_model_name
from paramserver.data.frames import Greeting
from paramserver.data.publisher_link import NotItsSocket
from protos.announce_options import DEFAULTS, AnnounceOptions, MasterOptions
from protos.errors import (
    Conflict,
    LaminarError,
    NotFound,
    Preparing,
    StaleEpoch,
    TooLarge,
    Unavailable,
    UnsupportedField,
    VersionLost,
)
from protos.laminar.v1 import relay_pb2 as pb
from protos.telemetry.context import TRACEPARENT, current_traceparent
from protos.version_labels import given_labels

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S = 1.0  # between two queries for the master, while a call to the one known has no reply
MASTER_WAIT_S = 30.0  # from the first failure: a dead master's lease runs out, then there is an election
PREPARE_MAX_S = 1800.0  # 145 GB took six minutes at 0.4 GB/s, the slowest first touch of memory that was seen
RETRY_S = 0.3
ANNOUNCEMENT_BYTES_MAX = (64 << 20) - 4096  # what both sides' gRPC lets through, with room for its own frame


class VersionOptions(AnnounceOptions, total=False):
    """How a version is announced, whoever writes it and however."""

    run: Required[str]
    step: Required[int]
    metadata: Mapping[str, str] | None  # in the headers of its files
    rank: Rank  # of several that write it together, each its own tensors
    refuse_change: bool  # refuse another architecture than that of the version before


def announcement(
    model: str,
    specs: Sequence[TensorSpec],
    plain: Sequence[PlainFile] = (),
    **options: Unpack[VersionOptions],
) -> tuple[pb.AnnounceRequest, tuple[FileLayout, ...]]:
    """The announcement of a version, and the layout of this rank's files, which the master computes alike."""
    if unknown := sorted(options.keys() - VersionOptions.__annotations__.keys()):
        raise TypeError(f"a version has no option {unknown[0]!r}; it has {', '.join(VersionOptions.__annotations__)}")
    check_model_name(model)
    check_text("the run", options["run"])
    step = check_step(options["step"])
    metadata = options.get("metadata") or None  # a message has no {} beside none: both sides must lay out the same
    rank = options.get("rank", SOLE)
    for_master = cast(MasterOptions, {name: options.get(name, default) for name, default in DEFAULTS.items()})
    files = plan_layout(specs, file_bytes_max=for_master["file_bytes_max"], metadata=metadata, plain=plain)
    request = pb.AnnounceRequest(
        model=model,
        run=options["run"],
        step=step,
        tensors=[pb.TensorSpec(name=spec.name, dtype=spec.dtype, shape=spec.shape) for spec in specs],
        metadata=metadata,
        rank=rank.index,
        num_ranks=rank.count,
        refuse_change=options.get("refuse_change", False),
        plain_files=[pb.FileSpec(name=file.name, size_bytes=file.size_bytes) for file in plain],
        labels=given_labels({TRACEPARENT: current_traceparent(), **options}),
        **for_master,
    )
    if (num_bytes := request.ByteSize()) > ANNOUNCEMENT_BYTES_MAX:
        raise TooLarge(
            f"the names and shapes of {len(specs)} tensors take {show_bytes(num_bytes)}, "
            f"an announcement {show_bytes(ANNOUNCEMENT_BYTES_MAX)} at most",
            hint="publish larger tensors, or from several ranks",
        )
    return request, files


async def at_a_master(relay: RelayClient, model: str, attempt: Callable[[RelayClient], Awaitable[T]]) -> T:
    """The result of `attempt` at the model's master: made again, at the next one, when that is gone or not ready."""
    prepared_by, give_up_at = time.monotonic() + PREPARE_MAX_S, math.inf
    master = await relay.last_master_of(model)  # a wrong address fails here, at once
    while True:
        try:
            return await attempt(master)
        except Preparing as error:  # no fault of the master: it answers, with its progress
            if time.monotonic() > prepared_by:
                raise
            log.info("publishing %s as soon as there is memory: %s", model, error.message)
            give_up_at = math.inf
            continue
        except (StaleEpoch, Unavailable) as error:
            give_up_at = min(give_up_at, time.monotonic() + MASTER_WAIT_S)
            if time.monotonic() > give_up_at:
                raise
            # as text: whoever keeps log records would hold the error's frames, and with them the relay's memory
            log.warning("publishing %s again, at %s it came to nothing: %s", model, master.address, str(error))
        await asyncio.sleep(RETRY_S)
        master = await relay.find_master(model) or master  # the relay may come back until then


class Replaced(StaleEpoch):
    """Another relay became master while a call to the one before had no reply."""


async def unless_replaced(relay: RelayClient, model: str, master: RelayClient, work: Awaitable[T]) -> T:
    """The result of `work` at the master; Replaced once another relay is master, since the work is void then.

    A master that hangs does not answer, and the call's own deadline would be longer than an election takes.

    Its error's traceback has this frame: a name for the task that holds the error would close a cycle, and the relay's
    memory would stay mapped, through the frames below, until the collector runs.
    """
    working = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([working], timeout=LOOK_S))[0]:
            newer = await relay.find_master(model)
            if newer is not None and newer is not master and not working.done():
                raise Replaced(f"{newer.address} became master of {model} while {master.address} did not answer")
        return await working
    finally:
        if not working.done():
            working.cancel()
            await asyncio.wait([working], timeout=RETRY_S)
        del working


async def announced(relay: RelayClient, master: RelayClient, request: pb.AnnounceRequest) -> pb.AnnounceReply:
    """Claims the run and announces; the reply's warnings are logged."""
    announcing = _announce(master, request, Rank(request.rank, request.num_ranks))
    opened = await unless_replaced(relay, request.model, master, announcing)
    for warning in opened.warnings:
        log.warning("version %d of %s: %s", opened.version, request.model, warning)
    return opened


def files_of(
    request: pb.AnnounceRequest, opened: pb.AnnounceReply, files: Sequence[FileLayout]
) -> dict[int, FileLayout]:
    """This rank's files by their numbers in the version. Of several ranks none writes an index: the relay does."""
    mine = [number for number, owner in enumerate(opened.owners) if owner == request.rank]
    if request.num_ranks > 1:
        files = [file for file in files if file.name != INDEX_NAME]
    if [opened.files[number].size_bytes for number in mine] != [file.size_bytes for file in files]:
        raise UnsupportedField(
            "the relay lays the version out otherwise than this publisher",
            hint="an older relay knows no plain files: upgrade it, or publish without files",
        )
    return dict(zip(mine, files, strict=True))


async def given_up(
    relay: RelayClient, master: RelayClient, model: str, opened: pb.AnnounceReply, error: BaseException
) -> None:
    """Gives the version up at the master. StaleEpoch when `error` is due to the end of the master's epoch."""
    if isinstance(error, Replaced):  # the old master does not answer, and the next one ends the version
        return
    await _abort(master, model, opened, error)
    if isinstance(error, Conflict | NotFound | VersionLost) and not relay.lineages[model].refuses(origin_of(opened)):
        await _check_epoch(master, model, opened, error)


def by_socket_or_port(
    master: RelayClient,
    model: str,
    opened: pb.AnnounceReply,
    by_socket: Callable[[Path, Greeting], T],
    by_port: Callable[[str, Greeting], T],
    *,
    force_tcp: bool,
) -> T:
    """The result of `by_socket` where the master is on this host, else, and with `force_tcp`, of `by_port`.

    Why the bytes go over the data port is logged once for each master.
    """
    greeting = Greeting("write", model, opened.version, f"{socket.gethostname()}:{os.getpid()}", token=opened.token)
    if opened.publish_socket and not force_tcp:  # empty: the relay takes bytes only
        path = Path(opened.publish_socket)
        try:
            return by_socket(path, msgspec.structs.replace(greeting, purpose="map", to=opened.instance))
        except NotItsSocket as error:
            if not master.port_was_logged:
                level = (
                    logging.WARNING if path.exists() else logging.INFO
                )  # of another host's master there is none here
                why = "the bytes go over the data port of %s, not through its socket %s: %s"
                log.log(level, why, master.address, path, str(error))
                master.port_was_logged = True
    return by_port(opened.data_address, greeting)


def check_lineage(relay: RelayClient, model: str, opened: pb.AnnounceReply) -> None:
    """Conflict when the version is of a registry that replaced the one of those before, or its number is not new."""
    lineage = relay.lineages.setdefault(model, Lineage())
    why = lineage.refuses(origin_of(opened), opened.version)
    if why:
        raise Conflict(f"{model} is not published: {why}", hint=lineage.remedy(model))


def origin_of(opened: pb.AnnounceReply) -> Origin:
    return Origin.of(opened.epoch.store_id, opened.continues)


async def _announce(master: RelayClient, request: pb.AnnounceRequest, rank: Rank) -> pb.AnnounceReply:
    """Claims the run and announces. Whatever ends it but the reply ends the claim too, which is made anew then."""
    await master.hold_run(request.model, request.run, f"{socket.gethostname()}:{os.getpid()}", rank)
    timeout_s = request.wait_room_s + master.timeout_s
    try:
        return await master.call(master.stub.Announce(request, timeout=timeout_s))
    except (StaleEpoch, asyncio.CancelledError):  # the claim may have ended there, and its stream not yet here
        await master.release_run(request.model, request.run)
        raise


async def _check_epoch(master: RelayClient, model: str, opened: pb.AnnounceReply, refusal: LaminarError) -> None:
    """StaleEpoch when the refused call belonged to an epoch that is over: then it is no fault of the publisher."""
    timeout_s = max(master.timeout_s, MASTER_WAIT_S / 2)  # an election may have to run first
    found = await master.call(master.stub.Locate(pb.LocateRequest(model=model), timeout=timeout_s))
    if found.epoch != opened.epoch:
        raise StaleEpoch(f"version {opened.version} of {model} lost its master: {refusal.message}") from refusal


async def _abort(master: RelayClient, model: str, opened: pb.AnnounceReply, error: BaseException) -> None:
    """Gives the version up at the relay; when that fails too, the end of the claim does."""
    reason = f"{type(error).__name__}: {error}"[:500]
    request = pb.AbortRequest(model=model, version=opened.version, token=opened.token, reason=reason)
    with contextlib.suppress(LaminarError):
        await master.call(master.stub.Abort(request, timeout=2.0))
