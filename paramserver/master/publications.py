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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paramserver.client.relay import RelayClient
from paramserver.config import show_bytes
from paramserver.core import architecture
from paramserver.core.chain import next_plan
from paramserver.core.chunk_size import choose_chunk_bytes, typical
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
    check_words,
    digest,
    part_root,
)
from paramserver.core.refused_loads import RefusedLoads
from paramserver.master.drafts import Draft, Drafts
from paramserver.master.duties import MasterDuties, ask_soon
from paramserver.master.ranks import Meeting
from paramserver.master.sealer import Sealer
from paramserver.memory.store import Snapshot
from paramserver.relay.relay import Relay
from protos.errors import (
    Conflict,
    Corrupt,
    NotFound,
    OutOfCapacity,
    StaleEpoch,
    Unavailable,
    VersionLost,
)

log = logging.getLogger(__name__)

ROOM_POLL_S = 0.05
WEIGHTS = ".safetensors"
WAIT_ROOM_MAX_S = 600.0
MODELS_MAX = 128  # of a tier: each costs every relay some work, all the time
PREPARE_S = 5.0  # an announcement that waits for memory to be allocated is answered after this long, and sent again


@dataclass(eq=False)
class RunClaim:
    """A publisher, or one rank of it, that is connected and has claimed a model for its run.

    A claim ends with its epoch: a master whose lease ran out and who was elected again may have had others in between.
    """

    run: str
    publisher: str
    epoch: Epoch
    rank: Rank = SOLE
    client: str = ""  # who may take it over, since it is the same life of the same program; "": nobody


