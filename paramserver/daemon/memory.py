"""What a relay keeps versions in: its pool in shared memory, the spill on disk, and NIXL's processes, which map it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from paramserver.config import RelayConfig, show_bytes
from paramserver.core.notices import Notices
from paramserver.data.nixl.processes import NixlProcesses
from paramserver.data.spill import Spill
from paramserver.memory import stored
from paramserver.memory.pool import Pool
from paramserver.memory.private import keep_private
from paramserver.memory.store import Snapshot, Store
from paramserver.relay.recovery import Recovery
from protos.access.unix_socket import group_id
from protos.errors import Corrupt, OutOfCapacity

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Memory:
    """`left`: what an earlier life left in shared memory; `found`: what of that is whole, and in the store again.
    `spill`, `nixl`: None without."""

    store: Store
    left: list[stored.StoredSnapshot]
    found: list[Snapshot]
    spill: Spill | None
    nixl: NixlProcesses | None

    async def recover(self, recovery: Recovery) -> None:
        """Knows again, and offers, what an earlier life left on disk and in shared memory."""
        spilled = self.spill.versions() if self.spill is not None else []
        again = {snapshot.directory for snapshot in self.found}
        whole = [one for one in self.left if one.directory in again]
        await recovery.know_again([*spilled, *self.left], [*spilled, *whole])
        recovery.offer_again(self.found, self.store)


@contextlib.asynccontextmanager
async def opened_memory(config: RelayConfig, notices: Notices) -> AsyncIterator[Memory]:
    """The pool, touched, with what an earlier life left in it. At its end the memory goes back, as far as it may."""
    async with contextlib.AsyncExitStack() as stack:
        keep_private(config.pool_dir, group_of(config), "--pool-dir")
        left = stored.find(config.pool_dir)
        pool = Pool(config.pool_dir, config.pool_bytes, keep=[path for one in left for path in one.paths])
        store = Store(pool, left)
        stack.callback(_close_store, store, config)
        found = await asyncio.to_thread(find_again, store, left, notices)
        await asyncio.to_thread(pool.preallocate)
        nixl = await _started_nixl(config, stack)
        yield Memory(store, left, found, _opened_spill(config, stack, notices), nixl)


def _close_store(store: Store, config: RelayConfig) -> None:
    """Gives the memory back, and reports how much of it stays."""
    kept = store.close(forget=config.forget)
    if kept:
        log.info(
            "%s stay in memory, in %s, with %s: the next start finds them, and %s gives them back",
            show_bytes(sum(one.manifest.size_bytes for one in kept)),
            config.pool_dir,
            ", ".join(sorted(f"version {one.manifest.version} of {one.manifest.model}" for one in kept)),
            f"`paramserver clear --pool-dir {config.pool_dir}`",
        )


async def _started_nixl(config: RelayConfig, stack: contextlib.AsyncExitStack) -> NixlProcesses | None:
    if config.transport != "nixl":
        return None
    nixl = NixlProcesses(idle_max=2 * config.stripes, interface=config.bind_interface)
    stack.push_async_callback(asyncio.to_thread, nixl.close)
    await asyncio.to_thread(nixl.warm, config.stripes)
    return nixl


def _opened_spill(config: RelayConfig, stack: contextlib.AsyncExitStack, notices: Notices) -> Spill | None:
    if config.spill is None:
        return None
    keep_private(config.spill, group_of(config), "--spill")
    spill = Spill(config.spill, retain=config.spill_retain, notices=notices)
    stack.push_async_callback(asyncio.to_thread, spill.close)
    return spill


def find_again(store: Store, left: list[stored.StoredSnapshot], notices: Notices) -> list[Snapshot]:
    """The snapshots that an earlier life left whole in shared memory, as far as the pool holds them."""
    found = []
    for one in left:
        started = time.monotonic()
        try:
            found.append(store.find_again(one))
        except (Corrupt, OutOfCapacity) as error:
            log.warning("%s", error)
            notices.add(str(error), time.time())
        else:
            log.info("found %s again, hashed in %.2f s", found[-1], time.monotonic() - started)
    return found


def group_of(config: RelayConfig) -> int | None:
    """The group of `--group`, by its number. InvalidRequest for one that this host does not have."""
    return group_id(config.group) if config.group else None
