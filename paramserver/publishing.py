"""The master's side of a version's life: announce, write, commit, seal.

Invariants:
- one run per model at a time, and at most one version of it being written;
- a number is given once per epoch, and announced in the registry under the guard that it is new;
- sealing is one transaction: "I am master in this epoch, and this version has neither seal nor end"; a
  transaction whose outcome is not known is settled by reading back before anything is answered;
- a version that cannot be sealed any more ends as aborted, and its ticket says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from paramserver.config import show_bytes
from paramserver.core import view as keys
from paramserver.core.chain import next_plan
from paramserver.core.chunking import choose_chunk_bytes, typical
from paramserver.core.layout import RELAY, Layout, Part, TensorSpec, plan_ranks
from paramserver.core.records import (
    SOLE,
    Announced,
    Ended,
    Epoch,
    FileSpec,
    Manifest,
    Plan,
    Rank,
    Sealed,
    check_model_name,
    digest,
    part_root,
)
from paramserver.membership.registry import Absent, Delete, Put
from paramserver.ranks import Meeting
from paramserver.relay import VERSIONS_KEPT, Relay
from paramserver.seat import RETRY_S
from paramserver.store import Snapshot
from protos.errors import Conflict, InvalidRequest, OutOfCapacity, StaleEpoch, Unavailable, VersionLost

log = logging.getLogger(__name__)

ROOM_POLL_S = 0.05
RECORD_WAIT_S = 0.01  # the registry answers in a few milliseconds, or the announcement goes on without it
WAIT_ROOM_MAX_S = 600.0
LOST_GRACE_S = 10.0  # holders whose lease lapsed in an outage get this long to register again

DraftState = Literal["writing", "committed", "sealed", "failed"]


@dataclass
class Draft:
    """A version on its way to its seal, on its master."""

    announced: Announced
    snapshot: Snapshot
    token: str
    owners: tuple[int, ...] = (0,)  # per file: the rank that writes it
    num_ranks: int = 1
    committed: set[int] = field(default_factory=set)
    recorded: bool = False
    state: DraftState = "writing"
    reason: str = ""
    root: str = ""

    @property
    def manifest(self) -> Manifest:
        return self.announced.manifest


@dataclass(eq=False)
class RunClaim:
    """A publisher, or one rank of it, that is connected and has claimed a model for its run."""

    run: str
    publisher: str
    rank: Rank = SOLE


class Publishing:
    """All that this relay does as a master."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._drafts: dict[tuple[str, int], Draft] = {}
        self._claims: dict[str, dict[int, RunClaim]] = {}
        self._meetings: dict[tuple[str, str, int], Meeting] = {}
        self._settled: dict[str, Epoch] = {}
        self._lost_since: dict[tuple[str, int], float] = {}
        self._seals: set[asyncio.Task[None]] = set()

    # ---- tasks

    async def preside(self) -> None:
        """Stands in elections, settles what an earlier master left, and records what was lost."""
        while True:
            await asyncio.sleep(RETRY_S / 2)
            try:
                for model in await self._relay.seat.stand(self._newest_holders(), time.monotonic()):
                    await self._settle(model)
                for model in self._mastered():
                    await self._settle(model)  # again, when an answer was lost in the election or in settling
                    await self._note_lost(model)
                    await self._prune(model)
            except Unavailable as error:
                log.debug("as master: %s", error)
            except StaleEpoch as error:
                log.info("%s", error)

    async def close(self) -> None:
        for task in self._seals:
            task.cancel()
        await asyncio.gather(*self._seals, return_exceptions=True)

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
                    await self._settle(model)
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
        for draft in self._writing(model):
            if draft.manifest.run == claim.run:
                self._fail(draft, f"its publisher {claim.publisher} left before it was committed")

    def _writing(self, model: str) -> list[Draft]:
        return [d for (m, _), d in sorted(self._drafts.items()) if m == model and d.state == "writing"]

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
            raise Conflict(f"run {run} has not claimed model {model}", hint="open HoldRun first; the SDK does")
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
        for draft in self._writing(model):
            self._fail(draft, f"run {run} announced again before committing")
        epoch = self._epoch(model)
        draft = await self._open(model, run, step, specs, epoch, wait_room_s)
        draft.owners, draft.num_ranks = layout.owners, num_ranks
        _write_own(draft.snapshot, layout)
        recording = asyncio.ensure_future(self._record(draft))
        await asyncio.wait([recording], timeout=RECORD_WAIT_S)
        if recording.done():
            self._recorded(draft, recording)
        else:  # the trainer does not wait for the registry: sealing will
            recording.add_done_callback(lambda done: self._note_recording(draft, done))
        return draft

    def _recorded(self, draft: Draft, recording: asyncio.Future[None]) -> None:
        try:
            recording.result()
        except Unavailable as error:
            log.warning(
                "version %d is announced here only until the registry is back: %s", draft.manifest.version, error
            )

    def _note_recording(self, draft: Draft, recording: asyncio.Future[None]) -> None:
        with contextlib.suppress(StaleEpoch):  # the draft has failed by it, and its commit will say so
            self._recorded(draft, recording)

    async def _open(
        self, model: str, run: str, step: int, files: tuple[FileSpec, ...], epoch: Epoch, wait_room_s: float
    ) -> Draft:
        relay = self._relay
        deadline = time.monotonic() + wait_room_s
        while True:
            versions = relay.of(model)
            manifest = Manifest(
                model, versions.newest_known + 1, run, step, epoch, files, self._chunk_bytes(model, files)
            )
            try:
                snapshot = relay.store.open(manifest)
                break
            except OutOfCapacity as error:
                if time.monotonic() > deadline:
                    raise self._no_room(model, manifest, error) from error
            relay.retire(model, need_room=True)
            await asyncio.sleep(ROOM_POLL_S)
        announced = Announced(manifest, self._plan(model, epoch))
        versions.opened(announced)
        draft = Draft(announced, snapshot, secrets.token_hex(16))
        self._drafts[model, manifest.version] = draft
        self._forget_old(model)
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
        view = self._relay.view
        previous, slow = view.plans.get(model), self._relay.stragglers(model).slow
        plan = next_plan(previous, epoch, self._relay.config.name, view.places(), slow)
        if plan is not previous:
            log.info("%s: plan %d: %s (%s)", model, plan.number, " > ".join(plan.order), plan.reason)
        view.plans[model] = plan
        return plan

    async def _record(self, draft: Draft) -> None:
        """Writes the announcement, after which relays begin to fetch."""
        manifest = draft.manifest
        key = keys.version_key(manifest.model, manifest.version, "announced")
        writes = [
            Put(key, msgspec.json.encode(draft.announced)),
            Put(keys.plan_key(manifest.model), msgspec.json.encode(draft.announced.plan)),
        ]
        seat = self._relay.seat
        if not await seat.as_master(manifest.epoch, manifest.model, [Absent(key)], writes):
            await seat.refresh()
            if seat.epoch(manifest.model) != manifest.epoch:
                self._fail(draft, "another relay became master")
                raise StaleEpoch(f"{self._relay.config.name} is no longer master of {manifest.model}")
        draft.recorded = True  # the only other writer of this key in this epoch is an earlier try of this call

    def writable(self, model: str, version: int, token: str) -> Snapshot:
        draft = self._draft(model, version, token)
        if draft.state != "writing":
            raise Conflict(f"version {version} of {model} is {draft.state}: {draft.reason or 'no more writing'}")
        return draft.snapshot

    async def commit(self, model: str, version: int, token: str, root_digest: str, rank: int = 0) -> None:
        """The publisher, or one rank of it, has written its all. Sealing goes on by itself; the ticket follows it."""
        draft = self._draft(model, version, token)
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
        if draft.num_ranks == 1 and draft.root != root_digest:
            self._fail(draft, f"the publisher computed root {root_digest}, the relay {draft.root}")
            raise Conflict(draft.reason, hint="publish again")
        draft.state = "committed"
        self._relay.apply(model, self._relay.of(model).filled(version, draft.root))
        task = asyncio.ensure_future(self._seal_until_settled(draft))
        self._seals.add(task)
        task.add_done_callback(self._seals.discard)

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
            self._fail(draft, f"rank {rank} computed root {root_digest}, the relay {part_root(known)}")
            raise Conflict(draft.reason, hint="publish again")
        if rank in draft.committed:
            return False
        draft.committed.add(rank)
        return len(draft.committed) == draft.num_ranks

    def abort(self, model: str, version: int, token: str, reason: str) -> None:
        draft = self._draft(model, version, token)
        if draft.state == "writing":
            self._fail(draft, reason)

    # ---- sealing

    async def _seal_until_settled(self, draft: Draft) -> None:
        """Retries while the registry is away: the version stays at `copied` until the outcome is known."""
        while draft.state == "committed":
            try:
                if not draft.recorded:
                    await self._record(draft)
                await self._seal(draft)
            except Unavailable as error:
                log.warning("%s is not sealed yet: %s", draft.snapshot, error)
                await asyncio.sleep(RETRY_S)
            except StaleEpoch as error:
                await self._read_back(draft, str(error))

    async def _seal(self, draft: Draft) -> None:
        manifest = draft.manifest
        sealed = Sealed(
            manifest.model,
            manifest.version,
            manifest.step,
            manifest.run,
            draft.root,
            manifest.size_bytes,
            time.time(),
        )
        seal_key = keys.version_key(manifest.model, manifest.version, "sealed")
        guards = [Absent(seal_key), Absent(keys.version_key(manifest.model, manifest.version, "ended"))]
        done = await self._relay.seat.as_master(
            manifest.epoch, manifest.model, guards, [Put(seal_key, msgspec.json.encode(sealed))]
        )
        if done:
            self._sealed(draft, sealed)
        else:
            await self._read_back(draft, "the sealing transaction was refused")

    async def _read_back(self, draft: Draft, why: str) -> None:
        """Settles a doubt: an earlier try may have sealed it, or a newer master may have ended it."""
        for fact in await self._relay.seat.refresh():
            self._relay.take_fact(fact)
        state = self._relay.of(draft.manifest.model).get(draft.manifest.version)
        assert state is not None
        if state.sealed is not None and state.sealed.root_digest == draft.root:
            self._sealed(draft, state.sealed)
        else:
            self._fail(draft, why)

    def _sealed(self, draft: Draft, sealed: Sealed) -> None:
        draft.state = "sealed"
        log.info("%s sealed, root %s", draft.snapshot, sealed.root_digest)
        self._relay.record(sealed.model, sealed.version, sealed)
        self._relay.wake()

    def _fail(self, draft: Draft, reason: str) -> None:
        """Ends a version that was never sealed, here and (when this relay may still say so) for everybody."""
        draft.state, draft.reason = "failed", reason
        manifest = draft.manifest
        log.warning("%s is given up: %s", draft.snapshot, reason)
        ended = Ended("aborted", reason)
        if not self._is_current(draft):
            return
        self._relay.record(manifest.model, manifest.version, ended)
        self._relay.spawn(self._write_end(manifest, ended))
        self._relay.wake()

    async def _write_end(self, manifest: Manifest, ended: Ended) -> None:
        try:
            await self._end(manifest.model, manifest.version, manifest.epoch, ended)
        except (Unavailable, StaleEpoch) as error:
            log.info("the next master ends version %d: %s", manifest.version, error)

    async def _end(self, model: str, version: int, epoch: Epoch, ended: Ended) -> None:
        key = keys.version_key(model, version, "ended")
        await self._relay.seat.as_master(epoch, model, [Absent(key)], [Put(key, msgspec.json.encode(ended))])

    # ---- leaving, and joining another registry

    async def resign(self, model: str) -> bool:
        """Gives the model to whoever is elected next; False while a version of it is being written or sealed."""
        epoch = self._relay.seat.epoch(model)
        busy = any(m == model and d.state in ("writing", "committed") for (m, _), d in self._drafts.items())
        if epoch is None or busy:
            return not busy
        await self._relay.seat.as_master(epoch, model, [], [Delete(keys.master_key(model))])
        return True

    async def _bring_along(self, model: str, epoch: Epoch) -> None:
        """Records what is held here and this registry does not know: it was replaced, and this relay adopted it."""
        for record in self._relay.of(model).shown():
            state = self._relay.of(model).get(record.version)
            seal_key = keys.version_key(model, record.version, "sealed")
            if state is None or state.announced is None or self._relay.view.knows(seal_key):
                continue
            writes = [
                Put(keys.version_key(model, record.version, "announced"), msgspec.json.encode(state.announced)),
                Put(seal_key, msgspec.json.encode(record)),
            ]
            await self._relay.seat.as_master(epoch, model, [Absent(seal_key)], writes)
            log.info("%s version %d is recorded in the new registry", model, record.version)

    # ---- a new master's first duties

    async def _settle(self, model: str) -> None:
        """Once in each epoch: reads everything, then ends what an earlier master announced and never sealed."""
        epoch = self._relay.seat.epoch(model)
        if epoch is not None and self._settled.get(model) == epoch:
            return
        for fact in await self._relay.seat.refresh():
            self._relay.take_fact(fact)
        epoch = self._relay.seat.epoch(model)
        if epoch is None:
            return
        for version, state in self._relay.of(model).items():
            open_ended = state.announced is not None and state.sealed is None and state.ended is None
            if open_ended and state.announced is not None and state.announced.manifest.epoch != epoch:
                await self._end(model, version, epoch, Ended("aborted", "its master died before it was sealed"))
        await self._bring_along(model, epoch)
        self._settled[model] = epoch

    async def _note_lost(self, model: str) -> None:
        """Records sealed versions that nobody has held for a while. The newest decide; old ones retire by design."""
        epoch = self._relay.seat.epoch(model)
        newest = self._relay.of(model).newest_sealed
        if epoch is None or newest is None:
            return
        state = self._relay.of(model).get(newest)
        assert state is not None
        if state.holders or state.spilled or state.stage in ("complete", "shown"):
            self._lost_since.pop((model, newest), None)
            return
        since = self._lost_since.setdefault((model, newest), time.monotonic())
        if time.monotonic() - since > LOST_GRACE_S:
            await self._end(model, newest, epoch, Ended("lost", "no verified holder is left"))

    async def _prune(self, model: str) -> None:
        """Deletes the registry's records of versions long past, so that it does not grow without bound."""
        epoch = self._relay.seat.epoch(model)
        old = self._relay.of(model).forget(VERSIONS_KEPT)
        if epoch is None or not old:
            return
        writes = [Delete(keys.version_key(model, v, what)) for v in old for what in ("announced", "sealed", "ended")]
        await self._relay.seat.as_master(epoch, model, [], writes)

    def _newest_holders(self) -> dict[str, set[str]]:
        found = {}
        for model, versions in self._relay.models.items():
            newest = versions.newest_sealed
            state = versions.get(newest) if newest is not None else None
            found[model] = set(state.holders) if state is not None else set()
        return found

    def _mastered(self) -> list[str]:
        return sorted(model for model in self._relay.view.masters if self._relay.seat.is_master(model))

    def _epoch(self, model: str) -> Epoch:
        epoch = self._relay.seat.epoch(model)
        if epoch is None:
            seen = self._relay.view.masters.get(model)
            raise StaleEpoch(
                f"relay {self._relay.config.name} is not master of {model}",
                hint=f"publish to {seen.master.name}" if seen else "wait for an election",
            )
        return epoch

    def _draft(self, model: str, version: int, token: str) -> Draft:
        draft = self._drafts.get((model, version))
        if draft is None or not secrets.compare_digest(draft.token, token):
            raise Conflict(f"nothing may be written to version {version} of {model} with this token")
        return draft

    def draft(self, model: str, version: int) -> Draft | None:
        draft = self._drafts.get((model, version))
        return draft if draft is not None and self._is_current(draft) else None

    def _is_current(self, draft: Draft) -> bool:
        """Whether the number is still this draft's: one never recorded may be given again by another master."""
        state = self._relay.of(draft.manifest.model).get(draft.manifest.version)
        of = state.announced.manifest.epoch if state is not None and state.announced is not None else None
        return of is None or of == draft.manifest.epoch

    def _forget_old(self, model: str) -> None:
        mine = sorted(version for m, version in self._drafts if m == model)
        for version in mine[:-VERSIONS_KEPT]:
            del self._drafts[model, version]


def _write_own(snapshot: Snapshot, layout: Layout) -> None:
    """The files that the relay itself writes: the index over all ranks' files."""
    for number, (file, owner) in enumerate(zip(layout.files, layout.owners, strict=True)):
        if owner == RELAY:
            for index in snapshot.chunks.range_of(number):
                chunk = snapshot.chunks.chunk(index)
                piece = file.head[chunk.offset : chunk.offset + chunk.length]
                snapshot.place(index)[:] = piece
                snapshot.present(index, digest(piece))
