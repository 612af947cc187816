"""Claims on engines, in a store that gateways share: two gateways of one engine would load weights under each other's
turns.

Invariants:
- an engine that a live gateway has claimed is in the fleet of no other gateway over the same store;
- a claim ends with its gateway: at once when that closes, `TTL_S` after its last renewal when it died. A gateway that
  starts again with its `--data` has the same name, and goes on with its claims;
- while the store is away, the fleet stays as it is. An engine that another gateway has claimed meanwhile leaves it;
- an engine is known by its address, and one on loopback by the network namespace, too: it is another one elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Protocol
from urllib.parse import quote, urlsplit

from protos.errors import Conflict, Unavailable

log = logging.getLogger(__name__)

TTL_S = 15.0
RENEW_S = 5.0
START_PATIENCE_S = TTL_S + 2.0
"""How long a start waits for the claims of a gateway that has just died without its `--data`."""
RETRY_S = 0.5
LOOPBACK = ("localhost", "::1")


class Claimed(Conflict):
    """Another live gateway has the engine."""

    code = "engine_claimed"


class ClaimStore(Protocol):
    """Where claims are. Keys are those of `engine_key`; a call raises Unavailable when it did not get through."""

    async def claim(self, engines: Collection[str]) -> Mapping[str, str]:
        """Claims the engines, or renews the claims, for `TTL_S`. Returns those that another gateway has, and which."""
        ...

    async def drop(self, engines: Collection[str]) -> None: ...


def engine_key(url: str) -> str:
    """The engine at `url`, as all gateways know it."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    place = _network_namespace() if host in LOOPBACK or host.startswith("127.") else host
    return quote(f"{place}:{parts.port or (443 if parts.scheme == 'https' else 80)}{parts.path.rstrip('/')}", safe=":")


def _network_namespace() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}"


class EngineClaims:
    """The claims of one fleet. `store` None: no other gateway can know of this one, and nothing is claimed. `lost` gets
    the address of an engine that another gateway claimed while the store was away, and that gateway."""

    def __init__(self, store: ClaimStore | None, lost: Callable[[str, str], Awaitable[None]]) -> None:
        self._store, self._lost = store, lost
        self._mine: dict[str, str] = {}  # addresses, by key
        self._dropped: set[str] = set()
        self._changed = asyncio.Event()
        self.failure = ""
        """Why the claims are not renewed now; empty while they are."""

    async def take(self, name: str, url: str, patience_s: float = 0.0) -> None:
        """Claims the engine. Claimed when another live gateway has it, for `patience_s` at least."""
        if self._store is None:
            return
        key, deadline, waits = engine_key(url), time.monotonic() + patience_s, False
        while True:
            try:
                holder = (await self._store.claim([key])).get(key)
            except Unavailable as e:
                log.warning("engine %s is used without a claim, which others would respect: %s", name, e)
                break
            if holder is None:
                break
            if time.monotonic() >= deadline:
                raise Claimed(
                    f"engine {name} at {url} belongs to {holder}: two gateways would load weights under each other's "
                    "turns",
                    hint="give each gateway engines of its own, or stop the other one first",
                )
            if not waits:
                log.warning("engine %s at %s belongs to %s; waiting up to %.0f s", name, url, holder, patience_s)
                waits = True
            await asyncio.sleep(RETRY_S)
        self._mine[key] = url
        self._dropped.discard(key)

    def give_back(self, url: str) -> None:
        """Others may have the engine from now on."""
        if self._store is not None and self._mine.pop(key := engine_key(url), None) is not None:
            self._dropped.add(key)
            self._changed.set()

    async def run(self) -> None:
        """Renews and drops claims, until cancelled."""
        while self._store is not None:
            try:
                async with asyncio.timeout(RENEW_S):
                    await self._changed.wait()
            except TimeoutError:
                pass  # the usual case: nothing changed, and the claims are due
            self._changed.clear()
            try:
                await self._renew(self._store)
            except Unavailable as e:
                if not self.failure:
                    log.warning("claims on engines are not renewed: %s; the fleet stays as it is", e)
                self.failure = str(e)
                continue
            self.failure = ""

    async def _renew(self, store: ClaimStore) -> None:
        if dropped := frozenset(self._dropped):
            await store.drop(dropped)
            self._dropped -= dropped
        if not self._mine:
            return
        for key, holder in (await store.claim(list(self._mine))).items():
            if (url := self._mine.pop(key, None)) is not None:
                await self._lost(url, holder)

    async def close(self) -> None:
        """Drops all claims; where that fails they end by themselves."""
        if self._store is None:
            return
        mine = [*self._mine, *self._dropped]
        try:
            if mine:
                await self._store.drop(mine)
        except Unavailable as e:
            log.warning("claims on engines end in %.0f s: %s", TTL_S, e)
