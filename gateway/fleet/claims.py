"""Claims on engines, in a store that gateways share: two gateways of one engine would load weights under each other's
turns.

Invariants:
- an engine that a live gateway has claimed is in the fleet of no other gateway over the same store;
- a claim ends with its gateway: at once when that closes, `TTL_S` after its last renewal when it died. The next life of
  a gateway, on its `--data`, goes on with its claims once the one before is over; two live ones of a name are refused;
- while the store is away, the fleet stays as it is. An engine that another gateway has claimed meanwhile leaves it;
- an engine is surely the same under one host and port, as written, and, on this host, in one network namespace. Where
  an address is all that two have in common, it may be another one: many names lead to a proxy, and hosts that do not
  reach each other have alike private addresses. Then whoever has written the address has it, and others are warned.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import quote, urlsplit

from protos.errors import Conflict, Unavailable

log = logging.getLogger(__name__)

TTL_S = 15.0
RENEW_S = 5.0
START_PATIENCE_S = TTL_S + 2.0
"""How long a start waits for the claims of a gateway that has just died without its `--data`."""
RETRY_S = 0.5
RESOLVE_S = 5.0
ELSEWHERE = "192.0.2.1"
"""An address of nobody (RFC 5737)."""


class Claimed(Conflict):
    """Another live gateway has the engine."""

    code = "engine_claimed"


class ClaimStore(Protocol):
    """Where claims are. A call raises Unavailable when it did not get through. `gateway`: this one's name."""

    @property
    def gateway(self) -> str: ...

    async def claim(self, names: Collection[str]) -> Mapping[str, str]:
        """Claims the names, or renews the claims, for `TTL_S`. Returns those that another gateway has, and which."""
        ...

    async def drop(self, names: Collection[str]) -> None: ...


class EngineKeys(NamedTuple):
    """What an engine is known by: `sure` by nothing else, `possible` perhaps by another one, too."""

    sure: frozenset[str]
    possible: frozenset[str]


async def engine_keys(url: str) -> EngineKeys:
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    addresses = await _addresses(host, port)
    sure, possible = {host}, addresses
    if any(map(_is_here, addresses)):
        sure = {_network_namespace(), *([host] if any(map(_is_reached, addresses)) else [])}
        possible = set(filter(_is_reached, addresses | await asyncio.to_thread(_own_addresses)))
        possible |= {host} if _is_own_name(host) else set()  # hosts of one image may have one name

    def keys(hosts: set[str]) -> frozenset[str]:
        return frozenset(quote(f"{each}:{port}{parts.path.rstrip('/')}", safe=":") for each in hosts)

    return EngineKeys(keys(sure), keys(possible - sure))


async def _addresses(host: str, port: int) -> set[str]:
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError):  # TimeoutError is an OSError; ValueError: a host that cannot be
        return set()
    return {str(address[0]) for *_, address in found}


