"""One version published by ranks that each write what they hold of a sharded model; nothing is gathered.

Invariants:
- the version's files are those of one publisher that had all tensors: rank 0 announces and commits them, the others
  join, and each writes whole chunks;
- every rank goes through all rounds of a version that was begun, whatever fails: a round is a collective;
- ranks agree on what became of the announcement, of joining it, of the writing, and of the commit: all return the
  same version, all begin again together, or all raise the same error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from paramserver.client import Rank, StreamedVersion, Ticket, TicketData
from protos.decoding import decode_msgpack
from protos.errors import LaminarError
from trainer_client.loop import LoopThread
from trainer_client.sources import NamedTensors
from trainer_client.streaming.arguments import PublishArguments
from trainer_client.streaming.beside import NOTHING, Beside, beside
from trainer_client.streaming.manifest import Manifest, memory_of
from trainer_client.streaming.outcomes import PASSES_MAX, Agreement, Outcome
from trainer_client.streaming.passes import Part
from trainer_client.streaming.ranks import TorchRanks, exchange_all
from trainer_client.streaming.rounds import Rounds
from trainer_client.streaming.shards import LocalBytes, Shard, shards_of
from trainer_client.streaming.shares import Extent, Piece, extents_of, pieces_of, rounds_of
from trainer_client.streaming.staging import StagingRing

Digests = dict[int, bytes]


class Held(msgspec.Struct):
    """What a rank holds: its rows of each tensor, in the order of names; and names that share a tensor with another."""

    rows: list[tuple[int, int]]
    tied: dict[str, str]


class ShardedPublish:
    """The publish of one version; every rank calls `publish` once, at the same time."""

    def __init__(
        self,
        tensors: NamedTensors,
        arguments: Callable[[], PublishArguments],
        *,
        ranks: TorchRanks,
        dtype: Any,
        loop: LoopThread,
        open_version: Callable[[Manifest, Part], StreamedVersion],
        join_version: Callable[[bytes], StreamedVersion],
        begin_turn: Callable[[], None],
        settle: Callable[[], Ticket | None],
        wait: Callable[[Ticket], None],
        staging: StagingRing,
    ) -> None:
        self._tensors, self._arguments, self._dtype = tensors, arguments, dtype
        self._ranks, self._loop = ranks, loop
        self._agreement = Agreement(ranks)
        self._open, self._join = open_version, join_version
        self._begin_turn, self._settle, self._wait = begin_turn, settle, wait
        self._staging = staging
        self._shards: dict[str, Shard] = {}
        self._held = Held([], {})
        self._manifest = Manifest(())
        self._beside: Beside = NOTHING
        self._extents: dict[str, Sequence[Extent]] = {}
        self._version: StreamedVersion | None = None  # until it is committed or given up
        self._digests: Mapping[int, bytes] = {}  # of the chunks that this rank wrote

    def publish(self) -> TicketData:
        """The version's ticket, the same on every rank; raises the same error on every rank."""
        for prepare in (self._read_shards, self._settled, self._share_out):
            prepared = self._agree(self._agreement.tried(prepare))
            if prepared.code:
                raise self._agreement.error(prepared)
            if prepared.ticket is not None:
                return prepared.ticket
        return self._agreement.in_passes(self._pass, PASSES_MAX)

    # ---- what is announced, and who holds it

    def _read_shards(self) -> Outcome:
        arguments = self._arguments()
        self._begin_turn()
        self._shards = shards_of(self._tensors, arguments.names, self._dtype)
        self._held = Held([(one.start, one.end) for one in self._shards.values()], self._tied())
        described = [(shard.meta, shard.local is None) for shard in self._shards.values()]
        return Outcome(same=hashlib.sha256(repr(described).encode()).hexdigest())

    def _settled(self) -> Outcome:
        ticket = self._settle() if self._ranks.index == 0 else None
        if ticket is None:
            return Outcome()
        self._wait(ticket)
        return Outcome(ticket=ticket.data)

    def _share_out(self) -> Outcome:
        found = [decode_msgpack(one, Held) for one in exchange_all(self._ranks, msgspec.msgpack.encode(self._held))]
        tied = found[0].tied  # a rank without rows of a tensor cannot see that it has two names
        kept = tuple(shard.meta for name, shard in self._shards.items() if name not in tied)
        self._manifest = Manifest.of(Manifest(kept, tied))
        for number, (name, shard) in enumerate(self._shards.items()):
            rows = [one.rows[number] for one in found]
            self._extents[name] = extents_of(name, shard.num_rows, shard.meta.size_bytes, rows, number)
        if self._ranks.index == 0:
            arguments = self._arguments()
            self._beside = beside(self._shards.keys(), arguments.base, arguments.files)
        return Outcome()

    def _tied(self) -> dict[str, str]:
        owners: dict[Hashable, str] = {}
        pairs = [(name, owners.setdefault(memory_of(name, one.tensor), name)) for name, one in self._shards.items()]
        return {name: owner for name, owner in pairs if name != owner}

    # ---- one version

    def _pass(self) -> Outcome:
        """One announcement, and all rounds; what all ranks agree became of it."""
        return self._agreement.through((self._begin, self._write, self._commit), self._give_up)

    def _begin(self) -> Outcome:
        """Rank 0 announces; the others join when it has."""
        outcome, invitation = Outcome(), b""
        if self._ranks.index == 0:
            try:
                self._version = self._open(self._manifest, Part(Rank(), self._manifest.tensors, self._beside))
                invitation = self._version.invitation
            except BaseException as error:  # noqa: BLE001  (raised by every rank)
                # It was tried at every master that there was.
                outcome = msgspec.structs.replace(self._agreement.failed(error), again=False)
        invitation = exchange_all(self._ranks, invitation)[0]
        if self._ranks.index > 0 and invitation:
            try:
                self._version = self._join(invitation)
            except BaseException as error:  # noqa: BLE001  (raised by every rank)
                outcome = self._agreement.failed(error)
        return outcome

    def _write(self) -> Outcome:
        """Every round, and this rank's own chunks to their end at the relay."""
        version = self._version
        assert version is not None, "every rank has opened it"
        local = LocalBytes(self._shards, self._staging, check_nan=self._arguments().check_nan)
        rounds = Rounds(version, self._ranks, local, self._beside)
        gathered = {name: one.meta.size_bytes for name, one in self._shards.items() if one.local is None}
        for pieces in rounds_of(self._pieces(version), gathered):
            rounds.one(pieces, gathered.keys())
        outcome = self._agreement.tried(self._finish, version, rounds.failed)
        return self._give_up(outcome.error()) if outcome.code else outcome

    def _finish(self, version: StreamedVersion, failed: BaseException | None) -> Outcome:
        if failed is not None:
            raise failed
        self._digests = self._loop.run(version.finish())
        return Outcome()

    def _pieces(self, version: StreamedVersion) -> Iterator[Piece]:
        extents = dict(self._extents)
        for place in (place for file in version.files for place in file.tensors if place.name not in extents):
            extents[place.name] = [Extent(0, place.name, 0, place.size_bytes)]  # of the base, or a plain file
        return pieces_of(version.files, version.chunks, extents, self._ranks.count)

    def _commit(self) -> Outcome:
        """Rank 0 commits, with the digests of all ranks' chunks."""
        version = self._version
        assert version is not None, "every rank has written its part"
        packed = msgspec.msgpack.encode(self._digests)
        everybodys = exchange_all(self._ranks, packed)
        if self._ranks.index > 0:
            self._loop.run(version.close())
            return Outcome()
        try:
            digests = {index: one for each in everybodys for index, one in decode_msgpack(each, Digests).items()}
            ticket = self._loop.run(version.commit_shared(digests))
        except BaseException as error:  # noqa: BLE001  (raised by every rank)
            return self._give_up(self._agreement.failed(error).error())
        try:
            self._wait(ticket)
        except BaseException as error:  # noqa: BLE001  (raised by every rank)
            # It is published, or lost: nothing is made again.
            return msgspec.structs.replace(self._agreement.failed(error), again=False, ticket=ticket.data)
        return Outcome(ticket=ticket.data)

    def _give_up(self, error: LaminarError) -> Outcome:
        version, self._version = self._version, None
        return Outcome.of(error if version is None else self._loop.run(version.give_up(error)))

    def _agree(self, outcome: Outcome) -> Outcome:
        return self._agreement.agreed(outcome)
