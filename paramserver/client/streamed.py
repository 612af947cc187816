"""A version that its publisher writes tensor by tensor, as they are made.

Invariants:
- a `StreamedVersion` ends in `commit` or in `give_up`, and only then is its publisher free for another one;
- when the master is replaced while the version is written, the next `write` fails: nobody waits for a hung relay;
- what a `write` gave is gone, so nothing here begins again; `give_up` says by its error whether it is worth it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Unpack

import msgspec

from paramserver.client.announced import (
    Replaced,
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
from paramserver.client.ticket import Ticket
from paramserver.core.layout import PLAIN, FileLayout, PlainFile, TensorSpec, plan_layout
from paramserver.core.records import ChunkMap
from paramserver.data.publisher_link import Mappings
from paramserver.data.streamed import StreamWriter, open_mapped, open_tcp
from protos.decoding import decode_msgpack
from protos.errors import Corrupt, LaminarError, StaleEpoch
from protos.laminar.v1 import relay_pb2 as pb

log = logging.getLogger(__name__)


class StreamedVersion:
    """One announced version. One thread writes; the coroutines run on the event loop of the relay's client."""

    def __init__(
        self,
        relay: RelayClient,
        master: RelayClient,
        request: pb.AnnounceRequest,
        opened: pb.AnnounceReply,
        files: Sequence[FileLayout],
        writer: StreamWriter,
        own_mappings: Mappings | None = None,
    ) -> None:
        """`own_mappings` end with the version: nobody else maps by them."""
        self._relay, self._master = relay, master
        self._request, self._opened = request, opened
        self.files = files
        self._writer, self._own_mappings = writer, own_mappings
        self._written = asyncio.Event()
        self._watching = asyncio.create_task(self._watch())

    @property
    def version(self) -> int:
        return self._opened.version

    def pieces(self, name: str, bytes_max: int) -> Iterator[tuple[int, int]]:
        """Ranges of a tensor's bytes, each of some `bytes_max`, in which it is written with the least work."""
        return self._writer.pieces(name, bytes_max)

    def write(self, name: str, data: memoryview) -> None:
        """Writes the next bytes of a tensor; nothing of `data` is kept. Blocks; raises LaminarError."""
        self._writer.write(name, data)

    def write_file(self, name: str, data: memoryview) -> None:
        """Writes a plain file, like a tensor."""
        self._writer.write(PLAIN + name, data)

    async def commit(self) -> Ticket:
        """Commits what was written. Raises like `write`; `give_up` has to follow then."""
        digests = await asyncio.to_thread(self._writer.finish)
        await self._end_watch()
        return await self._commit(digests)

    async def _commit(self, digests: Sequence[bytes]) -> Ticket:
        ticket = await committed(self._relay, self._master, self._request, self._opened, digests)
        await self.close()
        return ticket

    async def close(self) -> None:
        """Ends the connection of a writer that is done, or whose version is given up."""
        await asyncio.to_thread(self._writer.close)
        if self._own_mappings is not None:
            self._own_mappings.close()

    # ---- shared by several writers: one announces and commits, the others join, each writes whole chunks

    @property
    def invitation(self) -> bytes:
        """What another process needs to join this version."""
        return msgspec.msgpack.encode(_Invitation(self._request.SerializeToString(), self._opened.SerializeToString()))

    @property
    def chunks(self) -> ChunkMap:
        return self._writer.chunks

    def write_chunks(self, first: int, num: int, data: memoryview) -> None:
        """Writes `num` whole chunks of one file, from number `first` on. Raises like `write`."""
        self._writer.write_chunks(first, num, data)

    async def finish(self) -> Mapping[int, bytes]:
        """The digests of the chunks written here, once the relay has them all. Raises like `write`."""
        await asyncio.to_thread(self._writer.finish)
        await self._end_watch()
        return self._writer.digests

    async def commit_shared(self, digests: Mapping[int, bytes]) -> Ticket:
        """Commits what all writers have finished; `digests` of all chunks. Raises like `commit`."""
        return await self._commit([digests[index] for index in range(self.chunks.num_chunks)])

    async def give_up(self, error: LaminarError) -> LaminarError:
        """Ends the version for the reason `error`; returns the error to raise.

        That is StaleEpoch or Unavailable when the version may be published again, at the next master.
        """
        replaced = await self._end_watch()
        await self.close()
        if replaced is not None:
            return replaced
        try:
            await given_up(self._relay, self._master, self._request.model, self._opened, error)
        except LaminarError as found:
            return found
        if isinstance(error, Corrupt):  # on its way: only all of it can be sent again
            return StaleEpoch(error.message, hint=error.hint)
        return error

    async def _watch(self) -> None:
        try:
            await unless_replaced(self._relay, self._request.model, self._master, self._written.wait())
        except Replaced:
            self._writer.interrupt()
            raise

    async def _end_watch(self) -> Replaced | None:
        self._written.set()
        (found,) = await asyncio.gather(self._watching, return_exceptions=True)
        if found is None or isinstance(found, Replaced):
            return found
        raise found


