"""Publishing weights from a trainer: `Publisher` for a plain training loop, `AsyncPublisher` inside asyncio.

Invariants:
- `publish` returns at *copied*: from then on the tensors may change, and a `Ticket` tells the further stages;
- what can be refused is refused before the first byte: bad tensors here, sizes and rivals by the relay;
- one publisher is one run. A resumed trainer opens a new publisher, thereby a new run, and its versions
  continue above the newest.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from paramserver import client
from paramserver.client import Rank, RefusedLoad, RelayClient, Stage, publish
from protos.errors import InvalidRequest
from trainer_client.loop import LoopThread
from trainer_client.sources import NamedTensors, sources_of

AsyncTicket = client.Ticket
"""What `AsyncPublisher.publish` returns; its waits are coroutines."""

Wait = Literal["copied", "sealed", "all"] | int
"""How far `publish` waits: *copied* (default), *sealed*, held by that many relays, or by all of the chain."""

FORMAT = {"format": "pt"}
"""Header metadata that `transformers` asks of a safetensors file: names and shapes are as torch modules have them."""

WAIT_TIMEOUT_S = 120.0
"""Default deadline of every wait for a later stage."""


def new_run_id() -> str:
    """Sorts by start time; the random part keeps two starts in one second apart."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


async def wait_for(ticket: AsyncTicket, wait: Wait, timeout_s: float) -> None:
    """Waits for a stage of `ticket`. Unavailable at the deadline, InDoubt or VersionLost when that is the outcome."""
    if wait == "sealed":
        await ticket.wait_sealed(timeout_s)
    elif wait == "all":
        await ticket.wait_all(timeout_s)
    elif isinstance(wait, int):
        await ticket.wait_copies(wait, timeout_s)


def _check_wait(wait: Wait) -> None:
    counts = isinstance(wait, int) and not isinstance(wait, bool) and wait >= 1
    if not counts and wait not in ("copied", "sealed", "all"):
        raise InvalidRequest(
            f"wait={wait!r}", hint='pass "copied", "sealed", "all", or a number of relays (2 is right for production)'
        )


class AsyncPublisher:
    """One run of one model, published to the relay at `relay` ("host:port" of its gRPC port).

    With `num_ranks` above 1 each rank publishes tensors of its own under the same `run` and steps, all at the same
    time: one version, which seals when every rank's files are in, and not at all if one fails.
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
    ) -> None:
        _check_wait(wait)
        self._rank = Rank(rank, num_ranks)
        if num_ranks > 1 and run is None:
            raise InvalidRequest(
                f"rank {rank} of {num_ranks} without run=",
                hint="pass the same on every rank, such as the job's id",
            )
        self.model = model
        self.run = run if run is not None else new_run_id()
        self._relay = RelayClient(relay, timeout_s=timeout_s)
        self._wait: Wait = wait
        self._force_tcp = force_tcp
        self._reached = False
        self._newest: AsyncTicket | None = None
        self._turn = asyncio.Lock()  # versions of one run are numbered in the order in which they were handed over

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._relay.close()

    async def publish(
        self,
        tensors: NamedTensors,
        *,
        step: int,
        wait: Wait | None = None,
        timeout_s: float = WAIT_TIMEOUT_S,
        allow_change: bool = False,
        check_nan: bool = True,
    ) -> AsyncTicket:
        """Publishes one version; the master numbers it (`ticket.version`), `step` is a label.

        Engines load by name, into shapes that they were started with: a version with other names, shapes or kinds of
        dtype than the one before is refused unless `allow_change`; other float dtypes are warned about. So is one whose
        tensors begin with NaN, unless `check_nan` is off: a NaN further in is found by the engines, which refuse it.

        InvalidRequest names a tensor that cannot be published; TooLarge a version larger than the pool; Conflict
        another publisher of this model, or the first differing names; Unavailable a relay, or etcd, that does not
        answer.
        """
        target = self._wait if wait is None else wait
        _check_wait(target)
        sources = sources_of(tensors, check_nan=check_nan)
        tied = {f"tied:{name}": owner for name, owner in sources.tied.items()}
        async with self._turn:
            if not self._reached:  # a wrong address is told at once; a relay lost later is waited for
                await self._relay.status()
                self._reached = True
            ticket = await publish(
                self._relay,
                self.model,
                sources.tensors,
                step=step,
                run=self.run,
                metadata={**FORMAT, **tied},
                force_tcp=self._force_tcp,
                rank=self._rank,
                refuse_change=not allow_change,
            )
            self._newest = ticket
        await wait_for(ticket, target, timeout_s)
        return ticket

    async def status(self) -> PublisherStatus:
        """What became of the versions published here, by the word of the model's master."""
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
        )


