"""The relays beside engines: which version each holds, as long as some engine needs it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.core.types import NO_VERSION, Version
from paramserver.client import RelayClient
from protos.errors import LaminarError, UnknownModel

log = logging.getLogger(__name__)

RETRY_S = 1.0


@dataclass(slots=True)
class _Followed:
    client: RelayClient
    watcher: asyncio.Task[None]
    newest: Version | None = None  # None: it has not answered yet
    held: set[Version] = field(default_factory=set)


class Relays:
    """`heard` is told when a relay first answers, and whenever a version came to it (0: none did, or one went)."""

    def __init__(self, model: str, tasks: asyncio.TaskGroup, heard: Callable[[str, Version], None]) -> None:
        self._model, self._tasks, self._heard = model, tasks, heard
        self._followed: dict[str, _Followed] = {}

    def follow(self, address: str) -> None:
        if address not in self._followed:
            client = RelayClient(address)
            watcher = self._tasks.create_task(self._watch(address, client), name=f"watch-relay-{address}")
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

    async def _watch(self, address: str, client: RelayClient) -> None:
        held = await self._first(address, client)
        self._followed[address].held |= held
        self._note(address, max(held, default=NO_VERSION))
        async for event in client.watch(self._model):
            version = Version(event.version.version)
            if event.kind == "available":
                self._followed[address].held.add(version)
                self._note(address, version)
            elif event.kind in ("retired", "lost"):
                self.gone(address, version)

    async def _first(self, address: str, client: RelayClient) -> set[Version]:
        """What the relay holds now; asks until it answers, since nothing can be decided before."""
        said = ""
        while True:
            try:
                return {Version(one.version) for one in await client.versions(self._model)}
            except UnknownModel:
                return set()  # nothing was published yet
            except LaminarError as e:
                if str(e) != said:
                    log.warning("relay %s does not answer yet, and is asked again until it does: %s", address, e)
                    said = str(e)
                await asyncio.sleep(RETRY_S)

    def _note(self, address: str, version: Version) -> None:
        followed = self._followed[address]
        followed.newest = max(version, followed.newest or NO_VERSION)
        self._heard(address, version)
