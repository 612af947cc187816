"""The rollout's side of the checkpoint engine: the tensors of a version, from the relay on this host.

Invariants:
- only sealed versions that the relay holds complete are read, and only while they are pinned;
- tensors are views of files that the host shares: nothing is copied before the inference engine takes them;
- a pin that lapsed meanwhile raises NotFound once the last tensor was taken: those weights do not count.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

from paramserver.client import Lease, RelayClient, SealedVersion
from protos.errors import LaminarError, Unavailable
from trainer_client.integrations.verl.sending import Sender

HOLDER = "verl"
PIN_TTL_S = 300.0
"""A rollout worker may keep its event loop busy with one bucket for so long."""


def made_by(sender: Sender, step: int | None) -> Callable[[SealedVersion], bool]:
    """Whether a version is the one that `sender` makes next, under verl's `global_steps`."""
    return lambda version: (
        version.run == sender.run and version.version > sender.after and (step is None or version.step == step)
    )


async def arrived(
    relay: RelayClient, model: str, wanted: Callable[[SealedVersion], bool], timeout_s: float
) -> SealedVersion:
    """The first version that is `wanted`, as soon as the relay holds it. Unavailable at the deadline."""
    try:
        async with asyncio.timeout(timeout_s), contextlib.aclosing(_held(relay, model)) as held:
            async for version in held:
                if wanted(version):
                    return version
    except TimeoutError as error:
        raise Unavailable(
            f"the relay at {relay.address} has not got the awaited version of {model} within {timeout_s:g} s",
            hint="has the trainer published it, and is this relay in its chain? `paramserver status` shows both",
        ) from error
    raise AssertionError("unreachable: a watch has no end")


async def _held(relay: RelayClient, model: str) -> AsyncGenerator[SealedVersion, None]:
    async for event in relay.watch(model):
        if event.kind == "available":
            yield event.version


async def tensors(relay: RelayClient, model: str, version: int | None) -> AsyncIterator[tuple[str, Any]]:
    """Pairs (name, tensor) of one version; None: of the newest. NotFound when the relay does not hold it."""
    async with pinned(relay, model, version) as lease:
        for pair in _read(lease.path):
            yield pair


@contextlib.asynccontextmanager
async def pinned(relay: RelayClient, model: str, version: int | None) -> AsyncIterator[Lease]:
    """The version stays on the relay until the block ends. Raises NotFound then if it has not."""
    lease = await relay.acquire(model, version, holder=HOLDER, ttl_s=PIN_TTL_S)
    renewing = asyncio.create_task(relay.keep_pinned(lease))
    try:
        yield lease
    except BaseException:
        with contextlib.suppress(LaminarError):  # the pin ends by itself; the block's own error is what counts
            await relay.release(lease)
        raise
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
    await relay.release(lease)


def _read(directory: Path) -> Iterator[tuple[str, Any]]:
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                yield name, file.get_tensor(name)