class Publications:
    """The publishers' side of a master."""

    def __init__(self, relay: Relay, *, dial: Callable[[str], RelayClient] = ask_soon) -> None:
        """`dial` makes a client of another relay, by the address of its gRPC port."""
        self._relay = relay
        self._drafts = Drafts()
        self._sealing = Sealer(relay)
        self.presiding = MasterDuties(
            relay, self._drafts, dial=dial, in_use=lambda model: bool(self._claims.get(model))
        )
        self.refused_loads = RefusedLoads()
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
        if model not in seat.view.models and len(seat.view.models) >= MODELS_MAX:
            raise OutOfCapacity(
                f"{model} would be more than {MODELS_MAX} models", hint="drop one: `paramserver drop --model NAME`"
            )
        while model not in seat.view.masters:
            if time.monotonic() > deadline:
                raise Unavailable(f"no relay became master of {model} in 10 s", hint="see `paramserver status`")
            try:
                if seat.member.publish_host and model not in seat.view.models:
                    if await seat.campaign(model):
                        await self.presiding.settle(model)
                    continue
                await seat.want(model)
            except Unavailable:  # busy for a moment, or away: a trainer's first publish would end with it
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(ROOM_POLL_S)
        return seat.view.masters[model].master.name

    async def drop(self, model: str) -> list[int]:
        """Ends a model of which this relay is master. Conflict while somebody publishes to it."""
        claims = self._claims.get(model)
        if claims:
            held = next(iter(claims.values()))
            raise Conflict(
                f"{held.publisher} publishes to {model} (run {held.run})",
                hint="end that run first, then drop the model",
            )
        if self._drafts.busy(model):
            raise Conflict(f"a version of {model} is being sealed", hint="try again in a moment")
        self._claims.pop(model, None)
        return await self.presiding.drop(model)

    # ---- one run at a time

    def claim(self, model: str, run: str, publisher: str, rank: Rank = SOLE, *, client: str = "") -> RunClaim:
        """Claims the model for a run. Conflict when another publisher is connected; ranks of one run claim together.

        A client whose connection broke without a word to this side takes its own claim over.
        """
        check_model_name(model)
        check_words("a run", run)
        check_words("a publisher", publisher)
        epoch = self._epoch(model)
        claims = self._claims.setdefault(model, {})
        for held in [held for held in claims.values() if held.epoch != epoch]:
            self._end_claim(model, held)  # its own stream hears of the new epoch only later
        for held in claims.values():
            if held.run == run and held.rank.count == rank.count and held.rank.index != rank.index:
                continue
            if client and (held.client, held.run, held.rank) == (client, run, rank):
                log.info("%s claims %s again: its connection had broken", publisher, model)
                self.unclaim(model, held)
                self._relay.wake()  # the stream of the old claim ends
                break
            raise Conflict(
                f"model {model} has a publisher already: {held.publisher} (run {held.run})",
                hint="end that one first, or publish under another model name",
            )
        claims[rank.index] = RunClaim(run, publisher, epoch, rank, client)
        return claims[rank.index]

    def unclaim(self, model: str, claim: RunClaim) -> None:
        """The publisher is gone: what it was writing cannot be finished."""
        if self._claims.get(model, {}).get(claim.rank.index) is claim:  # else it was claimed again, and is in use
            self._end_claim(model, claim)

    def _end_claim(self, model: str, claim: RunClaim) -> None:
        del self._claims[model][claim.rank.index]
        for draft in self._drafts.writing(model):
            if draft.manifest.run == claim.run:
                self._sealing.fail(draft, f"its publisher {claim.publisher} left before it was committed")

    def is_claimed_by(self, model: str, claim: RunClaim) -> bool:
        """Whether the claim holds; not when its owner claimed the model again, nor in another epoch."""
        held = self._claims.get(model, {}).get(claim.rank.index)
        return held is claim and claim.epoch == self._relay.seat.epoch(model)

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
        refuse_change: bool = False,
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

        part = Part(tensors, file_bytes_max, metadata, refuse_change)

        async def begin(parts: Sequence[Part]) -> Draft:
            layout = await asyncio.to_thread(plan_ranks, parts)  # of many tensors it takes a second
            warnings = await self._compare(model, run, layout, refuse=any(one.refuse_change for one in parts))
            draft = await self._begin(model, run, step, layout, rank.count, wait_room_s)
            draft.warnings = warnings
            return draft

        if rank.count == 1:
            return await begin([part])
        key = (model, run, step)
        meeting = self._meetings.setdefault(key, Meeting(rank.count, f"step {step} of run {run}"))
        try:
            return await meeting.attend(rank.index, part, begin, self._sealing.fail, wait_room_s)
        finally:
            if self._meetings.get(key) is meeting and meeting.over:
                del self._meetings[key]

    async def _compare(self, model: str, run: str, layout: Layout, *, refuse: bool) -> tuple[str, ...]:
        """What the publisher is warned of: how this differs from the version before, who refused that, what was lost.

        Conflict for another architecture, when that is to be refused. A version that engines refused is no measure, nor
        is one that this relay does not hold.
        """
        shown = [record.version for record in self._relay.of(model).shown()]
        warnings = [self._came_to_nothing(model, run)]
        warnings += [self.refused_loads.words(model, version) for version in shown[-1:]]
        loadable = [version for version in shown if not self.refused_loads.of(model, version)]
        before = self._relay.store.get(model, loadable[-1]) if loadable else None
        if before is not None:
            warnings += await self._differences(model, before, layout, refuse=refuse)
        return tuple(warning for warning in warnings if warning)

    def _came_to_nothing(self, model: str, run: str) -> str:
        """What the run announced last, if it ended: its publisher was told that it is copied, and may not ask again."""
        for version, state in reversed(self._relay.of(model).items()):
            if state.announced is not None and state.announced.manifest.run == run:
                return f"version {version} of this run came to nothing: {state.ended.reason}" if state.ended else ""
        return ""

    async def _differences(self, model: str, before: Snapshot, layout: Layout, *, refuse: bool) -> list[str]:
        found = await asyncio.to_thread(_differences, before, layout)
        warnings = []
        if found.changes:
            words = f"it differs from {before}: {architecture.some(found.changes)}"
            if refuse:
                raise Conflict(
                    f"this is no next version of {model}: {words}",
                    hint="publish another architecture under another model name, or allow it with allow_change=True",
                )
            warnings.append(words)
        if found.conversions:
            warnings.append(f"its dtypes differ from {before}, engines convert: {architecture.some(found.conversions)}")
        return warnings

    async def _begin(
        self, model: str, run: str, step: int, layout: Layout, num_ranks: int, wait_room_s: float
    ) -> Draft:
        specs = tuple(FileSpec(file.name, file.size_bytes) for file in layout.files)
        for draft in self._drafts.writing(model):
            self._sealing.fail(draft, f"run {run} announced again before committing")
        draft = await self._open(model, run, step, specs, num_ranks, wait_room_s)
        draft.owners, draft.num_ranks = layout.owners, num_ranks
        _write_own(draft.snapshot, layout)
        self._sealing.announce(draft)
        return draft

    async def _open(
        self, model: str, run: str, step: int, files: tuple[FileSpec, ...], num_ranks: int, wait_room_s: float
    ) -> Draft:
        relay, epoch = self._relay, self._epoch(model)
        sizes, what = [file.size_bytes for file in files], f"the next version of {model}"
        relay.store.check_size(what, sum(sizes))
        deadline = time.monotonic() + wait_room_s
        while True:
            manifest = self._manifest(model, run, step, files, epoch)
            try:
                relay.store.check(manifest)
                allotment = await relay.memory.take(model, sizes, what, patience_s=PREPARE_S)
                break
            except OutOfCapacity as error:
                if not relay.make_room(model) and time.monotonic() > deadline:
                    raise self._no_room(model, manifest, error) from error
            await asyncio.sleep(ROOM_POLL_S)
        try:
            self._check_still_there(model, run, epoch, num_ranks)
            manifest = self._manifest(model, run, step, files, epoch)  # numbered and opened in one go
            snapshot = relay.store.open(manifest, allotment)
        except BaseException:
            relay.store.pool.release(allotment)
            raise
        announced = Announced(manifest, self._plan(model, epoch))
        relay.of(model).opened(announced)
        draft = Draft(announced, snapshot, secrets.token_hex(16))
        self._drafts.add(draft)
        log.info("%s announced by run %s, step %d, %s", snapshot, run, step, show_bytes(manifest.size_bytes))
        return draft

    def _manifest(self, model: str, run: str, step: int, files: tuple[FileSpec, ...], epoch: Epoch) -> Manifest:
        number = self._relay.of(model).next_number
        return Manifest(model, number, run, step, epoch, files, self._chunk_bytes(model, files))

    def _check_still_there(self, model: str, run: str, epoch: Epoch, num_ranks: int) -> None:
        """While there was no memory the election, or a publisher, may have gone, and drafts of others may have come."""
        if self._epoch(model) != epoch:
            raise StaleEpoch(f"another epoch of {model} began before its version could")
        claims = self._claims.get(model, {})
        gone = [rank for rank in range(num_ranks) if rank not in claims or claims[rank].run != run]
        if gone:
            raise StaleEpoch(f"rank {gone[0]} of run {run} left before its version of {model} could begin")
        for draft in self._drafts.writing(model):
            self._sealing.fail(draft, f"run {run} announced again before committing")

    def _chunk_bytes(self, model: str, files: Sequence[FileSpec]) -> int:
        if self._relay.config.chunk_bytes is not None:
            return self._relay.config.chunk_bytes
        num_bytes = sum(file.size_bytes for file in files)
        hop = typical(self._relay.stragglers(model).costs())
        return choose_chunk_bytes(num_bytes, len(self._relay.view.places()), hop)

    def _no_room(self, model: str, manifest: Manifest, error: OutOfCapacity) -> OutOfCapacity:
        relay = self._relay
        held, pinned, others = [], False, set()
        for of, versions in sorted(relay.models.items()):
            for record in versions.shown():
                pins = [pin.holder for pin in relay.pins.all() if (pin.model, pin.version) == (of, record.version)]
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
            f"quarantined: {show_bytes(relay.store.pool.statistics().quarantined_bytes)}",
            hint=error.hint or ", or ".join([*ways, "start the relay with a larger --pool-bytes or a lower --retain"]),
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
        """The publisher, or one rank of it, has written its all. Sealer goes on by itself; the ticket follows it."""
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


