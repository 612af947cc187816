"""The relays beside engines: which version each holds, as long as some engine needs it.

Invariants:
- a relay is one fault apart from the others: what it says, or fails to say, costs it alone;
- a registry that replaced the one that versions came from is refused until that one goes on in it
  (`paramserver adopt`): its numbers begin again, and mean other weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.core.types import NO_VERSION, Version
from gateway.engines.base import VERSION_DIGITS_MAX
from gateway.runtime.standing import StandingTasks
from paramserver.client import Lineage, Origin, RelayClient
from protos.errors import LaminarError, UnknownModel

log = logging.getLogger(__name__)

RETRY_S = 1.0
VERSION_MAX = int("9" * VERSION_DIGITS_MAX)


@dataclass(slots=True)
class _Followed:
    client: RelayClient
    watcher: asyncio.Task[None]
    newest: Version | None = None  # None: it has not answered yet
    held: set[Version] = field(default_factory=set)
    refused: str = ""  # why nothing of its registry is believed


class Relays:
    """`heard` is told when a relay first answers, and whenever a version came to it (0: none did, or one went)."""

    def __init__(
        self,
        model: str,
        tasks: StandingTasks,
        heard: Callable[[str, Version], None],
        *,
        lineage: Lineage | None = None,
        saw: Callable[[], None] = lambda: None,
    ) -> None:
        """`lineage`: of the versions seen before; `saw` is told when it has changed."""
        self._model, self._tasks, self._heard = model, tasks, heard
        self._lineage, self._saw = lineage or Lineage(), saw
        self._followed: dict[str, _Followed] = {}

    def follow(self, address: str) -> None:
        if address not in self._followed:
            client = RelayClient(address)
            watcher = self._tasks.keep(lambda: self._watch(address, client), f"watch-relay-{address}")
            self._followed[address] = _Followed(client, watcher)

    async def let_go(self, address: str) -> None:
        followed = self._followed.pop(address)
        followed.watcher.cancel()
        await asyncio.wait([followed.watcher])
        await followed.client.close()

    def client(self, address: str) -> RelayClient:
        return self._followed[address].client

    def newest(self, address: str) -> Version | None:
        """What it holds, 0 for nothing; None before it has told: until then nobody knows which version is wanted."""
        return self._followed[address].newest

    def held(self, address: str) -> frozenset[Version] | None:
        """Every version that may be acquired there, as far as it has told; None before it has."""
        followed = self._followed[address]
        return None if followed.newest is None else frozenset(followed.held)

    def holders(self, version: Version) -> list[str]:
        return sorted(address for address, followed in self._followed.items() if version in followed.held)

    def gone(self, address: str, version: Version) -> None:
        """The relay holds it no more; its watch may have missed that."""
        followed = self._followed.get(address)
        if followed is not None:
            followed.held.discard(version)
            self._heard(address, NO_VERSION)

    def addresses(self) -> list[str]:
        return sorted(self._followed)

    def refused(self) -> dict[str, str]:
        """By address, of relays whose registry replaced the one that versions came from: why nothing of them is
        believed, and what an operator can do."""
        return {address: followed.refused for address, followed in sorted(self._followed.items()) if followed.refused}

    def unreachable(self) -> list[str]:
        """Relays that no connection leads to now: nothing new comes from them."""
        return sorted(address for address, followed in self._followed.items() if not followed.client.connected)

    async def _watch(self, address: str, client: RelayClient) -> None:
        """For ever: what ends the watch is an error, after which it begins again with what the relay holds then."""
        while True:
            held = await self._first(address, client)
            if self._refuses(address, client.origin):
                self._followed[address].held = set()
                self._note(address, NO_VERSION)
                await asyncio.sleep(RETRY_S)
                continue
            self._followed[address].held = held
            self._believe(address, client.origin, max(held, default=NO_VERSION))
            await self._follow(address, client)

    async def _follow(self, address: str, client: RelayClient) -> None:
        """Returns when the relay belongs to a registry that is refused."""
        async for event in client.watch(self._model):
            version = Version(event.version.version)
            if self._lineage.refuses(event.origin):
                return
            if not can_be(version):
                log.warning("relay %s says version %d, which no master gives: left out", address, version)
            elif event.kind == "available":
                self._followed[address].held.add(version)
                self._believe(address, event.origin, version)
            elif event.kind in ("retired", "lost"):
                self.gone(address, version)

    def _refuses(self, address: str, origin: Origin) -> str:
        """Why nothing of the relay is believed; logged when that begins and when it is over."""
        followed, why = self._followed[address], self._lineage.refuses(origin)
        if why:
            why = f"{why} ({self._lineage.remedy(self._model, address)})"
        if why and why != followed.refused:
            log.error("versions of relay %s are refused: %s", address, why)
        elif followed.refused and not why:
            log.info("versions of relay %s are taken again", address)
        followed.refused = why
        return why

    def _believe(self, address: str, origin: Origin, version: Version) -> None:
        if version != NO_VERSION and self._lineage.saw(origin, version):
            self._saw()
        self._note(address, version)

    async def _first(self, address: str, client: RelayClient) -> set[Version]:
        """What the relay holds now; asks until it answers, since nothing can be decided before."""
        said = ""
        while True:
            try:
                told = await client.versions(self._model)
                return {Version(one.version) for one in told if can_be(one.version)}
            except UnknownModel:
                return set()  # nothing was published yet
            except LaminarError as e:
                if str(e) != said:
                    log.warning("relay %s does not respond yet; retrying until it does: %s", address, e)
                    said = str(e)
                await asyncio.sleep(RETRY_S)

    def _note(self, address: str, version: Version) -> None:
        followed = self._followed[address]
        followed.newest = max(version, followed.newest or NO_VERSION)
        self._heard(address, version)


def can_be(version: int) -> bool:
    """Whether a master may have given it."""
    return 0 < version <= VERSION_MAX