@dataclass(frozen=True, slots=True)
class PublisherStatus:
    """`version` is the newest that this publisher handed over, `stage` how far it is (None: it published nothing yet).

    `refused_loads`: engines that could not load one of the newest versions, and why.
    """

    model: str
    run: str
    master: str
    version: int | None
    stage: Stage | None
    newest_sealed: int | None
    refused_loads: tuple[RefusedLoad, ...]


class Ticket:
    """What is known of one published version, for synchronous callers."""

    def __init__(self, ticket: AsyncTicket, loop: LoopThread) -> None:
        self._ticket = ticket
        self._loop = loop
        self.model, self.version = ticket.model, ticket.version
        self.run, self.step = ticket.run, ticket.step
        self.warnings = ticket.warnings

    def wait_sealed(self, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        """Returns once the version is recorded in etcd: only now may it be called published."""
        self._loop.run(self._ticket.wait_sealed(timeout_s))

    def wait_copies(self, k: int, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        """Returns once `k` relays hold the version verified. A relay that died counts until its lease ends
        (5 s by default): for that long one of the `k` may be gone."""
        self._loop.run(self._ticket.wait_copies(k, timeout_s))

    def wait_all(self, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        """Returns once every relay of the chain holds the version verified."""
        self._loop.run(self._ticket.wait_all(timeout_s))

    def stage(self) -> Stage:
        return self._loop.run(self._ticket.stage())

    def holders(self) -> tuple[str, ...]:
        """Names of the relays that hold the version verified."""
        return self._loop.run(self._ticket.holders())

    def refused_loads(self) -> tuple[RefusedLoad, ...]:
        """Engines that could not load this version, and why, as gateways reported it."""
        return self._loop.run(self._ticket.refused_loads())

    def __repr__(self) -> str:
        return f"Ticket({self.model} version {self.version}, step {self.step}, run {self.run})"


class Publisher:
    """`AsyncPublisher` for a plain training loop; use it as a context manager, or call `close`."""

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
    ) -> None:
        self._twin = AsyncPublisher(
            relay,
            model,
            run=run,
            wait=wait,
            force_tcp=force_tcp,
            timeout_s=timeout_s,
            rank=rank,
            num_ranks=num_ranks,
        )
        self._loop = LoopThread("laminar-publisher")
        self.model, self.run = self._twin.model, self._twin.run

    def publish(
        self,
        tensors: NamedTensors,
        *,
        step: int,
        wait: Wait | None = None,
        timeout_s: float = WAIT_TIMEOUT_S,
        allow_change: bool = False,
        check_nan: bool = True,
    ) -> Ticket:
        """As `AsyncPublisher.publish`."""
        work = self._twin.publish(
            tensors, step=step, wait=wait, timeout_s=timeout_s, allow_change=allow_change, check_nan=check_nan
        )
        return Ticket(self._loop.run(work), self._loop)

    def status(self) -> PublisherStatus:
        """As `AsyncPublisher.status`."""
        return self._loop.run(self._twin.status())

    def close(self) -> None:
        if not self._loop.closed:
            try:
                self._loop.run(self._twin.close())
            finally:
                self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
