"""What is known of one published version, asked of a relay.

Invariants: `lost` is final; anything else may still become better; a wait that ends without an answer says InDoubt,
never success.
"""

from __future__ import annotations

import asyncio
from typing import cast

from paramserver.core.stage import Stage
from paramserver.relay_client import RelayClient
from protos.errors import InDoubt, LaminarError, NotFound, Unavailable, VersionLost
from protos.laminar.v1 import relay_pb2 as pb

ASK_WAIT_S = 5.0  # one question waits this long at the relay, so that a dead relay is noticed


class Ticket:
    """What is known of one published version. `relay` is asked; its master wrote the version."""

    def __init__(self, relay: RelayClient, model: str, version: int, run: str, step: int, epoch: pb.Epoch) -> None:
        self._relay = relay
        self._epoch = epoch
        self.model = model
        self.version = version
        self.run = run
        self.step = step

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
        return cast(Stage, (await self._ask("", 0, 0.0)).stage)

    async def holders(self) -> tuple[str, ...]:
        """Names of the relays that hold this version verified."""
        return tuple((await self._ask("", 0, 0.0)).holders)

    async def _ask(self, want: str, copies: int, wait_s: float) -> pb.StageReply:
        request = pb.StageRequest(
            model=self.model,
            version=self.version,
            run=self.run,
            want=want,
            copies=copies,
            wait_s=wait_s,
            epoch=self._epoch,
        )
        return await self._relay.call(self._relay.stub.Stage(request, timeout=wait_s + self._relay.timeout_s))

    async def _wait(self, want: str, copies: int, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        last: LaminarError | None = None
        stage = "unknown"
        while (left := deadline - loop.time()) > 0:
            try:
                reply = await self._ask(want, copies, min(left, ASK_WAIT_S))
            except (Unavailable, NotFound) as error:  # its master may be gone: whoever is next will know
                last = error
                await asyncio.sleep(min(left, 0.2))
                continue
            stage = reply.stage
            if stage == "lost":
                raise VersionLost(
                    f"version {self.version} of {self.model} is lost: {reply.reason}", hint="publish again"
                )
            if reply.reached:
                return
        wish = f"{want} {copies}" if want == "copies" else want
        raise InDoubt(
            f"version {self.version} of {self.model} had not reached {wish!r} after {timeout_s} s; it is {stage}",
            hint=f"ask the ticket again, or `paramserver status` ({last or 'the relay answers'})",
        )
