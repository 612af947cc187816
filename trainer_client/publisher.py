"""Publishing weights: `Publisher` for a synchronous training loop, `AsyncPublisher` for asyncio.

Invariants:
- `publish` returns at *copied*: from then on the tensors may change, and a `Ticket` reports the further stages;
- what can be refused is refused before the first byte: bad tensors here, sizes and other publishers by the relay;
- one publisher is one run. A trainer that resumes opens a new publisher and thereby a new run, whose versions
  continue above the newest.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from paramserver.client import (
    Doubt,
    Rank,
    RefusedLoad,
    RelayClient,
    RelayStatus,
    SealedVersion,
    Stage,
    StreamedVersion,
    TicketData,
    VersionOptions,
    join_stream,
    open_stream,
    publish,
    published,
    settled,
)
from protos.access.credentials import credentials_in
from protos.errors import InvalidRequest, VersionLost
from trainer_client.gateway_http import Presence, patiently
from trainer_client.loop import AsyncClient, SyncClient
from trainer_client.old_run import OnOldRun, check_on_old_run, meet
from trainer_client.run_state import RunState
from trainer_client.sources import NamedTensors, Stable, held_still, sources_of
from trainer_client.streaming.arguments import PublishArguments, PublisherOptions, PublishOptions
from trainer_client.streaming.beside import beside
from trainer_client.streaming.manifest import Manifest, TensorMeta
from trainer_client.streaming.names import renamed
from trainer_client.streaming.passes import Items, Part, Stream, Writers
from trainer_client.streaming.ranks import OneRank, Ranks, TorchRanks, check_ranks
from trainer_client.streaming.staging import StagingRing
from trainer_client.tickets import AsyncTicket, PendingTicket, Ticket, Wait, check_wait, wait_for

log = logging.getLogger(__name__)

FORMAT = {"format": "pt"}
"""Header metadata that `transformers` requires of a safetensors file: names and shapes are those of torch modules."""


def new_run_id() -> str:
    """An id that sorts by start time; its random part distinguishes two starts within one second."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


def _metadata(tied: Mapping[str, str]) -> dict[str, str]:
    """The metadata in the headers of a version's files."""
    return {**FORMAT, **{f"tied:{name}": owner for name, owner in tied.items()}}


@dataclass(slots=True)
class _Turn:
    """Of one call: other threads' calls have their own. Changed on the client's loop alone."""

    begun: bool = False


