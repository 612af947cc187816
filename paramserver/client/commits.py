"""The commit of a version, and what becomes of one whose reply was lost.

Invariants:
- a commit whose reply was lost is settled before anything is announced again: no step becomes two versions;
- what could not be settled is kept as a doubt of the relay's client, and settled by the next publish of the same step.

A commit may have arrived although its reply was lost. Announced again, the step would become two versions, and the
trainer would train on one of them twice. So the same commit is sent again (the master takes it once), and when the
master is gone, its successor is queried: what that one knows as sealed is sealed, and what it has ended is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Sequence

from paramserver.client.announced import MASTER_WAIT_S, RETRY_S, Replaced, origin_of, unless_replaced
from paramserver.client.doubts import Doubt, TicketData
from paramserver.client.relay import RelayClient
from paramserver.client.ticket import Ticket
from paramserver.core.records import Epoch, FileSpec, Manifest, part_root, version_root
from protos.errors import InDoubt, LaminarError, NotFound, StaleEpoch, Unavailable, UnknownModel
from protos.laminar.v1 import relay_pb2 as pb

log = logging.getLogger(__name__)

COMMIT_AGAIN_S = 2.0


async def committed(
    relay: RelayClient,
    master: RelayClient,
    request: pb.AnnounceRequest,
    opened: pb.AnnounceReply,
    digests: Sequence[bytes],
) -> Ticket:
    """Commits what was written, with the digests of this rank's chunks in order.

    Raises StaleEpoch when the version will never be sealed, InDoubt when that cannot be known.
    """
    root = version_root(_manifest(request, opened), digests) if request.num_ranks == 1 else part_root(digests)
    commit = pb.CommitRequest(
        model=request.model, version=opened.version, token=opened.token, root_digest=root, rank=request.rank
    )
    ticket = Ticket(
        relay, request.model, opened.version, request.run, request.step, opened.epoch, tuple(opened.warnings)
    )
    doubt = Doubt(ticket.data, commit)
    with relay.doubts.while_unknown(doubt, LaminarError):
        await _commit(relay, master, doubt)
    relay.lineages[request.model].saw(origin_of(opened), opened.version)
    return ticket


async def settled(relay: RelayClient, model: str, step: int) -> Ticket | None:
    """The version of `step` whose publish through `relay` ended in doubt, if it exists after all, or None.

    InDoubt while that cannot be known. A doubt about another step is dropped: nobody will publish that one again.
    """
    for other in relay.doubts.drop_ended(model, but=step):
        log.warning("%r stays in doubt: step %d is published", Ticket.of(relay, other.ticket), step)
    doubt = relay.doubts.of(model, step)
    if doubt is None:
        return None
    try:
        await _find_out(relay, await relay.last_master_of(model), doubt, "its publish ended before it was known")
    except StaleEpoch as error:
        log.warning("step %d of %s is published again: %s", step, model, str(error))
        relay.doubts.end(doubt)
        return None
    log.warning("step %d of %s is published already, as version %d", step, model, doubt.ticket.version)
    relay.doubts.end(doubt)
    return Ticket.of(relay, doubt.ticket)


async def published(relay: RelayClient, model: str, step: int, runs: Collection[str]) -> Ticket | None:
    """The newest sealed version of `step` of one of `runs` that the master of the model holds, or None."""
    master = await relay.master_of(model)
    try:
        versions = await master.versions(model)
    except UnknownModel:
        return None
    found = [one for one in versions if one.step == step and one.run in runs]
    return Ticket(relay, model, found[-1].version, found[-1].run, step, None) if found else None


async def _commit(relay: RelayClient, master: RelayClient, doubt: Doubt) -> None:
    model, version = doubt.ticket.model, doubt.ticket.version
    try:
        assert doubt.commit is not None, "it is sent here"
        committing = master.call(master.stub.Commit(doubt.commit, timeout=master.timeout_s))
        await unless_replaced(relay, model, master, committing)
        return
    except (Unavailable, Replaced) as error:
        lost = str(error)
    log.warning("the reply to the commit of version %d of %s was lost; querying its outcome: %s", version, model, lost)
    await asyncio.sleep(RETRY_S)
    await _find_out(relay, master, doubt, lost)


async def _find_out(relay: RelayClient, master: RelayClient, doubt: Doubt, lost: str) -> None:
    """Returns when the version is committed. StaleEpoch when it never will be, InDoubt when that is not known yet."""
    ticket, deadline = doubt.ticket, time.monotonic() + MASTER_WAIT_S
    while time.monotonic() < deadline:
        if await _has_committed(relay, master, doubt):
            return
        await asyncio.sleep(RETRY_S)
    raise InDoubt(
        f"whether version {ticket.version} of {ticket.model} was committed is not known after {MASTER_WAIT_S:g} s: "
        f"{lost}",
        hint=f"publish step {ticket.step} again by the same publisher: it finds out, and makes no second version",
    )


async def _has_committed(relay: RelayClient, master: RelayClient, doubt: Doubt) -> bool:
    """Whether it is; False while that is not known. StaleEpoch when it never will be."""
    ticket = doubt.ticket
    if doubt.commit is not None:
        with contextlib.suppress(LaminarError):  # the same commit again changes nothing; a refusal is settled below
            await master.call(master.stub.Commit(doubt.commit, timeout=COMMIT_AGAIN_S))
            return True
    try:
        newer = await relay.master_of(ticket.model)
    except (Unavailable, NotFound) as error:  # NotFound: of an older relay, between a master's death and an election
        return _unknown_yet(ticket, error)
    try:
        stage = await Ticket.of(relay, ticket).stage_at(newer)
    except NotFound as error:
        raise StaleEpoch(f"the master that knew of version {ticket.version} is gone: {error}") from error
    except Unavailable as error:
        return _unknown_yet(ticket, error)
    if stage == "lost":
        raise StaleEpoch(f"version {ticket.version} of {ticket.model} lost its master before its commit was known")
    return stage != "copied"


def _unknown_yet(ticket: TicketData, error: LaminarError) -> bool:
    log.info("the outcome of version %d of %s is not known yet: %s", ticket.version, ticket.model, error)
    return False


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