def _differences(before: Snapshot, layout: Layout) -> architecture.Differences:
    """Between a version held here and one that is announced. The headers of many tensors take a while to read."""
    after = [file.head for file in layout.files if file.name.endswith(WEIGHTS)]
    try:
        with before.reading():
            heads = [
                _head(file.view())
                for file, spec in zip(before.files, before.manifest.files, strict=True)
                if spec.name.endswith(WEIGHTS)
            ]
        if heads == after:
            return architecture.Differences()
        return architecture.compare(architecture.read_heads(heads), architecture.read_heads(after))
    except (NotFound, Corrupt) as error:
        log.warning("nothing is compared with %s: %s", before, error)
        return architecture.Differences()


def _head(file: memoryview) -> bytes:
    """The header of a safetensors file, with its length before it."""
    return bytes(file[: 8 + int.from_bytes(file[:8], "little")])


def _write_own(snapshot: Snapshot, layout: Layout) -> None:
    """The files that the relay itself writes: the index over all ranks' files."""
    for number, (file, owner) in enumerate(zip(layout.files, layout.owners, strict=True)):
        if owner == RELAY:
            for index in snapshot.chunks.range_of(number):
                chunk = snapshot.chunks.chunk(index)
                piece = file.head[chunk.offset : chunk.offset + chunk.length]
                snapshot.place(index)[:] = piece
                snapshot.present(index, digest(piece))
