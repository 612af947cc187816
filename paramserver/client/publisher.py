"""Publishing one version: find the master, claim the run, announce, write every byte, commit.

Invariants:
- `publish` returns at *copied*: from then on the tensors may change; until then they are only read;
- a publish that fails is aborted at the relay, so that its memory goes back and the next one may begin;
- when the master dies before *copied*, the version is announced again at the next master: it was reported to nobody;
- a commit whose reply was lost is settled before anything is announced again: no step becomes two versions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Unpack

from paramserver.client.announced import (
    VersionOptions,
    announced,
    announcement,
    at_a_master,
    by_socket_or_port,
    check_lineage,
    files_of,
    given_up,
    unless_replaced,
)
from paramserver.client.commits import committed
from paramserver.client.relay import RelayClient
from paramserver.client.sources import FileSource, TensorSource
from paramserver.client.ticket import Ticket
from paramserver.core.layout import PLAIN, FileLayout
from paramserver.data.publish import Image, write_mapped, write_tcp
from protos.laminar.v1 import relay_pb2 as pb


async def publish(
    relay: RelayClient,
    model: str,
    tensors: Sequence[TensorSource],
    *,
    files: Sequence[FileSource] = (),
    force_tcp: bool = False,
    **options: Unpack[VersionOptions],
) -> Ticket:
    """Writes one version and returns at *copied*; the master numbers it, the ticket has the number.

    With several ranks each calls this with tensors of its own and the same `run` and `step`; the version seals when all
    have written theirs, and not at all if one fails.

    On the master's host the bytes are copied once into its shared memory; elsewhere, or with `force_tcp`, they go
    over its data port.

    Labels (`VersionLabels`, such as `note`) are kept with the version, and `RelayClient.versions` returns them; where
    ranks differ in one, the lowest rank that gives it stands.

    Raises InvalidRequest/UnsupportedField (tensors), TooLarge or OutOfCapacity (pool),
    Conflict (another publisher; with `refuse_change` also another architecture than that of the version before),
    Unavailable (no relay, or none that can be master).
    """
    specs = [tensor.spec for tensor in tensors]
    request, layouts = announcement(model, specs, [file.spec for file in files], **options)
    plain = [TensorSource(PLAIN + file.name, "U8", (file.size_bytes,), file.read) for file in files]
    sources = [*tensors, *plain]
    return await at_a_master(
        relay, model, lambda master: _publish_once(relay, master, request, layouts, sources, force_tcp=force_tcp)
    )


async def _publish_once(
    relay: RelayClient,
    master: RelayClient,
    request: pb.AnnounceRequest,
    files: Sequence[FileLayout],
    tensors: Sequence[TensorSource],
    *,
    force_tcp: bool,
) -> Ticket:
    model = request.model
    opened = await announced(relay, master, request)
    try:
        check_lineage(relay, model, opened)
        layouts = files_of(request, opened, files)
        reads = {tensor.name: tensor.read for tensor in tensors}
        resident = {tensor.name for tensor in tensors if tensor.resident}
        image = Image([file.size_bytes for file in opened.files], layouts, reads, opened.chunk_bytes, resident)
        writing = asyncio.to_thread(_write, master, model, opened, image, force_tcp)
        digests = await unless_replaced(relay, model, master, writing)
        return await committed(relay, master, request, opened, digests)
    except BaseException as error:
        await given_up(relay, master, model, opened, error)
        raise


def _write(master: RelayClient, model: str, opened: pb.AnnounceReply, image: Image, force_tcp: bool) -> list[bytes]:
    return by_socket_or_port(
        master,
        model,
        opened,
        lambda path, greeting: write_mapped(path, greeting, image, master.mappings),
        lambda address, greeting: write_tcp(address, greeting, image, access=master.data_access),
        force_tcp=force_tcp,
    )
