"""Tickets of published versions, and how far a publish waits.

Invariants: an error of a publish in the background is raised once, by `result` or by the publisher's next call; a wait
that ends without an answer raises InDoubt and never reports success.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Literal

from paramserver import client
from paramserver.client import RefusedLoad, Stage
from protos.errors import InvalidRequest, Unavailable
from trainer_client.loop import LoopThread

AsyncTicket = client.Ticket
"""What `AsyncPublisher.publish` returns; its waits are coroutines."""

Wait = Literal["copied", "sealed", "all"] | int
"""How far `publish` waits: *copied* (default), *sealed*, held by that many relays, or by all of the chain."""

WAIT_TIMEOUT_S = 120.0
"""Default deadline of every wait for a later stage."""


async def wait_for(ticket: AsyncTicket, wait: Wait, timeout_s: float) -> None:
    """Waits for a stage of `ticket`. Raises Unavailable at the deadline, and InDoubt or VersionLost as outcomes."""
    if wait == "sealed":
        await ticket.wait_sealed(timeout_s)
    elif wait == "all":
        await ticket.wait_all(timeout_s)
    elif isinstance(wait, int):
        await ticket.wait_copies(wait, timeout_s)


def check_wait(wait: Wait) -> None:
    counts = isinstance(wait, int) and not isinstance(wait, bool) and wait >= 1
    if not counts and wait not in ("copied", "sealed", "all"):
        raise InvalidRequest(
            f"wait={wait!r}", hint='pass "copied", "sealed", "all", or a number of relays (2 is right for production)'
        )


class Ticket:
    """A handle of one published version, for synchronous callers."""

    def __init__(self, ticket: AsyncTicket, loop: LoopThread) -> None:
        self._ticket = ticket
        self._loop = loop
        self.model, self.version = ticket.model, ticket.version
        self.run, self.step = ticket.run, ticket.step
        self.warnings = ticket.warnings

    def wait_sealed(self, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        """Returns once the version is sealed: recorded in etcd. Only now is it published."""
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
        """Engines that could not load this version, with their errors, as gateways reported them."""
        return self._loop.run(self._ticket.refused_loads())

    def __repr__(self) -> str:
        return f"Ticket({self.model} version {self.version}, step {self.step}, run {self.run})"


class PendingTicket:
    """A publish in the background: `result` waits until the tensors may change again."""

    def __init__(self, work: Future[AsyncTicket], loop: LoopThread) -> None:
        self._work, self._loop = work, loop
        self._raised = False

    def done(self) -> bool:
        """Whether `result` returns or raises at once."""
        return self._work.done()

    def result(self, timeout_s: float | None = None) -> Ticket:
        """The ticket, once the version is copied, or as far as the publish waits. Raises what `publish` raises.

        Unavailable after `timeout_s`; the publish goes on then.
        """
        try:
            return Ticket(self._work.result(timeout_s), self._loop)
        except TimeoutError as error:
            if self._work.done():
                raise
            raise Unavailable(f"the publish goes on after {timeout_s:g} s", hint="call result() again") from error
        finally:
            self._raised = self._work.done()

    def settle(self) -> None:
        """Waits for the end, and raises an error that nobody has got yet."""
        if not self._raised:
            self.result()
