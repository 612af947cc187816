"""A simulated gateway that wants a version kept by the fleet: one pin, made again wherever it can be."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from protos.errors import LaminarError
from tests.sim.actors import VERSION_BYTES, Client
from tests.sim.virtual import Process

if TYPE_CHECKING:
    from tests.sim.tier import World

COPIES = 2
TTL_S = 15.0
TRIES_MAX = 30
"""Of one version: after that nobody has it any more, or nobody can be asked."""


class SimKeeper:
    """Keeps a version for a while, then a newer one; the last one when faults end, to the end."""

    def __init__(self, world: World, model: str) -> None:
        self.world, self.model = world, model
        self.process = Process(world.clock, world.rng, f"keeper-{model}")
        self.process.world = world
        self.version: int | None = None
        self.pinned = False
        self.life = self.process.create_task(self._keep())

    async def _keep(self) -> None:
        rng, tries = self.world.rng, 0
        while True:
            await asyncio.sleep(rng.expovariate(1.0))
            host = rng.choice(sorted(self.world.relays))
            with contextlib.suppress(LaminarError):
                await self._pin(Client(self.world, self.process, self.world.relays[host].address))
                tries = 0
            self.pinned = False
            tries += 1
            if tries > TRIES_MAX:
                self.version, tries = None, 0

    async def _pin(self, client: Client) -> None:
        """Until it is lost, or another version is wanted."""
        lease = await client.acquire(self.model, self.version, holder="gateway", ttl_s=TTL_S, copies=COPIES)
        self.version, self.pinned = lease.version, True
        until = self.process.time() + self.world.rng.expovariate(0.1)
        while self.process.time() < until or self.world.healing:
            await asyncio.sleep(TTL_S / 5)
            await client.renew(lease)
        self.version = None
        await client.release(lease)

    def satisfied(self) -> bool:
        """As many copies as were asked for, as far as there are relays with room to spare."""
        relays = [host for host in self.world.relays.values() if host.parts is not None and not host.process.dead]
        if not self.pinned or (self.model, self.version) in self.world.ended:
            return True
        holding = [host for host in relays if self.version in self.world.shown_at(host, self.model)]
        spare = [h for h in relays if h not in holding and h.store.pool.statistics().free_bytes >= 2 * VERSION_BYTES]
        return len(holding) >= COPIES or not spare
