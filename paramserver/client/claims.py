"""Claims of gateways on engines, in etcd: keys on the gateway's own lease."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Mapping

import msgspec

from paramserver.core import view as keys
from paramserver.membership.registry import Absent, Created, Delete, Entry, Put, Registry
from protos.decoding import decode_json
from protos.errors import Unavailable

RACES_MAX = 5
"""Attempts to claim what others claim or give back at the same time."""


class _Claim(msgspec.Struct, frozen=True):
    """A claim's value in etcd. `life`: of the process."""

    gateway: str
    where: str
    lease: int
    life: str = ""


class EtcdClaims:
    """What `gateway` has claimed, by its name; it ends `ttl_s` after the last call of `claim`. Engines are any texts
    that all gateways write alike. `life`: of this process; `is_over`: whether that of another one is known to have
    ended, whose claims under the same name are then this one's. Every call raises Unavailable when its outcome is not
    known."""

    def __init__(
        self, registry: Registry, gateway: str, ttl_s: float, life: str, is_over: Callable[[str], bool]
    ) -> None:
        self._registry, self.gateway, self._ttl_s = registry, gateway, ttl_s
        self._life, self._is_over = life, is_over
        self._where = f"{gateway} on {socket.gethostname()}, process {os.getpid()}"
        self._lease = 0

    async def claim(self, engines: Collection[str]) -> Mapping[str, str]:
        """Claims the engines, or renews the claims. Returns those that another gateway has, and which."""
        if not self._lease or not await self._registry.keep_alive(self._lease):
            self._lease = await self._registry.grant(self._ttl_s)
        for _ in range(RACES_MAX):
            held, guards, writes = self._plan(engines, await self._found())
            outcomes = [await self._registry.transact([g], [w]) for g, w in zip(guards, writes, strict=True)]
            if all(outcome.succeeded for outcome in outcomes):
                return held
        raise Unavailable("claims in etcd change all the time", hint="try again")

    def _plan(
        self, engines: Collection[str], found: Mapping[str, Entry]
    ) -> tuple[dict[str, str], list[Absent | Created], list[Put]]:
        """Who has the engines that others have, and how the rest becomes this gateway's."""
        mine = _Claim(self.gateway, self._where, self._lease, self._life)
        held: dict[str, str] = {}
        guards: list[Absent | Created] = []
        writes: list[Put] = []
        for engine in engines:
            entry = found.get(key := keys.CLAIMS + engine)
            claim = None if entry is None else _claim_of(entry.value)
            if claim is not None and not self._may_take(claim):
                held[engine] = claim.where
            elif claim != mine:
                guards.append(Absent(key) if entry is None else Created(key, entry.created))
                writes.append(Put(key, msgspec.json.encode(mine), self._lease))
        return held, guards, writes

    def _may_take(self, claim: _Claim) -> bool:
        return claim.gateway == self.gateway and (claim.life == self._life or self._is_over(claim.life))

    async def _found(self) -> dict[str, Entry]:
        return {entry.key: entry for entry in (await self._registry.list(keys.CLAIMS)).entries}

    async def drop(self, engines: Collection[str]) -> None:
        found = await self._found()
        for key in (keys.CLAIMS + engine for engine in engines):
            entry = found.get(key)
            # By the lease: one of its name may be its successor's, which has started meanwhile.
            if entry is not None and (claim := _claim_of(entry.value)) and claim.lease == self._lease:
                await self._registry.transact([Created(key, entry.created)], [Delete(key)])


def _claim_of(value: bytes) -> _Claim | None:
    """None for what cannot be read: it is replaced."""
    try:
        return decode_json(value, _Claim)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
