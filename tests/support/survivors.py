"""What fault tests ask of the relays that live on: the same bytes under the same root everywhere, or a plain no."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable

from safetensors.numpy import save

from paramserver.client import Lease, RelayClient, RelayStatus, Ticket, publish
from paramserver.core import view as keys
from paramserver.membership import EtcdRegistry
from protos.errors import LaminarError, Unavailable
from tests.support.processes import Daemon
from tests.support.relays import until
from tests.support.weights import source_of, weights

MODEL = "policy"
PAUSE_S = 0.2  # of a reader between two looks
SLOW = "1MiB"
"""Per second, of a relay that is to fail while it sends: what it has begun takes it five seconds, or ten."""
REGISTRY_TIMEOUT_S = 60.0  # of a test's own question to etcd: its bound is for what hangs


def client(daemon: Daemon) -> RelayClient:
    return RelayClient(daemon.ready["grpc"])


def contents(seed: int, scale: int = 1) -> bytes:
    """What the only file of a version made by `publish_seed` must hold."""
    return save(weights(seed, scale))


async def publish_seed(relay: RelayClient, seed: int, scale: int = 1, *, run: str = "r") -> Ticket:
    """Returns at *copied*. The seed is the step too."""
    return await publish(relay, MODEL, source_of(weights(seed, scale)), step=seed, run=run)


async def status_of(daemon: Daemon) -> RelayStatus | None:
    """None while it cannot be had."""
    async with client(daemon) as relay:
        with contextlib.suppress(Unavailable):
            return await relay.status()
    return None


async def held(daemon: Daemon) -> tuple[int, ...]:
    status = await status_of(daemon)
    return status.held.get(MODEL, ()) if status else ()


async def master_at(daemon: Daemon) -> str:
    """The model's master as this relay sees it; "" when there is none."""
    status = await status_of(daemon)
    return next((m.master for m in status.models if m.model == MODEL), "") if status else ""


async def in_the_middle(daemon: Daemon, version: int) -> bool:
    """Whether a part of the version is there, and no more than half of it: senders at `SLOW` leave seconds to act."""
    status = await status_of(daemon)
    found = [t for t in status.transfers if t.version == version] if status else []
    return bool(found) and found[0].bytes_total // 16 < found[0].bytes_done < found[0].bytes_total // 2


async def registered(endpoint: str) -> list[str]:
    """All keys of the tier in the etcd there."""
    registry = await EtcdRegistry.connect(endpoint, timeout_s=REGISTRY_TIMEOUT_S)
    try:
        return [entry.key for entry in (await registry.list(keys.ROOT)).entries]
    finally:
        await registry.close()


async def identical(
    daemons: Iterable[Daemon], version: int, seed: int, scale: int = 1, *, timeout_s: float = 180.0
) -> None:
    """Every one comes to hold the version as its newest, with the seed's bytes, under one root."""
    expected, roots = contents(seed, scale), set()
    for daemon in daemons:

        async def newest(daemon: Daemon = daemon) -> bool:
            return (await held(daemon))[-1:] == (version,)

        await until(newest, f"{daemon.name} has version {version} as its newest", timeout_s)
        async with client(daemon) as relay:
            lease = await relay.acquire(MODEL, version, holder="survivors")
            assert [path.name for path in lease.path.iterdir()] == ["model.safetensors"]
            assert (lease.path / "model.safetensors").read_bytes() == expected, daemon.name
            roots.add(lease.root_digest)
            await relay.release(lease)
    assert len(roots) == 1, roots


async def stage_of(ticket: Ticket) -> str:
    """The ticket's stage; "" while nobody there can say."""
    with contextlib.suppress(LaminarError):
        return await ticket.stage()
    return ""


class Reading:
    """A reader beside one relay for as long as a test runs: every version that it gets is whole, and none is older.

    `read_at` has the loop's clock for each seed, in order; `refused` is what it was told instead once it had a version.
    """

    def __init__(self, daemon: Daemon, contents_of: Callable[[int], bytes]) -> None:
        self.name = str(daemon.ready["name"])
        self.read_at: dict[int, float] = {}
        self.refused: list[str] = []
        self._daemon = daemon
        self._contents_of = contents_of
        self._newest = 0

    async def go_on(self) -> None:
        """Until cancelled. AssertionError for a torn version, or one that is older than one before."""
        async with client(self._daemon) as relay:
            while True:
                try:
                    lease = await relay.acquire(MODEL, holder="reading")
                    await self._look(lease)
                    await relay.release(lease)
                except LaminarError as error:
                    self.refused += [error.message] if self._newest else []
                await asyncio.sleep(PAUSE_S)

    async def _look(self, lease: Lease) -> None:
        assert lease.version >= self._newest, f"{self.name} went back from {self._newest} to {lease.version}"
        if lease.version == self._newest:
            return
        found = await asyncio.to_thread((lease.path / "model.safetensors").read_bytes)
        assert found == self._contents_of(lease.step), f"version {lease.version} is torn at {self.name}"
        self._newest = lease.version
        self.read_at[lease.step] = asyncio.get_running_loop().time()


@contextlib.asynccontextmanager
async def reading(daemons: Iterable[Daemon], contents_of: Callable[[int], bytes]) -> AsyncIterator[list[Reading]]:
    """Readers beside all of them; what one found wrong is raised at the end."""
    readers = [Reading(daemon, contents_of) for daemon in daemons]
    tasks = [asyncio.create_task(reader.go_on()) for reader in readers]
    try:
        yield readers
    finally:
        for task in tasks:
            task.cancel()
        for end in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(end, Exception):
                raise end
