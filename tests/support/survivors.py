"""What fault tests ask of the relays that live on: the same bytes under the same root everywhere, or a plain no."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from safetensors.numpy import save

from paramserver.client import RelayClient, RelayStatus, Ticket, publish
from paramserver.core import view as keys
from paramserver.membership import EtcdRegistry
from protos.errors import LaminarError, Unavailable
from tests.support.processes import Daemon
from tests.support.relays import until
from tests.support.weights import source_of, weights

MODEL = "policy"


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
    """Whether between a quarter and half of the version is there."""
    status = await status_of(daemon)
    found = [t for t in status.transfers if t.version == version] if status else []
    return bool(found) and found[0].bytes_total // 4 < found[0].bytes_done < found[0].bytes_total // 2


async def registered(endpoint: str) -> list[str]:
    """All keys of the tier in the etcd there."""
    registry = await EtcdRegistry.connect(endpoint)
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