def _is_here(address: str) -> bool:
    """Whether it is an address of this host: only these can be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _is_reached(address: str) -> bool:
    """Whether others reach this host by it."""
    found = ip_address(address.partition("%")[0])
    return not (found.is_loopback or found.is_unspecified)


def _is_own_name(host: str) -> bool:
    """Whether others call this host so, where it leads to loopback here (Debian's 127.0.1.1)."""
    name = host.partition(".")[0]
    return name != "localhost" and name == socket.gethostname().partition(".")[0].lower()


def _own_addresses() -> set[str]:
    """Of this host: those that its name has, and the one from which packets to others go. Nothing is sent."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        found |= {str(address[0]) for *_, address in socket.getaddrinfo(socket.gethostname(), None)}
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((ELSEWHERE, 9))
        found.add(str(probe.getsockname()[0]))
    return set(filter(_is_here, found))


def _network_namespace() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}"


class EngineClaims:
    """The claims of one fleet. `store` None: no other gateway can know of this one, and nothing is claimed. `lost` gets
    the address of an engine that another gateway claimed while the store was away, and that gateway."""

    def __init__(self, store: ClaimStore | None, lost: Callable[[str, str], Awaitable[None]]) -> None:
        self._store, self._lost = store, lost
        self._sure: dict[str, set[str]] = {}  # URLs, by key
        self._possible: dict[str, set[str]] = {}
        self._names: list[str] = []  # this gateway's own
        self._dropped: set[str] = set()
        self._changed = asyncio.Event()
        self.failure = ""
        """Why the claims are not renewed now; empty while they are."""

    async def begin(self, patience_s: float) -> None:
        """Claims the gateway's own name. Claimed when another live gateway has it: one on a copy of its `--data`."""
        if self._store is not None:
            name = f"gateway:{self._store.gateway}"
            await self._claim([name], f"the name of this gateway, {self._store.gateway},", patience_s)
            self._names = [name]

    async def take(self, name: str, url: str, patience_s: float = 0.0) -> None:
        """Claims the engine. Claimed when another live gateway has it, for `patience_s` at least."""
        if self._store is None:
            return
        keys = await engine_keys(url)
        await self._claim(keys.sure, f"engine {name} at {url}", patience_s)
        self._keep(self._sure, keys.sure, url)
        held: Mapping[str, str] = {}
        with contextlib.suppress(Unavailable):  # renewals claim them
            held = await self._store.claim(keys.possible) if keys.possible else {}
        for key, holder in held.items():
            log.warning("engine %s at %s may be one of %s, to whose address %s it leads", name, url, holder, key)
        self._keep(self._possible, keys.possible - held.keys(), url)

    def _keep(self, kept: dict[str, set[str]], keys: Collection[str], url: str) -> None:
        for key in keys:
            kept.setdefault(key, set()).add(url)
            self._dropped.discard(key)

    async def _claim(self, names: Collection[str], what: str, patience_s: float) -> None:
        """Where the store does not answer, the next renewal claims them."""
        assert self._store is not None
        deadline, waits = time.monotonic() + patience_s, False
        while True:
            try:
                held = await self._store.claim(names)
            except Unavailable as e:
                log.warning("%s is used without a claim, which others would respect: %s", what, e)
                return
            if not held:
                return
            [holder, *_] = held.values()
            if time.monotonic() >= deadline:
                await self._undo([name for name in names if name not in held])
                raise Claimed(
                    f"{what} belongs to {holder}: two gateways would load weights under each other's turns",
                    hint="give each gateway engines and a --data of its own, or stop the other one first",
                )
            if not waits:
                log.warning("%s belongs to %s; waiting up to %.0f s", what, holder, patience_s)
                waits = True
            await asyncio.sleep(RETRY_S)

    async def _undo(self, names: Collection[str]) -> None:
        """Gives back what a claim of several names got, unless it was this gateway's before."""
        self._dropped |= {name for name in names if name not in self._sure and name not in self._possible}
        self._changed.set()

    def give_back(self, url: str) -> None:
        """Others may have the engine from now on."""
        for kept in (self._sure, self._possible):
            for key in [key for key, urls in kept.items() if url in urls]:
                kept[key].discard(url)
                if not kept[key]:
                    del kept[key]
                    self._dropped.add(key)
        self._dropped -= self._sure.keys() | self._possible.keys()
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
        for key, holder in (await store.claim([*self._names, *self._sure, *self._possible])).items():
            self._possible.pop(key, None)
            for url in list(self._sure.get(key, ())):
                self.give_back(url)
                await self._lost(url, holder)
            if key in self._names:
                log.error("the name of this gateway belongs to %s, too: is its --data a copy of this one's?", holder)

    async def close(self) -> None:
        """Drops all claims; where that fails they end by themselves."""
        if self._store is None:
            return
        mine = [*self._names, *self._sure, *self._possible, *self._dropped]
        try:
            if mine:
                await self._store.drop(mine)
        except Unavailable as e:
            log.warning("claims on engines end in %.0f s: %s", TTL_S, e)
