"""The gateways that share a Redis, to each other: where each is reached, which engines are whose, and which sessions.

Invariants:
- a session's id that a gateway made carries the gateway's mark, so any gateway knows whose it is without a call;
- a name that a client chose is claimed before the session is made: no two gateways have a session of one name;
- the script is `gateways.lua`; it names the keys.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Collection, Mapping
from importlib.resources import files
from typing import Any, Literal

from gateway.redis.server import RedisServer, Script
from protos.errors import Misdirected, Unavailable

log = logging.getLogger(__name__)

SCRIPT = Script((files("gateway.redis") / "gateways.lua").read_text())
ROOM = "gateways"
SHOW_S = 5.0
"""Between two looks at where the others are."""
SESSION_TTL_S = 86_400.0
"""How long a name that a client chose stays with its gateway after its session began."""
CLAIM_WAIT_S = 2.0
_MARKED = re.compile(r"s-([0-9a-f]{8})-[0-9a-f]{16}")

Kind = Literal["engine", "session"]


class SharedGateways:
    """`gateway`: this one's name, which stays with its `--data`. `claim_ttl_s`: of engines. Implements
    `gateway.fleet.claims.ClaimStore`."""

    def __init__(self, server: RedisServer, gateway: str, claim_ttl_s: float) -> None:
        self._server, self._gateway, self._ttl_ms = server, gateway, round(claim_ttl_s * 1000)
        self._life = secrets.token_hex(4)
        self._url = ""
        self._at: dict[str, str] = {}
        self.mark = mark_of(gateway)

    async def show(self, url: str) -> None:
        """This gateway is reached at `url` from now on."""
        self._url = url
        await self._look()

    async def run(self) -> None:
        """Follows where the others are, until cancelled."""
        while True:
            await asyncio.sleep(SHOW_S)
            try:
                await self._look()
            except Unavailable:
                log.debug("%s: where other gateways are is not known anew", self._server.address)

    async def _look(self) -> None:
        found = await self._call("show", self._url)
        self._at = {name.decode(): url.decode() for name, url in zip(found[::2], found[1::2], strict=True)}

    # -- engines

    async def claim(self, engines: Collection[str]) -> Mapping[str, str]:
        holders = await self._call("claim", "engine", self._ttl_ms, *engines)
        held = {engine: who.decode() for engine, who in zip(engines, holders, strict=True) if who}
        if not set(held.values()) <= self._at.keys():
            await self._look()
        return {engine: self._shown(gateway) for engine, gateway in held.items()}

    async def drop(self, engines: Collection[str]) -> None:
        await self._call("drop", "engine", *engines)

    # -- sessions

    async def reserve(self, name: str) -> None:
        """Before a session of this name is made: claims it, where this gateway did not make the name. Misdirected for
        one of another gateway's, Unavailable while the Redis does not say."""
        if (marked := _MARKED.fullmatch(name)) is not None and marked[1] == self.mark:
            return
        await self._check_anew(name, marked)
        [holder] = await self._call("claim", "session", round(SESSION_TTL_S * 1000), name)
        await self._refuse(name, holder.decode())

    async def find(self, name: str) -> None:
        """Misdirected for a session that another gateway has. Returns for one that none is known to have."""
        await self._check_anew(name, _MARKED.fullmatch(name))
        await self._refuse(name, (await self._call("holder", "session", name)).decode())

    def check(self, name: str) -> None:
        """As `find`, by the mark of an id that a gateway made, without a call."""
        found = _MARKED.fullmatch(name)
        if found is not None and found[1] != self.mark:
            owner = next((gateway for gateway in self._at if mark_of(gateway) == found[1]), None)
            if owner is not None:
                raise self._misdirected(name, owner)

    async def _check_anew(self, name: str, marked: re.Match[str] | None) -> None:
        if marked is not None and marked[1] not in map(mark_of, self._at):
            await self._look()
        self.check(name)

    async def _refuse(self, name: str, holder: str) -> None:
        if holder and holder != self._gateway:
            if holder not in self._at:
                await self._look()
            raise self._misdirected(name, holder)

    def _shown(self, gateway: str) -> str:
        return f"{gateway} at {self._at[gateway]}" if gateway in self._at else gateway

    def _misdirected(self, name: str, gateway: str) -> Misdirected:
        url = self._at.get(gateway, "")
        return Misdirected(
            f"session {name!r} is at another gateway, {self._shown(gateway)}",
            hint=f"send its calls to {url or 'that one'}; a session's `base_url` leads there",
            url=url,
        )

    async def _call(self, operation: str, *arguments: str | int) -> Any:
        return await self._server.call(
            SCRIPT, ROOM, operation, self._gateway, self._life, *arguments, wait_s=CLAIM_WAIT_S
        )


def mark_of(gateway: str) -> str:
    """What the ids of sessions that the gateway makes carry, as `s-MARK-...`."""
    return gateway[-8:]
