"""The relays beside engines: which version each holds, as long as some engine needs it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

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


class Relays:
    """`heard` is told of each relay's newest version: when it first answers, and whenever another one is there."""

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

    def addresses(self) -> list[str]:
        return sorted(self._followed)

    async def _watch(self, address: str, client: RelayClient) -> None:
        self._note(address, await self._first(address, client))
        async for event in client.watch(self._model):
            if event.kind == "available":
                self._note(address, Version(event.version.version))

    async def _first(self, address: str, client: RelayClient) -> Version:
        """What the relay holds now; asks until it answers, since nothing can be decided before."""
        while True:
            try:
                newest = await client.newest(self._model)
                return Version(newest.version) if newest is not None else NO_VERSION
            except UnknownModel:
                return NO_VERSION  # nothing was published yet
            except LaminarError as e:
                log.warning("relay %s does not answer yet: %s", address, e)
                await asyncio.sleep(RETRY_S)

    def _note(self, address: str, version: Version) -> None:
        followed = self._followed[address]
        followed.newest = max(version, followed.newest or NO_VERSION)
        self._heard(address, version)
