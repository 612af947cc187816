"""The ticket of one published version: its stage, queried at a relay.

Invariants: `lost` is final; any other stage may still become better; a wait that ends without an answer raises InDoubt
and never reports success.
"""

from __future__ import annotations

import asyncio
import logging
from typing import cast

from paramserver.client.doubts import TicketData
from paramserver.client.relay import RelayClient, refused_loads
from paramserver.core.refused_loads import RefusedLoad
from paramserver.core.ticket_status import Stage
from protos.errors import InDoubt, LaminarError, NotFound, OutOfCapacity, Unavailable, VersionLost
from protos.laminar.v1 import relay_pb2 as pb

log = logging.getLogger(__name__)

QUERY_WAIT_S = 5.0  # one query waits this long at the relay, so that a dead relay is noticed


class Ticket:
    """One published version, as `relay` reports it; the model's master wrote the version."""

    def __init__(
        self,
        relay: RelayClient,
        model: str,
        version: int,
        run: str,
        step: int,
        epoch: pb.Epoch | None,
        warnings: tuple[str, ...] = (),
    ) -> None:
        """`epoch`: in which the number was given; None: unknown."""
        self._relay = relay
        self._epoch = epoch
        self.model = model
        self.version = version
        self.run = run
        self.step = step
        self.warnings = warnings
        """Its master's warnings: how it differs from the version before, and which engines refused that."""

    @property
    def data(self) -> TicketData:
        epoch = self._epoch or pb.Epoch()
        return TicketData(
            self.model, self.version, self.run, self.step, epoch.store_id, epoch.revision, tuple(self.warnings)
        )

    @classmethod
    def of(cls, relay: RelayClient, data: TicketData) -> Ticket:
        """The ticket of a version that another process published."""
        epoch = pb.Epoch(store_id=data.store_id, revision=data.revision) if data.store_id else None
        return cls(relay, data.model, data.version, data.run, data.step, epoch, data.warnings)

    def __repr__(self) -> str:
        return f"Ticket({self.model} version {self.version}, run {self.run}, step {self.step})"

    async def wait_sealed(self, timeout_s: float) -> None:
        """Returns once sealed. VersionLost when it never will be; InDoubt when that is not known in time."""
        await self._wait("sealed", 0, timeout_s)

    async def wait_copies(self, k: int, timeout_s: float) -> None:
        """Returns once `k` relays hold it verified. A dead relay counts as a holder until its lease ends."""
        await self._wait("copies", k, timeout_s)

    async def wait_all(self, timeout_s: float) -> None:
        """Returns once every living relay of its chain holds it verified."""
        await self._wait("all", 0, timeout_s)

    async def stage(self) -> Stage:
        """copied, sealed (one holder), k_relays (more than one), all (of its chain), lost."""
        return cast(Stage, (await self._query("", 0, 0.0)).stage)

    async def stage_at(self, relay: RelayClient) -> Stage:
        """The stage as `relay` knows it. NotFound when it does not know the version yet."""
        return cast(Stage, (await self._query("", 0, 0.0, relay)).stage)

    async def holders(self) -> tuple[str, ...]:
        """Names of the relays that hold this version verified."""
        return tuple((await self._query("", 0, 0.0)).holders)

    async def refused_loads(self) -> tuple[RefusedLoad, ...]:
        """Engines that could not load this version, and why, as far as gateways have reported it to its master."""
        try:
            reply = await self._query("", 0, 0.0, await self._relay.master_of(self.model))
        except (Unavailable, NotFound) as error:
            log.info(
                "no master reports on version %d of %s; querying the relay here: %s", self.version, self.model, error
            )
            reply = await self._query("", 0, 0.0)
        return refused_loads(reply.refused_loads)

    async def _query(self, want: str, copies: int, wait_s: float, relay: RelayClient | None = None) -> pb.StageReply:
        relay = self._relay if relay is None else relay
        request = pb.StageRequest(
            model=self.model,
            version=self.version,
            run=self.run,
            want=want,
            copies=copies,
            wait_s=wait_s,
            epoch=self._epoch,
        )
        reply = await relay.call(relay.stub.Stage(request, timeout=wait_s + relay.timeout_s))
        if reply.stage not in ("copied", "lost") and (lineage := self._relay.lineages.get(self.model)) is not None:
            lineage.sealed = max(lineage.sealed, self.version)
        return reply

    async def _wait(self, want: str, copies: int, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        last: LaminarError | None = None
        reply = pb.StageReply(stage="unknown")
        while (left := deadline - loop.time()) > 0:
            try:
                reply = await self._query(want, copies, min(left, QUERY_WAIT_S))
            except (Unavailable, NotFound, OutOfCapacity) as error:  # its master may be gone: the next one settles it
                last = error
                await asyncio.sleep(min(left, getattr(error, "retry_after_s", 0.2)))
                continue
            if reply.stage == "lost":
                raise VersionLost(
                    f"version {self.version} of {self.model} is lost: {reply.reason}", hint="publish again"
                )
            if reply.reached:
                return
        raise self._late(reply, want, copies, timeout_s, last)

    def _late(
        self, reply: pb.StageReply, want: str, copies: int, timeout_s: float, last: LaminarError | None
    ) -> InDoubt:
        """The error at the deadline, with the stage reached. A sealed version is published, whatever it waits for."""
        version = f"version {self.version} of {self.model}"
        if want == "sealed" or reply.stage in ("copied", "unknown"):
            return InDoubt(
                f"{version} had not reached {want!r} after {timeout_s:g} s; it is {reply.stage}",
                hint=f"query the ticket again, or `paramserver status` ({last or 'the relay answers'})",
            )
        wish = f"{copies} relays" if want == "copies" else "every relay of its chain"
        return InDoubt(
            f"{version} is sealed, but had not reached {wish} after {timeout_s:g} s: it is on "
            f"{', '.join(reply.holders)}",
            hint="it needs no second publish; start more relays or see `paramserver status` for the one that lags",
        )
