"""Reads a version on each relay by the engine plugin of the release that runs it: MODEL VERSION RELAY...

The plugin proves the snapshot against its root, and maps its tensors. Prints {"digest", "root"}, the same for all
relays, or fails.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys

from paramserver.client import RelayClient
from paramserver.plugins.snapshot import Tensors, prove


async def read(relay: str, model: str, version: int) -> dict[str, str]:
    async with RelayClient(relay, timeout_s=60.0) as client:
        lease = await client.acquire(model, version, holder="upgrade", ttl_s=60.0)
        prove(lease.path, lease.root_digest)
        found = hashlib.sha256()
        with Tensors(lease.path) as tensors:
            for name, tensor in sorted(tensors):
                array = tensor.numpy()
                found.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
                del array, tensor  # the version cannot retire while they map it
        await client.release(lease)
        return {"digest": found.hexdigest(), "root": lease.root_digest}


async def main(model: str, version: str, *relays: str) -> None:
    first, *others = [await read(relay, model, int(version)) for relay in relays]
    assert all(other == first for other in others), (relays, first, others)
    print(json.dumps(first))


asyncio.run(main(*sys.argv[1:]))
