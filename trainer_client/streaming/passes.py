"""One version published from a stream of tensors: by one process, or by ranks that take the tensors in step.

Invariants:
- tensors are taken on the caller's thread, one at a time, and let go before the next one is taken;
- of tied names one is written; those that the iterator gives nevertheless have to have the same bytes;
- every rank takes every tensor of an iterator that was begun, whatever fails: taking one is a collective, and a rank
  that stopped would leave the others in it;
- ranks agree on what became of the announcement, of the writing, and of the commit: all return the same version, all
  begin again together, or all raise the same error, and then nothing is committed;
- only ranks that write speak to a relay.

An error that the iterator itself raises ends its version. All ranks raise it where the others still come to their
agreement within LEAVE_S, as they do behind `gathered`, which takes its rest when it is left early. Else the ranks are
out of step: it goes through, and only the caller knows how to get the others out of their collective.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import msgspec
import xxhash

from paramserver.client import Rank, StreamedVersion, TensorSource, Ticket, TicketData
from protos.errors import InvalidRequest, LaminarError
from trainer_client.loop import LoopThread
from trainer_client.sources import plain_source, refuse_nan
from trainer_client.streaming.arguments import PublishArguments
from trainer_client.streaming.beside import NOTHING, Beside, beside
from trainer_client.streaming.manifest import Manifest, TensorMeta
from trainer_client.streaming.names import rename
from trainer_client.streaming.outcomes import PASSES_MAX, Agreement, Outcome
from trainer_client.streaming.ranks import Ranks
from trainer_client.streaming.staging import StagingRing

Items = Iterable[tuple[str, Any]] | Mapping[str, Any] | Callable[[], Iterable[tuple[str, Any]]]
"""Pairs (name, tensor), a state dict, or a function that gives pairs from the beginning each time that it is called."""
Writers = Literal["first", "all"]
"""Which ranks write: the first one all files, or each rank files of its own."""


@dataclass(frozen=True, slots=True)
class Part:
    """What this rank writes: tensors that come from the iterator, and what else there is."""

    rank: Rank
    metas: tuple[TensorMeta, ...]
    beside: Beside = NOTHING


def part_of(manifest: Manifest, ranks: Ranks, writers: Writers) -> Part | None:
    """This rank's share; None when it writes nothing. With "all" each tensor goes to the rank with the fewest bytes."""
    if writers == "first" or ranks.count == 1:
        return Part(Rank(0, 1), manifest.tensors) if ranks.index == 0 else None
    if len(manifest.tensors) < ranks.count:
        raise InvalidRequest(
            f"{len(manifest.tensors)} tensors for {ranks.count} ranks that write", hint='pass writers="first"'
        )
    shares: list[list[TensorMeta]] = [[] for _ in range(ranks.count)]
    sizes = [0] * ranks.count
    for number, meta in enumerate(manifest.tensors):
        # The first ones go around, so that no rank is without a file; in a version of empty tensors, too.
        to = number if number < ranks.count else min(range(ranks.count), key=lambda n: (sizes[n], n))
        shares[to].append(meta)
        sizes[to] += meta.size_bytes
    return Part(Rank(ranks.index, ranks.count), tuple(shares[ranks.index]))