class AsyncPublisher(AsyncClient):
    """One run of one model, published to the relay at `relay` ("host:port" of its gRPC port).

    With `num_ranks` above 1 each rank publishes tensors of its own under the same `run` and steps, all at the same
    time: one version, which seals when every rank's files are in, and not at all if one fails.

    `on_old_run`: what to do at the first publish where the model has versions already, and no state was loaded.
    "continue" goes on above them, with a warning; "refuse" raises Conflict; "discard" is as "continue" here, and for a
    reader of experience.

    `credentials`: the directory of a trainer's, where relays ask for them; without it the one that LAMINAR_CREDENTIALS
    names.
    """

    def __init__(
        self,
        relay: str,
        model: str = "policy",
        *,
        run: str | None = None,
        wait: Wait = "copied",
        force_tcp: bool = False,
        timeout_s: float = 10.0,
        rank: int = 0,
        num_ranks: int = 1,
        on_old_run: OnOldRun = "continue",
        credentials: Path | str | None = None,
    ) -> None:
        check_wait(wait)
        check_on_old_run(on_old_run)
        self._on_old_run: OnOldRun = on_old_run
        self._rank = Rank(rank, num_ranks)
        if num_ranks > 1 and run is None:
            raise InvalidRequest(
                f"rank {rank} of {num_ranks} without run=",
                hint="pass the same on every rank, such as the job's id",
            )
        self.model = model
        self.run = run if run is not None else new_run_id()
        self._relay = RelayClient(relay, timeout_s=timeout_s, credentials=credentials_in(credentials))
        self.wait: Wait = wait
        self._force_tcp = force_tcp
        self._reached = False
        self._looking: asyncio.Task[None] | None = None  # whether anybody watches the model
        self._newest: AsyncTicket | None = None
        self.state = RunState(model, self.run)
        self._publish_lock = asyncio.Lock()  # versions of one run are numbered in the order of the calls

    async def close(self) -> None:
        try:
            if self._looking is not None:
                await self._looking
        finally:
            await self._relay.close()

    async def publish(
        self,
        tensors: NamedTensors,
        *,
        step: int,
        dtype: Any = None,
        **options: Unpack[PublishOptions],
    ) -> AsyncTicket:
        """Publishes one version; the master numbers it (`ticket.version`), `step` is a label.

        Engines load by name, into the shapes that they were started with. So a version whose names, shapes or kinds of
        dtype differ from the version before is refused unless `allow_change` is set; other float dtypes give a warning.
        A version whose tensors begin with NaN is refused unless `check_nan` is off. A NaN further in is found by the
        engines, which refuse to load it. `options` are those that the relay needs.

        `dtype`: what floating-point tensors become, each while it is written; default: they stay. Tied weights stay
        tied, as they do not where a state dict of converted tensors is passed.

        Labels (`trainer_client.VersionLabels`, such as `note="..."`) are kept with the version. `status().sealed`
        returns them, and so do `paramserver.client` and the command line. Where ranks that write files of their own
        differ in a label, the lowest rank that gives it stands; where rank 0 alone announces, its labels count.

        `names` maps the trainer's names to those that engines load by (`trainer_client.Names`). `base` is a checkpoint
        directory: its tensors that `tensors` lacks are carried over, such as frozen ones. `files` ride along as they
        are: config, tokenizer and generation defaults of a directory, or {name: content}.

        After a publish that raised before its outcome was known, one of the same step returns that version if it was
        committed after all. `once` returns the version of this step that this run, or the one that it resumed, has
        sealed already.

        Raises InvalidRequest for a tensor that cannot be published, TooLarge for a version larger than the pool,
        Conflict for another publisher of this model or for differing names, and Unavailable when the relay (for a
        minute at the first publish) or etcd does not answer.
        """
        arguments = PublishArguments.of(options, self.wait)
        sources = sources_of(renamed(tensors, arguments.names), check_nan=arguments.check_nan, dtype=dtype)
        others = await asyncio.to_thread(
            beside, {*(source.name for source in sources.tensors), *sources.tied}, arguments.base, arguments.files
        )
        async with self._publish_lock:
            ticket = await self.settled(step, arguments)
            if ticket is None:
                ticket = await publish(
                    self._relay,
                    self.model,
                    [*sources.tensors, *others.tensors],
                    files=others.files,
                    force_tcp=self._force_tcp,
                    **self._version(step, sources.tied, arguments, self._rank),
                )
            self._note(ticket)
        await self.wait_for(ticket, arguments)
        return ticket

    async def settled(self, step: int, arguments: PublishArguments, *, joins: bool = False) -> AsyncTicket | None:
        """The version that `step` has become already: its publish ended in doubt, or it is to be published once."""
        await self._reach(joins=joins)
        ticket = await settled(self._relay, self.model, step)
        if ticket is None and arguments.once:
            runs = {self.run, self.state.earlier_run} - {None}
            ticket = await published(self._relay, self.model, step, {run for run in runs if run is not None})
        return ticket

    async def wait_for(self, ticket: AsyncTicket, arguments: PublishArguments) -> None:
        """Waits as far as the publish does. Until it has, the next publish of the same step takes the same version."""
        if self._looking is None and self._rank.index == 0:
            # Nobody waits for it but `close`: a relay that is away has as long as others take to answer.
            self._looking = asyncio.create_task(self._tell_if_unwatched(), name="look-for-watchers")
        with self._relay.doubts.while_unknown(Doubt(ticket.data), VersionLost):
            await wait_for(ticket, arguments.wait, arguments.timeout_s)

    async def _tell_if_unwatched(self) -> None:
        """A relay that is watched for other models alone says so itself, in the ticket's warnings. One that nobody
        watches does not know what gateways watch elsewhere."""
        statuses = await self._relay.statuses()
        watched = {model for status in statuses for model in status.watched}
        if watched and self.model not in watched and not statuses[0].watched:
            log.warning(
                "nobody watches model %r at %d relays, where %s is watched: no engine is served with what is published",
                self.model,
                len(statuses),
                ", ".join(map(repr, sorted(watched))),
            )

    def state_dict(self) -> dict[str, Any]:
        """See `Publisher.state_dict`."""
        doubt = self._relay.doubts.newest(self.model)
        return self.state.state_dict(None if doubt is None else doubt.ticket)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Publisher.load_state_dict`."""
        in_doubt = self.state.load(state)
        if in_doubt is not None:
            self._relay.doubts.add(Doubt(in_doubt))

    def _version(self, step: int, tied: Mapping[str, str], arguments: PublishArguments, rank: Rank) -> VersionOptions:
        return {
            "run": self.run,
            "step": step,
            "metadata": _metadata(tied),
            "rank": rank,
            "refuse_change": not arguments.allow_change,
            **arguments.announce,
        }

    def _note(self, ticket: AsyncTicket) -> None:
        self._newest = ticket
        self.state.saw(ticket.version, ticket.step)

    async def _reach(self, *, joins: bool = False) -> None:
        """Waits for a relay that starts later; a server that is no relay fails at once. `joins`: the first
        rank's publisher meets the versions of an earlier run, not this one."""
        if not self._reached:
            status = await patiently(Presence(f"the relay at {self._relay.address}"), self._relay.status)
            if self._rank.index == 0 and self.state.earlier_run is None and not joins:
                self._meet_old_run(status)
            self._reached = True

    def _meet_old_run(self, status: RelayStatus) -> None:
        """Every relay knows the newest version, and its run if it holds it. No master is asked: a publish that is
        refused elects none. A version of the same run is of an earlier life: this one has published nothing yet."""
        found = next((model for model in status.models if model.model == self.model), None)
        if found is not None and found.newest_sealed:
            run = next((one.run for one in found.sealed if one.version == found.newest_sealed), "")
            meet(found.newest_sealed, run, self._on_old_run)

    # ---- what `Publisher.publish_stream` builds on; the tensors are taken on its caller's thread

    async def begin_turn(self, turn: _Turn) -> None:
        """No other publish of this run begins before `end_turn`."""
        await self._publish_lock.acquire()
        turn.begun = True

    async def end_turn(self, turn: _Turn, ticket: AsyncTicket | None) -> None:
        """To be called whatever came of `begin_turn`: its caller may have been interrupted as the turn began."""
        if turn.begun:
            if ticket is not None:
                self._note(ticket)
            self._publish_lock.release()

    async def open_stream(
        self, manifest: Manifest, part: Part, step: int, arguments: PublishArguments, *, shared: bool = False
    ) -> StreamedVersion:
        """Announces what this rank writes of a stream. Raises what `publish` raises.

        `shared`: other ranks join the version, and write chunks of the same files.
        """
        return await open_stream(
            self._relay,
            self.model,
            [*(meta.spec for meta in part.metas), *(source.spec for source in part.beside.tensors)],
            plain=[file.spec for file in part.beside.files],
            force_tcp=self._force_tcp,
            shared=shared,
            **self._version(step, manifest.tied, arguments, part.rank if part.rank.count > 1 else self._rank),
        )

    async def join_stream(self, invitation: bytes) -> StreamedVersion:
        """Opens the version that another rank announced, to write chunks of its files."""
        await self._reach(joins=True)
        return await join_stream(self._relay, invitation, force_tcp=self._force_tcp)

    def ticket(self, data: TicketData) -> AsyncTicket:
        return AsyncTicket.of(self._relay, data)

    async def status(self) -> PublisherStatus:
        """The newest version of this publisher, as the model's master reports it."""
        master = await self._relay.master_of(self.model)
        status = await master.status()
        found = next((model for model in status.models if model.model == self.model), None)
        ticket = self._newest
        return PublisherStatus(
            model=self.model,
            run=self.run,
            master=status.relay,
            version=ticket.version if ticket else None,
            stage=await ticket.stage() if ticket else None,
            newest_sealed=found.newest_sealed if found else None,
            refused_loads=found.refused_loads if found else (),
            sealed=found.sealed if found else (),
        )


@dataclass(frozen=True, slots=True)
class PublisherStatus:
    """`version` is the newest one of this publisher and `stage` its stage; both are None before the first publish.

    `refused_loads`: engines that could not load one of the newest versions, with their errors. `sealed`: the versions
    that the master holds, ascending, with their labels.
    """

    model: str
    run: str
    master: str
    version: int | None
    stage: Stage | None
    newest_sealed: int | None
    refused_loads: tuple[RefusedLoad, ...]
    sealed: tuple[SealedVersion, ...]


class Publisher(SyncClient[AsyncPublisher]):
    """`AsyncPublisher` for a synchronous training loop; use it as a context manager, or call `close`."""

    def __init__(self, relay: str, model: str = "policy", **options: Unpack[PublisherOptions]) -> None:
        super().__init__(AsyncPublisher(relay, model, **options), "laminar-publisher")
        self._staging = StagingRing()
        self._pending: PendingTicket | None = None
        self.model, self.run = self._client.model, self._client.run

    def publish(
        self, tensors: NamedTensors, *, step: int, dtype: Any = None, **options: Unpack[PublishOptions]
    ) -> Ticket:
        """See `AsyncPublisher.publish`."""
        self._settle()
        return Ticket(self._loop.run(self._client.publish(tensors, step=step, dtype=dtype, **options)), self._loop)

    def publish_async(
        self,
        tensors: NamedTensors,
        *,
        step: int,
        stable: Stable = False,
        dtype: Any = None,
        **options: Unpack[PublishOptions],
    ) -> PendingTicket:
        """Publishes in the background; returns once all tensors may change that are not `stable`.

        `stable` names the tensors that stay as they are until `result()` of the returned ticket has come back: True for
        all, a collection of names, or a function of a name. They are read while the next step runs. The others are
        copied first, on their own device, which takes memory for them.

        One publish at a time: the next one, of any kind, waits for this one, and raises its error unless `result()`
        has. Arguments and errors are those of `publish`.
        """
        self._settle()
        held = held_still(tensors, stable)
        work = self._client.publish(held, step=step, dtype=dtype, **options)
        self._pending = PendingTicket(self._loop.start(work), self._loop)
        return self._pending

    def _settle(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.settle()

    def close(self) -> None:
        """Waits for a publish in the background, and raises its error if nobody has got it."""
        try:
            if not self._loop.closed:
                self._settle()
        finally:
            super().close()

    def state_dict(self) -> dict[str, Any]:
        """For the trainer's checkpoint: model, run, newest version, each version's step, and a version in doubt."""
        return self._client.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken. The run is a new one, and its versions continue above the newest."""
        self._client.load_state_dict(state)

    @property
    def version(self) -> int:
        """The newest version that this trainer published, in this run or the one it resumed; 0: none."""
        return self._client.state.version

    def step_of(self, version: int) -> int | None:
        """The step of a version that this trainer published; None for any other, and for one long ago."""
        return self._client.state.steps.get(version)

    def publish_stream(
        self,
        manifest: Manifest | Iterable[TensorMeta],
        tensors: Items,
        *,
        step: int,
        ranks: Ranks | None = None,
        writers: Writers = "first",
        **options: Unpack[PublishOptions],
    ) -> Ticket:
        """Publishes one version from tensors that are made one by one; returns at *copied*, or at `wait`.

        `manifest` gives names, dtypes and shapes: they are announced before the first tensor is made. `tensors` are
        pairs (name, tensor) in any order, or a function that gives such an iterator. Each is taken on this thread,
        written and let go, so memory holds one tensor at a time.

        With a function the publish begins again by itself when the master relay dies. With an iterator, which cannot
        be taken twice, the rest of it is drained and the error is raised.

        `ranks` (`TorchRanks()`): taking a tensor is a collective, so every rank calls this at the same time with its
        own iterator. All return a ticket of the same version, or raise the same error. Rank 0 writes all files; with
        `writers="all"` each rank writes files of its own, and all pass the same `run` to their publishers.

        `names` maps the names of manifest and iterator: a function, or pairs for `re.sub`. `base` and `files`, which
        rank 0 alone reads, come after the last tensor. Other arguments and errors
        are those of `publish`; InvalidRequest also for a tensor that differs from the manifest, or does not come.
        """
        if ranks is not None:
            check_ranks(ranks)
        arguments = self._arguments(options)
        client, loop, turn = self._client, self._loop, _Turn()
        stream = Stream(
            manifest,
            tensors,
            arguments,
            run=self.run,
            ranks=OneRank() if ranks is None else ranks,
            writers=writers,
            loop=loop,
            open_version=lambda announced, part: loop.run(client.open_stream(announced, part, step, arguments())),
            begin_turn=lambda: self._begin(turn),
            settle=lambda: loop.run(client.settled(step, arguments(), joins=ranks is not None and ranks.index > 0)),
            wait=lambda ticket: loop.run(client.wait_for(ticket, arguments())),
            staging=self._staging,
        )
        return self._in_turn(turn, stream.publish)

    def publish_shards(
        self,
        tensors: NamedTensors,
        *,
        step: int,
        ranks: TorchRanks,
        dtype: Any = None,
        **options: Unpack[PublishOptions],
    ) -> Ticket:
        """Publishes a sharded model without gathering it: every rank writes what it holds. Returns like `publish`.

        All ranks call this at the same time with their own `model.state_dict()`. Of a DTensor that is sharded by its
        rows (`Shard(0)`: FSDP2, HSDP), each rank gives its own rows; plain and replicated tensors are given by one rank
        that has them. Any other placement (`Shard(1)`, `Partial`, FSDP2 over tensor parallelism on the same dimension)
        is gathered by `full_tensor()`, one tensor at a time. `dtype`: what floating-point tensors become, shard by
        shard; default: they stay.

        The version is byte for byte the one that `publish_stream` makes of the gathered tensors. It begins again by
        itself when the master relay dies. All ranks return a ticket of the same version, or raise the same error.
        `base` and `files` are read by rank 0 alone. Raises what `publish` raises; InvalidRequest also when the ranks
        hold different tensors, or rows of one are on no rank.
        """
        from trainer_client.streaming.sharded import ShardedPublish  # it imports torch

        check_ranks(ranks, "swap")
        arguments = self._arguments(options)
        client, loop, turn = self._client, self._loop, _Turn()
        sharded = ShardedPublish(
            tensors,
            arguments,
            ranks=ranks,
            dtype=dtype,
            loop=loop,
            open_version=lambda manifest, part: loop.run(
                client.open_stream(manifest, part, step, arguments(), shared=True)
            ),
            join_version=lambda invitation: loop.run(client.join_stream(invitation)),
            begin_turn=lambda: self._begin(turn),
            settle=lambda: loop.run(client.settled(step, arguments())),
            wait=lambda ticket: loop.run(client.wait_for(ticket, arguments())),
            staging=self._staging,
        )
        return self._in_turn(turn, sharded.publish)

    def _arguments(self, options: PublishOptions) -> Callable[[], PublishArguments]:
        """Checked when they are asked for: a mistake on one rank is every rank's error, where the ranks agree."""
        return functools.cache(lambda: PublishArguments.of(options, self._client.wait))

    def _in_turn(self, turn: _Turn, publish: Callable[[], TicketData]) -> Ticket:
        """The ticket of what `publish` makes on this thread, while no other publish of this run goes on. It calls
        `_begin` itself: where ranks publish, all raise what a publish in the background raised on one."""
        ticket = None
        try:
            ticket = self._client.ticket(publish())
        finally:
            self._loop.run(self._client.end_turn(turn, ticket))
        return Ticket(ticket, self._loop)

    def _begin(self, turn: _Turn) -> None:
        self._settle()  # it may not have begun its own turn yet
        self._loop.run(self._client.begin_turn(turn))

    def status(self) -> PublisherStatus:
        """See `AsyncPublisher.status`."""
        return self._loop.run(self._client.status())
