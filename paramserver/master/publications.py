"""Versions from their announcement to their commit, on the master of their model.

Invariants:
- at most one version of a model is being written;
- a number, of a version or of a plan, is given once per epoch;
- what was committed has every chunk, and the root that its publisher computed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Unpack

from paramserver.config import RelayConfig, show_bytes
from paramserver.core.chain import next_plan
from paramserver.core.chunk_size import choose_chunk_bytes, typical
from paramserver.core.layout import RELAY, Layout, Part, PlainFile, TensorSpec, plan_ranks
from paramserver.core.records import SOLE, Announced, Epoch, FileSpec, Manifest, Plan, Rank, digest, part_root
from paramserver.core.spans import begun
from paramserver.master.claims import RunClaims
from paramserver.master.comparison import Comparison
from paramserver.master.drafts import Draft, Drafts
from paramserver.master.rendezvous import Rendezvous
from paramserver.master.sealer import Sealer
from paramserver.memory.allocator import PoolAllocator
from paramserver.memory.store import Snapshot, Store
from paramserver.relay.elections import Elections
from paramserver.relay.member_lease import MemberLease
from paramserver.relay.models import ModelTable
from paramserver.relay.pins import RelayPins
from paramserver.relay.reconciler import Reconciler
from protos.announce_options import MasterOptions
from protos.errors import Conflict, OutOfCapacity, StaleEpoch, VersionLost
from protos.telemetry.spans import Tracer
from protos.version_labels import check_labels

log = logging.getLogger(__name__)

ROOM_POLL_S = 0.05
WAIT_ROOM_MAX_S = 600.0
PREPARE_S = 5.0  # an announcement that waits for memory to be allocated is answered after this long, and sent again


class Publications:
    """Announces, commits and aborts versions of the models of which this relay is master."""

    def __init__(
        self,
        config: RelayConfig,
        lease: MemberLease,
        elections: Elections,
        reconciler: Reconciler,
        *,
        models: ModelTable,
        store: Store,
        allocator: PoolAllocator,
        pins: RelayPins,
        drafts: Drafts,
        claims: RunClaims,
        sealer: Sealer,
        comparison: Comparison,
        tracer: Tracer | None = None,
    ) -> None:
        self._config = config
        self._lease, self._view, self._elections = lease, lease.view, elections
        self._reconciler = reconciler
        self._models, self._pins = models, pins
        self._store, self._allocator = store, allocator
        self._drafts, self._claims, self._sealer, self._comparison = drafts, claims, sealer, comparison
        self._tracer = tracer
        self._plans: dict[str, Plan] = {}  # the newest given here, of each model
        self._rendezvous: dict[tuple[str, str, int], Rendezvous] = {}

    async def announce(
        self,
        model: str,
        run: str,
        step: int,
        tensors: Sequence[TensorSpec],
        *,
        metadata: Mapping[str, str] | None,
        rank: Rank = SOLE,
        refuse_change: bool = False,
        plain: Sequence[PlainFile] = (),
        labels: Mapping[str, str] | None = None,
        **options: Unpack[MasterOptions],
    ) -> Draft:
        """Numbers a version and opens it. Refused by name: unknown dtypes, another run, what cannot fit.

        Several ranks wait for each other first: each gets the same draft once all have announced, or the same error.
        """
        self._claims.check(model, run, rank)
        if self._lease.foreign_store:
            raise Conflict(
                f"the etcd of {self._config.name} was replaced by another: nothing seals there",
                hint="run `paramserver adopt` for every relay",
            )
        wait_room_s = min(max(0.0, options["wait_room_s"]), WAIT_ROOM_MAX_S)

        part = Part(tensors, options["file_bytes_max"], metadata, refuse_change, plain, wait_room_s, labels)

        async def begin(parts: Sequence[Part]) -> Draft:
            of_all = _labels(parts)
            check_labels(of_all)
            of_all = begun(of_all, self._tracer)
            layout = await asyncio.to_thread(plan_ranks, parts)  # of many tensors it takes a second
            refuse = any(one.refuse_change for one in parts)
            warnings = await self._comparison.warnings(model, run, layout, refuse=refuse)
            # The least patient rank's call ends first, which ends the version for all: nobody waits beyond that.
            patience_s = min(one.wait_room_s for one in parts)
            draft = await self._begin(model, run, step, layout, rank.count, patience_s, of_all)
            draft.warnings = warnings
            return draft

        if rank.count == 1:
            return await begin([part])
        key = (model, run, step)
        rendezvous = self._rendezvous.setdefault(key, Rendezvous(rank.count, f"step {step} of run {run}"))
        try:
            return await rendezvous.join(rank.index, part, begin, self._sealer.fail, wait_room_s)
        finally:
            if self._rendezvous.get(key) is rendezvous and rendezvous.over:
                del self._rendezvous[key]

    async def _begin(
        self,
        model: str,
        run: str,
        step: int,
        layout: Layout,
        num_ranks: int,
        wait_room_s: float,
        labels: dict[str, str],
    ) -> Draft:
        specs = tuple(FileSpec(file.name, file.size_bytes) for file in layout.files)
        for draft in self._drafts.writing(model):
            self._sealer.fail(draft, f"run {run} announced again before committing")
        draft = await self._open(model, run, step, specs, num_ranks, wait_room_s, labels)
        draft.owners, draft.num_ranks = layout.owners, num_ranks
        _write_own(draft.snapshot, layout)
        self._sealer.announce(draft)
        return draft

    async def _open(
        self,
        model: str,
        run: str,
        step: int,
        files: tuple[FileSpec, ...],
        num_ranks: int,
        wait_room_s: float,
        labels: dict[str, str],
    ) -> Draft:
        epoch = self._elections.epoch_as_master(model)
        sizes, what = [file.size_bytes for file in files], f"the next version of {model}"
        self._store.check_size(what, sum(sizes))
        deadline = time.monotonic() + wait_room_s
        while True:
            manifest = self._manifest(model, run, step, files, epoch)
            try:
                self._store.check(manifest)
                allotment = await self._allocator.take(model, sizes, what, patience_s=PREPARE_S)
                break
            except OutOfCapacity as error:
                if not self._reconciler.make_room(model) and time.monotonic() > deadline:
                    raise self._no_room(model, manifest, error) from error
            await asyncio.sleep(ROOM_POLL_S)
        try:
            self._check_still_there(model, run, epoch, num_ranks)
            # The number again, now that nothing is awaited any more before the version is opened: while memory was
            # allocated, the watch may have brought versions that are newer than the number of the first manifest.
            manifest = self._manifest(model, run, step, files, epoch)
            snapshot = self._store.open(manifest, allotment, labels)
        except BaseException:
            self._store.pool.release(allotment)
            raise
        announced = Announced(manifest, self._plan(model, epoch), labels)
        self._models.of(model).opened(announced)
        draft = Draft(announced, snapshot, secrets.token_hex(16))
        self._drafts.add(draft)
        log.info("%s announced by run %s, step %d, %s", snapshot, run, step, show_bytes(manifest.size_bytes))
        return draft

    def _manifest(self, model: str, run: str, step: int, files: tuple[FileSpec, ...], epoch: Epoch) -> Manifest:
        number = self._models.of(model).next_number
        return Manifest(model, number, run, step, epoch, files, self._chunk_bytes(model, files))

    def _check_still_there(self, model: str, run: str, epoch: Epoch, num_ranks: int) -> None:
        """While memory was allocated, the election may have been lost, a rank may have left, a draft may have begun."""
        if self._elections.epoch_as_master(model) != epoch:
            raise StaleEpoch(f"another epoch of {model} began before its version could")
        self._claims.check_all(model, run, num_ranks)
        for draft in self._drafts.writing(model):
            self._sealer.fail(draft, f"run {run} announced again before committing")

    def _chunk_bytes(self, model: str, files: Sequence[FileSpec]) -> int:
        if self._config.chunk_bytes is not None:
            return self._config.chunk_bytes
        num_bytes = sum(file.size_bytes for file in files)
        hop = typical(self._models.stragglers(model).costs())
        return choose_chunk_bytes(num_bytes, len(self._view.places()), hop)

    def _no_room(self, model: str, manifest: Manifest, error: OutOfCapacity) -> OutOfCapacity:
        held, pinned, others = [], False, set()
        for of, versions in self._models.items():
            for record in versions.shown():
                pins = [pin.holder for pin in self._pins.all() if (pin.model, pin.version) == (of, record.version)]
                whose = "" if of == model else f"{of} "
                pinned_by = f" pinned by {', '.join(pins)}" if pins else ""
                held.append(f"{whose}version {record.version} ({show_bytes(record.size_bytes)}){pinned_by}")
                pinned = pinned or bool(pins)
                others |= {of} - {model}
        ways = ["release pins"] * pinned
        ways += [f"drop a model that nobody uses (`paramserver drop --model {min(others)}`)"] if others else []
        return OutOfCapacity(
            f"no room for version {manifest.version} of {model}, {show_bytes(manifest.size_bytes)}: {error.message}; "
            f"held: {', '.join(held) or 'nothing'}; "
            f"quarantined: {show_bytes(self._store.pool.statistics().quarantined_bytes)}",
            hint=error.hint or ", or ".join([*ways, "start the relay with a larger --pool-bytes or a lower --retain"]),
            retry_after_s=5.0,
        )

    def _plan(self, model: str, epoch: Epoch) -> Plan:
        view, slow = self._view, self._models.stragglers(model).slow
        previous = self._plans.get(model)  # the registry may not have it yet
        if previous is None or previous.epoch != epoch:
            previous = view.plans.get(model)
        plan = next_plan(previous, epoch, self._config.name, view.places(), slow)
        if plan is not previous:
            log.info("%s: plan %d: %s (%s)", model, plan.number, " > ".join(plan.order), plan.reason)
        self._plans[model] = plan
        view.give_plan(model, plan)
        return plan

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
        if draft.state != "writing":  # meanwhile given up, or committed by a retry of this call
            await self.commit(model, version, token, root_digest, rank)
            return
        if draft.num_ranks == 1 and draft.root != root_digest:
            self._sealer.fail(draft, f"the publisher computed root {root_digest}, the relay {draft.root}")
            raise Conflict(draft.reason, hint="publish again")
        draft.state = "committed"
        self._reconciler.apply(model, self._models.of(model).filled(version, draft.root))
        self._sealer.begin(draft)

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
            self._sealer.fail(draft, f"rank {rank} computed root {root_digest}, the relay {part_root(known)}")
            raise Conflict(draft.reason, hint="publish again")
        if rank in draft.committed:
            return False
        draft.committed.add(rank)
        return len(draft.committed) == draft.num_ranks

    def abort(self, model: str, version: int, token: str, reason: str) -> None:
        draft = self._drafts.of(model, version, token)
        if draft.state == "writing":
            self._sealer.fail(draft, reason)


def _labels(parts: Sequence[Part]) -> dict[str, str]:
    """The labels of a version. Where its ranks differ in one, the lowest rank that gives it stands."""
    return {name: text for part in reversed(parts) for name, text in (part.labels or {}).items()}


def _write_own(snapshot: Snapshot, layout: Layout) -> None:
    """The files that the relay itself writes: the index over all ranks' files."""
    for number, (file, owner) in enumerate(zip(layout.files, layout.owners, strict=True)):
        if owner == RELAY:
            for index in snapshot.chunks.range_of(number):
                chunk = snapshot.chunks.chunk(index)
                piece = file.head[chunk.offset : chunk.offset + chunk.length]
                snapshot.place(index)[:] = piece
                snapshot.present(index, digest(piece))