class Stream:
    """The publish of one version; `publish` is called once, on the thread that takes the tensors."""

    def __init__(
        self,
        manifest: Manifest | Iterable[TensorMeta],
        items: Items,
        arguments: Callable[[], PublishArguments],
        *,
        run: str,
        ranks: Ranks,
        writers: Writers,
        loop: LoopThread,
        open_version: Callable[[Manifest, Part], StreamedVersion],
        begin_turn: Callable[[], None],
        settle: Callable[[], Ticket | None],
        wait: Callable[[Ticket], None],
        staging: StagingRing,
    ) -> None:
        self._announced = manifest
        self._arguments = arguments
        self._items = items.items if isinstance(items, Mapping) else items
        self._run = run
        self._ranks, self._writers = ranks, writers
        self._agreement = Agreement(ranks)
        self._loop = loop
        self._begin_turn, self._open, self._settle, self._wait = begin_turn, open_version, settle, wait
        self._staging = staging
        self._manifest = Manifest(())
        self._published: Mapping[str, str | None] = {}
        self._part: Part | None = None
        self._version: StreamedVersion | None = None  # until it is committed or given up
        self._was_taken = False
        self._metas: dict[str, TensorMeta] = {}
        self._owners: frozenset[str] = frozenset()  # of tied names
        self._mine: frozenset[str] = frozenset()
        self._tied_bytes: dict[str, tuple[str, bytes]] = {}  # by the name that is written: who came first, its digest

    def publish(self) -> TicketData:
        """The version's ticket, the same on every rank; raises the same error on every rank."""
        prepared = self._agree(self._agreement.tried(self._prepare))
        if (prepared.code or prepared.ticket is not None) and not callable(self._items):
            self._write_all()
        if prepared.code:
            raise self._agreement.error(prepared)
        if prepared.ticket is not None:
            return prepared.ticket
        return self._agreement.in_passes(self._pass, num_max=PASSES_MAX if callable(self._items) else 1)

    def _prepare(self) -> Outcome:
        """What this rank will write; its outcome names the run and the tensors, to be the same on every rank."""
        arguments = self._arguments()
        if self._writers not in get_args(Writers):
            raise InvalidRequest(f"writers={self._writers!r}", hint='pass "first" or "all"')
        self._begin_turn()
        self._manifest, self._published = Manifest.of(self._announced).renamed(arguments.names)
        self._part = part_of(self._manifest, self._ranks, self._writers)
        if self._part is not None and self._ranks.index == 0:
            names = {*(meta.name for meta in self._manifest.tensors), *self._manifest.tied}
            self._part = replace(self._part, beside=beside(names, arguments.base, arguments.files))
        self._metas = {meta.name: meta for meta in self._manifest.tensors}
        self._owners = frozenset(self._manifest.tied.values())
        self._mine = frozenset(meta.name for meta in self._part.metas) if self._part is not None else frozenset()
        run = self._run if self._writers == "all" else ""
        ticket = self._settle() if self._part is not None else None
        if ticket is not None:
            self._wait(ticket)
        data = ticket.data if ticket is not None else None
        return Outcome(ticket=data, same=hashlib.sha256(repr(self._manifest).encode()).hexdigest(), run=run)

    def _pass(self) -> Outcome:
        """One announcement and one round through the tensors; what all ranks agree became of it."""
        self._was_taken = False
        found = self._agreement.through((self._begin, self._take_all, self._commit), self._give_up)
        if not self._was_taken and not callable(self._items):  # an iterator is drained even if nothing was opened
            self._write_all()
        return found

    def _begin(self) -> Outcome:
        if self._part is None:
            return Outcome()
        try:
            self._version = self._open(self._manifest, self._part)
        except BaseException as error:  # noqa: BLE001  (raised by every rank)
            # It was tried at every master that there was.
            return msgspec.structs.replace(self._agreement.failed(error), again=False)
        return Outcome()

    def _take_all(self) -> Outcome:
        self._was_taken = True
        try:
            outcome = self._write_all()
        except BaseException as error:
            if not self._agreement.can_leave(error):
                raise
            outcome = self._agreement.failed(error)
        if self._version is not None and not outcome.code:
            outcome = self._agreement.tried(self._write_beside, self._version)
        return self._give_up(outcome.error()) if outcome.code else outcome

    def _give_up(self, error: LaminarError) -> Outcome:
        version, self._version = self._version, None
        return Outcome.of(error if version is None else self._loop.run(version.give_up(error)))

    def _write_all(self) -> Outcome:
        """Takes every tensor, and writes it; those after one that failed are let go."""
        outcome, version = Outcome(), self._version
        self._tied_bytes.clear()
        num, newest = 0, ""
        try:
            for item in _iterated(self._items() if callable(self._items) else self._items):
                num, newest = num + 1, item[0] if isinstance(item, tuple) and item else ""
                if version is not None and not outcome.code:
                    outcome = self._agreement.tried(self._written, version, item)
                del item  # the next one is made before this name is bound again
        except BaseException as error:
            of = f"{num} of {len(self._manifest.tensors)} tensors had come" + (f", the last {newest!r}" if num else "")
            error.add_note(f"{of}; the version is given up" if version is not None else of)
            raise
        return outcome

    def _written(self, version: StreamedVersion, item: object) -> Outcome:
        self._write(version, *_pair(item))
        return Outcome()

    def _write(self, version: StreamedVersion, given: str, tensor: Any) -> None:
        name = self._published[given] if given in self._published else self._renamed(given)
        if name is None:
            return
        owner = self._manifest.tied.get(name, name)
        if owner in self._metas and owner not in self._mine:
            return
        meta = self._metas.get(owner)
        if meta is None:
            raise InvalidRequest(f"tensor {name!r} is not in the manifest", hint="announce every tensor that comes")
        source = plain_source(name, tensor)
        if (source.dtype, tuple(source.shape)) != (meta.dtype, meta.shape):
            raise InvalidRequest(
                f"tensor {name!r} came as {source.dtype} {list(source.shape)}, announced as {meta.dtype} "
                f"{list(meta.shape)}",
                hint="make the tensor as announced, or announce what is made: manifest and iterator have to agree",
            )
        first, digest = True, xxhash.xxh3_128() if owner in self._owners else None
        for piece in self._bytes_of(version, replace(source, name=owner), tensor):
            if first and self._arguments().check_nan:
                refuse_nan(name, source.dtype, piece)
            first = False
            if digest is not None:
                digest.update(piece)
            if name == owner:
                version.write(name, piece)
        if digest is not None:
            self._compare(name, owner, digest.digest())

    def _compare(self, name: str, owner: str, digest: bytes) -> None:
        earlier, same = self._tied_bytes.setdefault(owner, (name, digest))
        if digest != same:
            raise InvalidRequest(
                f"{name!r} came with other bytes than {earlier!r}, to which the manifest ties it",
                hint="announce both: TensorMeta(name, dtype, shape) for each, or manifest_of() what is published",
            )

    def _renamed(self, given: str) -> str | None:
        names = self._arguments().names
        return given if names is None else rename(names, given)

    def _bytes_of(self, version: StreamedVersion, source: TensorSource, tensor: Any) -> Iterable[memoryview]:
        if getattr(getattr(tensor, "device", None), "type", "cpu") != "cpu":
            return self._staging.pieces(tensor, version.pieces(source.name, self._staging.buffer_bytes))
        return (source.read().cast("B"),)

    def _write_beside(self, version: StreamedVersion) -> Outcome:
        assert self._part is not None, "only a rank that writes has a version"
        for source in self._part.beside.tensors:
            version.write(source.name, source.read())
        for file in self._part.beside.files:
            version.write_file(file.name, file.read())
        return Outcome()

    def _commit(self) -> Outcome:
        """Every rank that writes commits its part, once all have written theirs."""
        version = self._version
        if version is None:
            return Outcome()
        try:
            ticket = self._loop.run(version.commit())
        except BaseException as error:  # noqa: BLE001  (raised by every rank)
            return self._give_up(self._agreement.failed(error).error())
        self._version = None
        try:
            self._wait(ticket)
        except BaseException as error:  # noqa: BLE001  (raised by every rank)
            # It is published, or lost: nothing is made again.
            return msgspec.structs.replace(self._agreement.failed(error), again=False, ticket=ticket.data)
        return Outcome(ticket=ticket.data)

    def _agree(self, outcome: Outcome) -> Outcome:
        return self._agreement.agreed(outcome)


def _iterated(items: Any) -> Iterable[object]:
    if isinstance(items, Mapping):
        return items.items()
    if not isinstance(items, Iterable):
        raise InvalidRequest(
            f"the tensors are of type {type(items).__name__}",
            hint="give pairs (name, tensor), or a function that returns an iterator of them",
        )
    return items


def _pair(item: object) -> tuple[str, Any]:
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
        return item
    raise InvalidRequest(f"the iterator gave an item of type {type(item).__name__}", hint="give pairs (name, tensor)")
