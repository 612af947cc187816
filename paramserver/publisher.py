"""Publishing one version: find the master, claim the run, announce, write every byte, commit.

Invariants:
- `publish` returns at *copied*: from then on the tensors may change; until then they are only read;
- a publish that fails is aborted at the relay, so that its memory goes back and the next one may begin;
- when the master dies before *copied*, the version is announced again at the next master: nobody was told of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paramserver.core.layout import FileLayout, TensorSpec, plan_layout
from paramserver.core.records import SOLE, Epoch, FileSpec, Manifest, Rank, check_model_name, part_root, version_root
from paramserver.data.publish import Image, write_mapped, write_tcp
from paramserver.data.wire import Greeting
from paramserver.relay_client import RelayClient
from paramserver.ticket import Ticket
from protos.errors import Conflict, LaminarError, NotFound, StaleEpoch, Unavailable, VersionLost
from protos.laminar.v1 import relay_pb2 as pb

log = logging.getLogger(__name__)

MASTER_WAIT_S = 30.0  # announcing again after a master's death: its lease runs out, then there is an election
RETRY_S = 0.3
WAIT_ROOM_S = 30.0


@dataclass(frozen=True, slots=True)
class TensorSource:
    """One tensor to publish: safetensors dtype ("BF16", "F32", ...) and shape; `read` gives its contiguous
    little-endian bytes, valid while publish copies."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], memoryview]


async def publish(
    relay: RelayClient,
    model: str,
    tensors: Sequence[TensorSource],
    *,
    step: int,
    run: str,
    file_bytes_max: int = 4 << 30,
    metadata: Mapping[str, str] | None = None,
    force_tcp: bool = False,
    wait_room_s: float = WAIT_ROOM_S,
    rank: Rank = SOLE,
) -> Ticket:
    """Writes one version and returns at *copied*; the master numbers it, the ticket tells the number.

    With several ranks each calls this with tensors of its own and the same `run` and `step`; the version seals when all
    have written theirs, and not at all if one fails.

    On the master's host the bytes are copied once into its shared memory; elsewhere, or with `force_tcp`, they go
    over its data port. Raises InvalidRequest/UnsupportedField (tensors), TooLarge or OutOfCapacity (pool),
    Conflict (another publisher), Unavailable (no relay, or none that can be master).
    """
    check_model_name(model)
    specs = [TensorSpec(tensor.name, tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    metadata = metadata or None  # the announcement cannot tell {} from none, and both sides must lay out the same
    files = plan_layout(specs, file_bytes_max=file_bytes_max, metadata=metadata)
    reads = {tensor.name: tensor.read for tensor in tensors}
    request = pb.AnnounceRequest(
        model=model,
        run=run,
        step=step,
        tensors=[pb.TensorSpec(name=spec.name, dtype=spec.dtype, shape=spec.shape) for spec in specs],
        file_bytes_max=file_bytes_max,
        metadata=metadata,
        wait_room_s=wait_room_s,
        rank=rank.index,
        num_ranks=rank.count,
    )
    deadline = time.monotonic() + MASTER_WAIT_S
    master = await relay.last_master_of(model)  # a wrong address fails here, at once
    while True:
        try:
            return await _publish_once(relay, master, request, files, reads, force_tcp=force_tcp)
        except (StaleEpoch, Unavailable) as error:
            if time.monotonic() > deadline:
                raise
            log.warning("publishing %s again, the master at %s went away: %s", model, master.address, error)
        await asyncio.sleep(RETRY_S)
        with contextlib.suppress(Unavailable):  # the relay may come back until the deadline
            master = await relay.master_of(model)


async def _publish_once(
    relay: RelayClient,
    master: RelayClient,
    request: pb.AnnounceRequest,
    files: Sequence[FileLayout],
    reads: dict[str, Callable[[], memoryview]],
    *,
    force_tcp: bool,
) -> Ticket:
    rank = Rank(request.rank, request.num_ranks)
    await master.hold_run(request.model, request.run, f"{socket.gethostname()}:{os.getpid()}", rank)
    timeout_s = request.wait_room_s + master.timeout_s
    try:
        opened = await master.call(master.stub.Announce(request, timeout=timeout_s))
    except StaleEpoch:  # the claim may have ended there before word of it came here
        await master.release_run(request.model, request.run)
        raise
    try:
        mine = [number for number, owner in enumerate(opened.owners) if owner == rank.index]
        layouts = dict(zip(mine, files, strict=False))  # alone, a rank's index is not written: the relay has one of all
        image = Image([file.size_bytes for file in opened.files], layouts, reads, opened.chunk_bytes)
        digests = await asyncio.to_thread(_write, master, request.model, opened, image, force_tcp)
        root = version_root(_manifest(request, opened), digests) if rank.count == 1 else part_root(digests)
        commit = pb.CommitRequest(
            model=request.model, version=opened.version, token=opened.token, root_digest=root, rank=rank.index
        )
        await master.call(master.stub.Commit(commit, timeout=master.timeout_s))
    except BaseException as error:
        await _abort(master, request.model, opened, error)
        if isinstance(error, Conflict | NotFound | VersionLost):
            await _check_epoch(master, request.model, opened, error)
        raise
    return Ticket(relay, request.model, opened.version, request.run, request.step, opened.epoch)


def _write(master: RelayClient, model: str, opened: pb.AnnounceReply, image: Image, force_tcp: bool) -> list[bytes]:
    path = Path(opened.publish_socket)  # empty: the relay takes bytes only
    name = f"{socket.gethostname()}:{os.getpid()}"
    if opened.publish_socket and not force_tcp and os.access(path, os.W_OK):
        return write_mapped(
            path, Greeting("map", model, opened.version, name, token=opened.token), image, master.mappings
        )
    return write_tcp(opened.data_address, Greeting("write", model, opened.version, name, token=opened.token), image)


def _manifest(request: pb.AnnounceRequest, opened: pb.AnnounceReply) -> Manifest:
    return Manifest(
        request.model,
        opened.version,
        request.run,
        request.step,
        Epoch(opened.epoch.store_id, opened.epoch.revision),
        tuple(FileSpec(file.name, file.size_bytes) for file in opened.files),
        opened.chunk_bytes,
    )


async def _check_epoch(master: RelayClient, model: str, opened: pb.AnnounceReply, refusal: LaminarError) -> None:
    """StaleEpoch when what was refused belonged to an epoch that is over: then it is no fault of the publisher's."""
    timeout_s = max(master.timeout_s, MASTER_WAIT_S / 2)  # an election may have to run first
    found = await master.call(master.stub.Locate(pb.LocateRequest(model=model), timeout=timeout_s))
    if found.epoch != opened.epoch:
        raise StaleEpoch(f"version {opened.version} of {model} lost its master: {refusal.message}") from refusal


async def _abort(master: RelayClient, model: str, opened: pb.AnnounceReply, error: BaseException) -> None:
    """Tells the relay; when that fails too, the relay learns it from the broken claim."""
    reason = f"{type(error).__name__}: {error}"[:500]
    request = pb.AbortRequest(model=model, version=opened.version, token=opened.token, reason=reason)
    with contextlib.suppress(LaminarError):
        await master.call(master.stub.Abort(request, timeout=2.0))
