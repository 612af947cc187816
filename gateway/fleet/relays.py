"""The relays beside engines: which versions each holds, as long as some engine needs it.

Invariants:
- relays fail independently: a wrong report, or none, affects the engines beside that relay alone;
- a registry that replaced the one that versions came from is refused until an operator adopts it
  (`paramserver adopt`): its version numbers begin again, and mean other weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.core.fleet.labels import VERSION_DIGITS_MAX
from gateway.core.types import NO_VERSION, Version
from gateway.fleet.announcements import Looked
from gateway.runtime.supervisor import Supervisor
from paramserver.client import Lineage, ModelStatus, Origin, RelayClient, RelayStatus, TransferStatus
from protos.access.credentials import Credentials
from protos.errors import LaminarError, UnknownModel

log = logging.getLogger(__name__)

RETRY_S = 1.0
LOOK_TIMEOUT_S = 2.0
LOOKED_AT_MAX = 4
VERSION_MAX = int("9" * VERSION_DIGITS_MAX)


@dataclass(slots=True)
class _Followed:
    client: RelayClient
    watcher: asyncio.Task[None]
    newest: Version | None = None  # None: it has not responded yet
    held: dict[Version, str] = field(default_factory=dict)  # versions, and the runs that published them
    refused: str = ""  # why its registry is refused; empty: it is not


class Relays:
    """Watches relays. `on_change` gets a relay's address when it first responds, and whenever what it holds changes,
    with the version that came to it (0: none did, or one is gone)."""

    def __init__(
        self,
        model: str,
        tasks: Supervisor,
        on_change: Callable[[str, Version], None],
        *,
        lineage: Lineage | None = None,
        saw: Callable[[], None] = lambda: None,
        credentials: Credentials | None = None,
    ) -> None:
        """`lineage`: of the versions seen before; `saw` is called when it has changed. `credentials`: see
        RelayClient."""
        self._model, self._tasks, self._on_change = model, tasks, on_change
        self._lineage, self._saw = lineage or Lineage(), saw
        self.credentials = credentials
        self._followed: dict[str, _Followed] = {}

    def follow(self, address: str) -> None:
        if address not in self._followed:
            client = RelayClient(address, credentials=self.credentials)
            watcher = self._tasks.keep_running(lambda: self._watch(address, client), f"watch-relay-{address}")
            self._followed[address] = _Followed(client, watcher)

    async def unfollow(self, address: str) -> None:
        followed = self._followed.pop(address)
        followed.watcher.cancel()
        await asyncio.wait([followed.watcher])
        await followed.client.close()

    def client(self, address: str) -> RelayClient:
        return self._followed[address].client

    def newest(self, address: str) -> Version | None:
        """What it holds, 0 for nothing; None before it has responded: the wanted version is not known until then."""
        return self._followed[address].newest

    def held(self, address: str) -> frozenset[Version] | None:
        """Every version that may be acquired there, by its last report; None before the first."""
        followed = self._followed[address]
        return None if followed.newest is None else frozenset(followed.held)

    def holders(self, version: Version) -> list[str]:
        return sorted(address for address, followed in self._followed.items() if version in followed.held)

    def run_of(self, version: Version) -> str:
        """The run that published it; empty while no relay holds it."""
        return next((each.held[version] for each in self._followed.values() if version in each.held), "")

    def gone(self, address: str, version: Version) -> None:
        """The relay does not hold the version any more. An acquire may find that before the watch reports it."""
        followed = self._followed.get(address)
        if followed is not None:
            followed.held.pop(version, None)
            self._on_change(address, NO_VERSION)

    def addresses(self) -> list[str]:
        return sorted(self._followed)

    def answering(self) -> list[str]:
        """Addresses of relays whose versions are known and believed now."""
        return sorted(
            address
            for address, followed in self._followed.items()
            if followed.newest is not None and not followed.refused and followed.client.connected
        )

    async def look(self) -> Looked:
        """What relays that answer say now, whatever their watches have reported: each knows of every model."""
        found = await asyncio.gather(*map(self._status, self.answering()[:LOOKED_AT_MAX]))
        models = [model for status in found if status is not None for model in status.models]
        coming = [one.version for status in found if status is not None for one in status.transfers if self._ours(one)]
        given = [
            max(model.newest_announced, model.newest_sealed or NO_VERSION) for model in models if self._ours(model)
        ]
        others = sorted({model.model for model in models if not self._ours(model) and model.newest_sealed})
        return Looked(
            Version(max(filter(can_be, [*coming, *given]), default=NO_VERSION)),
            others,
            certain=any(s.registry_reachable for s in found if s),
        )

    def _ours(self, of: ModelStatus | TransferStatus) -> bool:
        return of.model == self._model

    async def _status(self, address: str) -> RelayStatus | None:
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                return await self._followed[address].client.status()
        except (LaminarError, TimeoutError) as e:
            log.info("relay %s does not say what it has: %s", address, str(e) or "it is silent")
            return None

    def refused(self) -> dict[str, str]:
        """By address, relays whose registry replaced the one that versions came from: why they are refused, and what an
        operator can do."""
        return {address: followed.refused for address, followed in sorted(self._followed.items()) if followed.refused}

    def unreachable(self) -> list[str]:
        """Addresses of relays that are not connected now."""
        return sorted(address for address, followed in self._followed.items() if not followed.client.connected)

    async def _watch(self, address: str, client: RelayClient) -> None:
        """Until cancelled. An error ends it, and the supervisor starts it again, with what the relay holds then."""
        while True:
            held = await self._first(address, client)
            if self._refuses(address, client.origin):
                self._followed[address].held = {}
                self._note(address, NO_VERSION)  # its engines may join with what they hold
                await asyncio.sleep(RETRY_S)
                continue
            self._followed[address].held = held
            self._accept(address, client.origin, max(held, default=NO_VERSION))
            await self._follow(address, client)

    async def _follow(self, address: str, client: RelayClient) -> None:
        """Returns when the relay belongs to a registry that is refused."""
        async for event in client.watch(self._model):
            version = Version(event.version.version)
            if self._lineage.refuses(event.origin):
                return
            if not can_be(version):
                log.warning("relay %s reports version %d, which no master assigns: ignored", address, version)
            elif event.kind == "available":
                self._followed[address].held[version] = event.version.run
                self._accept(address, event.origin, version)
            elif event.kind in ("retired", "lost"):
                self.gone(address, version)

    def _refuses(self, address: str, origin: Origin) -> str:
        """Why the relay is refused, or an empty string; logged when that begins and when it ends."""
        followed, why = self._followed[address], self._lineage.refuses(origin)
        if why:
            why = f"{why} ({self._lineage.remedy(self._model, address)})"
        if why and why != followed.refused:
            log.error("versions of relay %s are refused: %s", address, why)
        elif followed.refused and not why:
            log.info("versions of relay %s are accepted again", address)
        followed.refused = why
        return why

    def _accept(self, address: str, origin: Origin, version: Version) -> None:
        if version != NO_VERSION and self._lineage.saw(origin, version):
            self._saw()
        self._note(address, version)

    async def _first(self, address: str, client: RelayClient) -> dict[Version, str]:
        """What the relay holds now; retries until it responds, since nothing can be decided before."""
        logged = ""
        while True:
            try:
                held = await client.versions(self._model)
                return {Version(one.version): one.run for one in held if can_be(one.version)}
            except UnknownModel:
                return {}  # nothing was published yet
            except LaminarError as e:
                if str(e) != logged:
                    log.warning("relay %s does not respond yet; retrying until it does: %s", address, e)
                    logged = str(e)
                await asyncio.sleep(RETRY_S)

    def _note(self, address: str, version: Version) -> None:
        followed = self._followed[address]
        followed.newest = max(version, followed.newest or NO_VERSION)
        self._on_change(address, version)


def can_be(version: int) -> bool:
    """Whether a master may have assigned it."""
    return 0 < version <= VERSION_MAX