async def open_stream(
    relay: RelayClient,
    model: str,
    specs: Sequence[TensorSpec],
    *,
    plain: Sequence[PlainFile] = (),
    force_tcp: bool = False,
    shared: bool = False,
    **options: Unpack[VersionOptions],
) -> StreamedVersion:
    """Announces a version and opens it for writing. Arguments and errors are those of `publish`.

    `shared`: it is written by `write_chunks` alone, here and by those who `join_stream`.
    """
    request, files = announcement(model, specs, plain, **options)
    return await at_a_master(relay, model, lambda master: _open_once(relay, master, request, files, force_tcp, shared))


class _Invitation(msgspec.Struct):
    """A version that another process announced: its `AnnounceRequest` and `AnnounceReply`."""

    request: bytes
    opened: bytes


async def join_stream(relay: RelayClient, invitation: bytes, *, force_tcp: bool = False) -> StreamedVersion:
    """Opens a version that another process announced and shares, to write chunks of it.

    Who joins keeps no mapping of the relay's files from one version to the next: without a claim of its own it would
    not notice that the relay is gone, whose memory it would hold.
    """
    found = decode_msgpack(invitation, _Invitation)
    request, opened = pb.AnnounceRequest.FromString(found.request), pb.AnnounceReply.FromString(found.opened)
    specs = [TensorSpec(one.name, one.dtype, tuple(one.shape)) for one in request.tensors]
    plain = [PlainFile(one.name, one.size_bytes) for one in request.plain_files]
    metadata = dict(request.metadata) or None
    files = plan_layout(specs, file_bytes_max=request.file_bytes_max, metadata=metadata, plain=plain)
    master, mappings = await relay.last_master_of(request.model), Mappings()
    opening = asyncio.to_thread(_open_writer, master, mappings, request.model, opened, {}, force_tcp)
    writer = await unless_replaced(relay, request.model, master, opening)
    return StreamedVersion(relay, master, request, opened, files, writer, mappings)


async def _open_once(
    relay: RelayClient,
    master: RelayClient,
    request: pb.AnnounceRequest,
    files: Sequence[FileLayout],
    force_tcp: bool,
    shared: bool,
) -> StreamedVersion:
    opened = await announced(relay, master, request)
    try:
        check_lineage(relay, request.model, opened)
        layouts = {} if shared else files_of(request, opened, files)
        opening = asyncio.ensure_future(
            asyncio.to_thread(_open_writer, master, master.mappings, request.model, opened, layouts, force_tcp)
        )
        try:
            writer = await unless_replaced(relay, request.model, master, asyncio.shield(opening))
        except BaseException:
            opening.add_done_callback(_close_late)
            raise
    except BaseException as error:
        await given_up(relay, master, request.model, opened, error)
        raise
    return StreamedVersion(relay, master, request, opened, files, writer)


def _open_writer(
    master: RelayClient,
    mappings: Mappings,
    model: str,
    opened: pb.AnnounceReply,
    layouts: Mapping[int, FileLayout],
    force_tcp: bool,
) -> StreamWriter:
    return by_socket_or_port(
        master,
        model,
        opened,
        lambda path, greeting: open_mapped(path, greeting, layouts, mappings),
        lambda address, greeting: open_tcp(address, greeting, layouts, access=master.data_access),
        force_tcp=force_tcp,
    )


def _close_late(opening: asyncio.Future[StreamWriter]) -> None:
    """Closes a writer that nobody waits for any more."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
