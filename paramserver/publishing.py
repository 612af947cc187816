"""What publishers ask of a master: where to publish, a run, a number, room to write, commit.

Invariants:
- one run per model at a time, and at most one version of it being written;
- a number, of a version or of a plan, is given once per epoch;
- what was committed has every chunk, and the root that its publisher computed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paramserver.config import show_bytes
from paramserver.core.chain import next_plan
from paramserver.core.chunking import choose_chunk_bytes, typical
from paramserver.core.layout import RELAY, Layout, Part, TensorSpec, plan_ranks
from paramserver.core.records import (
    SOLE,
    Announced,
    Epoch,
    FileSpec,
    Manifest,
    Plan,
    Rank,
    check_model_name,
    digest,
    part_root,
)
from paramserver.drafts import Draft, Drafts
from paramserver.presiding import Presiding
from paramserver.ranks import Meeting
from paramserver.relay import Relay
from paramserver.sealing import Sealing
from paramserver.store import Snapshot
from protos.errors import Conflict, InvalidRequest, OutOfCapacity, StaleEpoch, Unavailable, VersionLost

log = logging.getLogger(__name__)

ROOM_POLL_S = 0.05
WAIT_ROOM_MAX_S = 600.0


@dataclass(eq=False)
class RunClaim:
    """A publisher, or one rank of it, that is connected and has claimed a model for its run."""

    run: str
    publisher: str
    rank: Rank = SOLE


class Publishing:
    """The publishers' side of a master."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._drafts = Drafts()
        self._sealing = Sealing(relay)
        self.presiding = Presiding(relay, self._drafts)
        self._plans: dict[str, Plan] = {}  # the newest given here, of each model
        self._claims: dict[str, dict[int, RunClaim]] = {}
        self._meetings: dict[tuple[str, str, int], Meeting] = {}

    async def close(self) -> None:
        await self._sealing.close()

    @property
    def num_in_doubt(self) -> int:
        """Versions whose sealing transaction was sent and not yet answered."""
        return self._drafts.num_in_doubt()

    # ---- where to publish

    async def locate(self, model: str) -> str:
        """The name of the model's master; without one, this relay stands if it may, else the others are asked."""
        check_model_name(model)
        seat = self._relay.seat
        deadline = time.monotonic() + 10.0
        while model not in seat.view.masters:
            if time.monotonic() > deadline:
                raise Unavailable(f"no relay became master of {model} in 10 s", hint="see `paramserver status`")
            if seat.member.publish_host and model not in seat.view.models:
                if await seat.campaign(model):
                    await self.presiding.settle(model)
            else:
                await seat.want(model)
                await asyncio.sleep(ROOM_POLL_S)
        return seat.view.masters[model].master.name

    # ---- one run at a time

    def claim(self, model: str, run: str, publisher: str, rank: Rank = SOLE) -> RunClaim:
        """Claims the model for a run. Conflict when another publisher is connected; ranks of one run claim together."""
        check_model_name(model)
        if not run:
            raise InvalidRequest("a run without a name", hint="name each life of a training job")
        self._epoch(model)
        claims = self._claims.setdefault(model, {})
        for held in claims.values():
            if held.run == run and held.rank.count == rank.count and held.rank.index != rank.index:
                continue
            raise Conflict(
                f"model {model} has a publisher already: {held.publisher} (run {held.run})",
                hint="end that one first, or publish under another model name",
            )
        claims[rank.index] = RunClaim(run, publisher, rank)
        return claims[rank.index]

    def unclaim(self, model: str, claim: RunClaim) -> None:
        """The publisher is gone: what it was writing cannot be finished."""
        claims = self._claims.get(model, {})
        if claims.get(claim.rank.index) is claim:
            del claims[claim.rank.index]
        for draft in self._drafts.writing(model):
            if draft.manifest.run == claim.run:
                self._sealing.fail(draft, f"its publisher {claim.publisher} left before it was committed")

    # ---- announce, write, commit, abort

    async def announce(
        self,
        model: str,
        run: str,
        step: int,
        tensors: Sequence[TensorSpec],
        *,
        file_bytes_max: int,
        metadata: Mapping[str, str] | None,
        wait_room_s: float,
        rank: Rank = SOLE,
    ) -> Draft:
        """Numbers a version and opens it. Refused by name: unknown dtypes, another run, what cannot fit.

        Several ranks meet here first: each gets the same draft once all have announced, or the same error.
        """
        claim = self._claims.get(model, {}).get(rank.index)
        if claim is None or claim.run != run or claim.rank != rank:
            raise StaleEpoch(
                f"run {run} has not claimed model {model}, or its claim ended",
                hint="open HoldRun first, and again when its stream ends; the SDK does",
            )
        if self._relay.seat.foreign_store:
            raise Conflict(
                f"the etcd of {self._relay.config.name} was replaced by another: nothing seals there",
                hint="run `paramserver adopt` for every relay",
            )
        wait_room_s = min(max(0.0, wait_room_s), WAIT_ROOM_MAX_S)

        part = Part(tensors, file_bytes_max, metadata)

        async def begin(parts: Sequence[Part]) -> Draft:
            return await self._begin(model, run, step, plan_ranks(parts), rank.count, wait_room_s)

        if rank.count == 1:
            return await begin([part])
        key = (model, run, step)
        meeting = self._meetings.setdefault(key, Meeting(rank.count, f"step {step} of run {run}"))
        try:
            return await meeting.attend(rank.index, part, begin, wait_room_s)
        finally:
            if self._meetings.get(key) is meeting and meeting.over:
                del self._meetings[key]

    async def _begin(
        self, model: str, run: str, step: int, layout: Layout, num_ranks: int, wait_room_s: float
    ) -> Draft:
        specs = tuple(FileSpec(file.name, file.size_bytes) for file in layout.files)
        for draft in self._drafts.writing(model):
            self._sealing.fail(draft, f"run {run} announced again before committing")
        epoch = self._epoch(model)
        draft = await self._open(model, run, step, specs, epoch, wait_room_s)
        draft.owners, draft.num_ranks = layout.owners, num_ranks
        _write_own(draft.snapshot, layout)
        self._sealing.announce(draft)
        return draft

    async def _open(
        self, model: str, run: str, step: int, files: tuple[FileSpec, ...], epoch: Epoch, wait_room_s: float
    ) -> Draft:
        relay = self._relay
        deadline = time.monotonic() + wait_room_s
        while True:
            versions = relay.of(model)
            manifest = Manifest(model, versions.next_number, run, step, epoch, files, self._chunk_bytes(model, files))
            try:
                snapshot = relay.store.open(manifest)
                break
            except OutOfCapacity as error:
                if not relay.make_room(model) and time.monotonic() > deadline:
                    raise self._no_room(model, manifest, error) from error
            await asyncio.sleep(ROOM_POLL_S)
        announced = Announced(manifest, self._plan(model, epoch))
        versions.opened(announced)
        draft = Draft(announced, snapshot, secrets.token_hex(16))
        self._drafts.add(draft)
        log.info("%s announced by run %s, step %d, %s", snapshot, run, step, show_bytes(manifest.size_bytes))
        return draft

    def _chunk_bytes(self, model: str, files: Sequence[FileSpec]) -> int:
        if self._relay.config.chunk_bytes is not None:
            return self._relay.config.chunk_bytes
        num_bytes = sum(file.size_bytes for file in files)
        hop = typical(self._relay.stragglers(model).costs())
        return choose_chunk_bytes(num_bytes, len(self._relay.view.places()), hop)

    def _no_room(self, model: str, manifest: Manifest, error: OutOfCapacity) -> OutOfCapacity:
        held = [
            f"version {record.version} ({show_bytes(record.size_bytes)})"
            + "".join(f" pinned by {pin.holder}" for pin in self._relay.pins.all() if pin.version == record.version)
            for record in self._relay.of(model).shown()
        ]
        return OutOfCapacity(
            f"no room for version {manifest.version} of {model}, {manifest.size_bytes} bytes: {error.message}; "
            f"held: {', '.join(held) or 'nothing of this model'}; "
            f"quarantined: {self._relay.store.pool.statistics().quarantined_bytes} bytes",
            hint="release pins, or start the relay with a larger --pool-bytes or a lower --retain",
            retry_after_s=5.0,
        )

    def _plan(self, model: str, epoch: Epoch) -> Plan:
        view, slow = self._relay.view, self._relay.stragglers(model).slow
        previous = self._plans.get(model)  # the registry may not have it yet
        if previous is None or previous.epoch != epoch:
            previous = view.plans.get(model)
        plan = next_plan(previous, epoch, self._relay.config.name, view.places(), slow)
        if plan is not previous:
            log.info("%s: plan %d: %s (%s)", model, plan.number, " > ".join(plan.order), plan.reason)
        self._plans[model] = view.plans[model] = plan
        return plan

    def writable(self, model: str, version: int, token: str) -> Snapshot:
        draft = self._drafts.of(model, version, token)
        if draft.state != "writing":
            raise Conflict(f"version {version} of {model} is {draft.state}: {draft.reason or 'no more writing'}")
        return draft.snapshot

    async def commit(self, model: str, version: int, token: str, root_digest: str, rank: int = 0) -> None:
        """The publisher, or one rank of it, has written its all. Sealing goes on by itself; the ticket follows it."""
        draft = self._drafts.of(model, version, token)
        if draft.state in ("committed", "sealed"):
            return
        if draft.state == "failed":
            raise VersionLost(f"version {version} of {model} was given up: {draft.reason}", hint="publish again")
        if draft.num_ranks > 1 and not self._commit_part(draft, rank, root_digest):
            return
        missing = draft.snapshot.missing()
        if missing:
            raise Conflict(f"{len(missing)} chunks of {draft.snapshot} are not written, the first is {missing[0]}")
        draft.root = await asyncio.to_thread(draft.snapshot.root)
        if draft.state != "writing":  # given up, or committed by another call, meanwhile
            await self.commit(model, version, token, root_digest, rank)
            return
        if draft.num_ranks == 1 and draft.root != root_digest:
            self._sealing.fail(draft, f"the publisher computed root {root_digest}, the relay {draft.root}")
            raise Conflict(draft.reason, hint="publish again")
        draft.state = "committed"
        self._relay.apply(model, self._relay.of(model).filled(version, draft.root))
        self._sealing.begin(draft)

    def _commit_part(self, draft: Draft, rank: int, root_digest: str) -> bool:
        """One rank's files are written; true for the last one, after which the whole is committed."""
        found = [
            draft.snapshot.digest_of(index)
            for file, owner in enumerate(draft.owners)
            if owner == rank
            for index in draft.snapshot.chunks.range_of(file)
        ]
        known = [one for one in found if one is not None]
        if len(known) < len(found):
            raise Conflict(f"{len(found) - len(known)} chunks of rank {rank} of {draft.snapshot} are not written")
        if part_root(known) != root_digest:
            self._sealing.fail(draft, f"rank {rank} computed root {root_digest}, the relay {part_root(known)}")
            raise Conflict(draft.reason, hint="publish again")
        if rank in draft.committed:
            return False
        draft.committed.add(rank)
        return len(draft.committed) == draft.num_ranks

    def abort(self, model: str, version: int, token: str, reason: str) -> None:
        draft = self._drafts.of(model, version, token)
        if draft.state == "writing":
            self._sealing.fail(draft, reason)

    def _epoch(self, model: str) -> Epoch:
        epoch = self._relay.seat.epoch(model)
        if epoch is None:
            seen = self._relay.view.masters.get(model)
            raise StaleEpoch(
                f"relay {self._relay.config.name} is not master of {model}",
                hint=f"publish to {seen.master.name}" if seen else "wait for an election",
            )
        return epoch

    def draft(self, model: str, version: int) -> Draft | None:
        """None also when the number was given to another version meanwhile."""
        draft = self._drafts.get(model, version)
        return draft if draft is not None and self._sealing.is_current(draft) else None


def _write_own(snapshot: Snapshot, layout: Layout) -> None:
    """The files that the relay itself writes: the index over all ranks' files."""
    for number, (file, owner) in enumerate(zip(layout.files, layout.owners, strict=True)):
        if owner == RELAY:
            for index in snapshot.chunks.range_of(number):
                chunk = snapshot.chunks.chunk(index)
                piece = file.head[chunk.offset : chunk.offset + chunk.length]
                snapshot.place(index)[:] = piece
                snapshot.present(index, digest(piece))
