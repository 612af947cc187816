"""The gateways that share a Redis, to each other: where each is reached, which engines are whose, and which sessions.

Invariants:
- a session's id that a gateway made carries the gateway's mark, so any gateway knows whose it is without a call;
- a name that a client chose is claimed before the session is made, as is each group's: no name is at two gateways;
- the script is `gateways.lua`; it names the keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any, Literal

from gateway.redis.server import RedisServer, Script
from protos.errors import Conflict, LaminarError, Misdirected, Unavailable

log = logging.getLogger(__name__)

SCRIPT = Script((files("gateway.redis") / "gateways.lua").read_text())
ROOM = "gateways"
SHOW_S = 5.0
"""Between two looks at where the others are."""
SESSION_TTL_S = 3600.0
"""How long a name that a client chose stays with its gateway after its last renewal: also after its session's end."""
BATCH = 1000
"""Names of one call."""
CLAIM_WAIT_S = 2.0
_MARKED = re.compile(r"s-([0-9a-f]{8})-[0-9a-f]{16}")

Kind = Literal["engine", "session"]


class SharedGateways:
    """`gateway`: this one's name, which stays with its `--data`. `claim_ttl_s`: of engines. `life`: of this process;
    `is_over`: whether that of another one is known to have ended. Implements `gateway.fleet.claims.ClaimStore`."""

    def __init__(
        self, server: RedisServer, gateway: str, claim_ttl_s: float, life: str, is_over: Callable[[str], bool]
    ) -> None:
        self._server, self.gateway, self._ttl_ms = server, gateway, round(claim_ttl_s * 1000)
        self._life, self._is_over = life, is_over
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

    async def claim(self, names: Collection[str]) -> Mapping[str, str]:
        held = await self._claimed(names)
        if over := [name for name, (who, life) in held.items() if who == self.gateway and self._is_over(life)]:
            for name in over:
                await self._call("drop", "engine", held[name][1], name)
            held = await self._claimed(names)
        if not {who for who, _ in held.values()} <= self._at.keys():
            await self._look()
        return {name: self._shown(who) for name, (who, _) in held.items()}

    async def _claimed(self, names: Collection[str]) -> dict[str, tuple[str, str]]:
        """The gateway and its life that have what this one has not got."""
        holders = await self._call("claim", "engine", self._ttl_ms, *names)
        found = {name: holder.decode().partition("/") for name, holder in zip(names, holders, strict=True) if holder}
        return {name: (who, life) for name, (who, _, life) in found.items()}

    async def drop(self, names: Collection[str]) -> None:
        await self._call("drop", "engine", self._life, *names)

    # -- sessions

    @contextlib.asynccontextmanager
    async def reserved(self, name: str, here: Callable[[], bool]) -> AsyncIterator[None]:
        """Around the making of a session or group of this name: claims it, where this gateway did not make the name.
        Misdirected for one of another gateway's. While the Redis does not say it begins unclaimed. Where it is refused,
        and none is `here`, the name is free again."""
        await self._begin(name)
        try:
            yield
        except LaminarError as e:
            if not isinstance(e, Conflict) and not here():
                with contextlib.suppress(Unavailable):  # it ends by itself
                    await self._call("drop", "session", self._life, name)
            raise

    async def _begin(self, name: str) -> None:
        if (marked := _MARKED.fullmatch(name)) is not None and marked[1] == self.mark:
            return
        try:
            await self._check_anew(name, marked)
            await self._reserve([name])
        except Unavailable as e:
            log.warning("%s begins unclaimed, which another gateway may begin as well: %s", _words(name), e)

    async def _reserve(self, names: Sequence[str]) -> None:
        holders = await self._call("claim", "session", round(SESSION_TTL_S * 1000), *names)
        for name, holder in zip(names, holders, strict=True):
            await self._refuse(name, holder.decode().partition("/")[0])

    async def renew(self, names: Callable[[], Iterable[str]]) -> None:
        """Claims the names of live sessions and groups again and again, those of before this gateway's start and of
        while the Redis was away among them; until cancelled. `names`: of these."""
        while True:
            chosen = [name for name in names() if _MARKED.fullmatch(name) is None]
            for batch in (chosen[at : at + BATCH] for at in range(0, len(chosen), BATCH)):
                await self._renew(batch)
            await asyncio.sleep(SESSION_TTL_S / 4)

    async def _renew(self, names: Sequence[str]) -> None:
        try:
            await self._reserve(names)
        except Misdirected as e:
            log.error("a name is at two gateways: %s", e)
        except Unavailable:
            log.debug("%s: names of sessions are not claimed anew", self._server.address)

    async def find(self, name: str) -> None:
        """Misdirected for a session that another gateway has. Returns for one that none is known to have."""
        await self._check_anew(name, _MARKED.fullmatch(name))
        with contextlib.suppress(Unavailable):  # then it is what it is here: not known
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
        if holder and holder != self.gateway:
            if holder not in self._at:
                await self._look()
            raise self._misdirected(name, holder)

    def _shown(self, gateway: str) -> str:
        return f"{gateway} at {self._at[gateway]}" if gateway in self._at else gateway

    def _misdirected(self, name: str, gateway: str) -> Misdirected:
        url = self._at.get(gateway, "")
        return Misdirected(
            f"{_words(name)} is at another gateway, {self._shown(gateway)}",
            hint=f"send its calls to {url or 'that one'}; a session's `base_url` leads there",
            url=url,
        )

    async def _call(self, operation: str, *arguments: str | int) -> Any:
        return await self._server.call(
            SCRIPT, ROOM, operation, self.gateway, self._life, *arguments, wait_s=CLAIM_WAIT_S
        )


def of_group(group_id: str) -> str:
    """The name by which a group is claimed among those of sessions, none of which has a slash."""
    return f"group/{group_id}"


def _words(name: str) -> str:
    group = name.removeprefix(of_group(""))
    return f"session {name!r}" if group == name else f"group {group!r}"


def mark_of(gateway: str) -> str:
    """What the ids of sessions that the gateway makes carry, as `s-MARK-...`."""
    return gateway[-8:]
