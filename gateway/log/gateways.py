"""The gateways that share a log, to each other: where each is reached, which engines are whose, and which sessions.

Invariants:
- a session's id that a gateway made carries the gateway's mark, so any gateway knows whose it is without a call;
- a name that a client chose is claimed before the session is made, as is each group's: no name is at two gateways;
- claims are commands of a log (`gateway.core.claims`), and end by its clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from gateway.core.claims import ClaimNames, ClaimState, Command, DropClaims, Kind, ShowGateway
from gateway.log.base import Hooks, Outcome, SharedStore, Timed
from gateway.log.replicated import Replicated
from protos.decoding import decode_msgpack
from protos.errors import Conflict, LaminarError, Misdirected, Unavailable

log = logging.getLogger(__name__)

ROOM = "gateways"
SHOW_S = 5.0
"""Between two looks at where the others are."""
SESSION_TTL_S = 3600.0
"""How long a name that a client chose stays with its gateway after its last renewal: also after its session's end."""
BATCH = 1000
"""Names of one call."""
CLAIM_WAIT_S = 2.0
_MARKED = re.compile(r"s-([0-9a-f]{8})-[0-9a-f]{16}")


class _ClaimMachine:
    """The claims as what a log's commands change."""

    def __init__(self) -> None:
        self.state = ClaimState()

    def decode(self, command: bytes) -> Command:
        found: Command = decode_msgpack(command, Command)
        return found

    async def apply(self, commands: Sequence[Timed]) -> Sequence[Outcome]:
        return [self.state.carry_out(timed.command, timed.unix_s) for timed in commands]

    async def resume(self, now: float) -> None:
        """There is nothing but the log."""

    async def dump(self) -> Sequence[bytes]:
        return [msgspec.msgpack.encode(self.state)]

    async def restore(self, dumped: Sequence[bytes]) -> None:
        self.state = decode_msgpack(dumped[0], ClaimState) if dumped else ClaimState()

    def undo(self, command: Command) -> None:
        """A claim whose answer was lost ends by itself."""
        return

    def keeps(self, body: str) -> bool:
        return False


class GatewayLog:
    """The claims of all gateways over one store, as this one follows them."""

    def __init__(self, store: SharedStore) -> None:
        self.address = store.address
        self._machine = _ClaimMachine()
        hooks = Hooks(lambda command, outcome, mine: None, lambda: None)
        self._commands = Replicated(store.log(ROOM), self._machine, hooks, store, ROOM, CLAIM_WAIT_S)
        self.open, self.close, self.look = self._commands.open, self._commands.close, self._commands.look

    @property
    def urls(self) -> Mapping[str, str]:
        """Where gateways are reached."""
        return self._machine.state.urls

    def holder(self, kind: Kind, name: str) -> str:
        """The gateway that has the name; empty for none."""
        found = self._machine.state.holder(kind, name, self._commands.now())
        return "" if found is None else found.gateway

    async def show(self, gateway: str, url: str) -> None:
        await self._commands.run(ShowGateway(gateway, url))

    async def claim(self, wanted: ClaimNames) -> dict[str, tuple[str, str]]:
        """Of those that are another's, its gateway and life."""
        found = await self._commands.run(wanted)
        return {name: (claim.gateway, claim.life) for name, claim in found.items()}

    async def drop(self, dropped: DropClaims) -> None:
        await self._commands.run(dropped)


class SharedGateways:
    """`gateway`: this one's name, which stays with its `--data`. `claim_ttl_s`: of engines. `life`: of this process;
    `is_over`: whether that of another one is known to have ended. Implements `gateway.fleet.claims.ClaimStore`.

    `claims`: its owner opens and closes it."""

    def __init__(
        self, claims: GatewayLog, gateway: str, claim_ttl_s: float, life: str, is_over: Callable[[str], bool]
    ) -> None:
        self._claims, self.gateway, self._ttl_s = claims, gateway, claim_ttl_s
        self._life, self._is_over = life, is_over
        self._url = ""
        self.mark = mark_of(gateway)

    async def show(self, url: str) -> None:
        """This gateway is reached at `url` from now on."""
        self._url = url
        await self._claims.show(self.gateway, url)

    async def run(self) -> None:
        """Shows itself again and again, until cancelled."""
        while True:
            await asyncio.sleep(SHOW_S)
            try:
                await self._claims.show(self.gateway, self._url)
            except Unavailable:
                log.debug("%s: this gateway cannot show itself", self._claims.address)

    # -- engines

    async def claim(self, names: Collection[str]) -> Mapping[str, str]:
        held = await self._claimed(names)
        if over := [name for name, (who, life) in held.items() if who == self.gateway and self._is_over(life)]:
            for name in over:
                await self._claims.drop(DropClaims("engine", [name], self.gateway, held[name][1]))
            held = await self._claimed(names)
        return {name: self._shown(who) for name, (who, _) in held.items()}

    async def _claimed(self, names: Collection[str]) -> dict[str, tuple[str, str]]:
        """The gateway and its life that have what this one has not got."""
        return await self._claims.claim(ClaimNames("engine", list(names), self.gateway, self._life, self._ttl_s))

    async def drop(self, names: Collection[str]) -> None:
        await self._claims.drop(DropClaims("engine", list(names), self.gateway, self._life))

    # -- sessions

    @contextlib.asynccontextmanager
    async def reserved(self, name: str, here: Callable[[], bool]) -> AsyncIterator[None]:
        """Around the making of a session or group of this name: claims it, where this gateway did not make the name.
        Misdirected for one of another gateway's. While the store does not say it begins unclaimed. Where it is refused,
        and none is `here`, the name is free again."""
        await self._begin(name)
        try:
            yield
        except LaminarError as e:
            if not isinstance(e, Conflict) and not here():
                with contextlib.suppress(Unavailable):  # it ends by itself
                    await self._claims.drop(DropClaims("session", [name], self.gateway, self._life))
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
        wanted = ClaimNames("session", names, self.gateway, self._life, SESSION_TTL_S)
        for name, (holder, _) in (await self._claims.claim(wanted)).items():
            self._refuse(name, holder)

    async def renew(self, names: Callable[[], Iterable[str]]) -> None:
        """Claims the names of live sessions and groups again and again, those of before this gateway's start and of
        while the store was away among them; until cancelled. `names`: of these."""
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
            log.debug("%s: names of sessions are not claimed anew", self._claims.address)

    async def find(self, name: str) -> None:
        """Misdirected for a session that another gateway has. Returns for one that none is known to have."""
        await self._check_anew(name, _MARKED.fullmatch(name))
        with contextlib.suppress(Unavailable):  # then it is what it is here: not known
            await self._claims.look()
            self._refuse(name, self._claims.holder("session", name))

    def check(self, name: str) -> None:
        """As `find`, by the mark of an id that a gateway made, without a call."""
        found = _MARKED.fullmatch(name)
        if found is not None and found[1] != self.mark:
            owner = next((gateway for gateway in self._claims.urls if mark_of(gateway) == found[1]), None)
            if owner is not None:
                raise self._misdirected(name, owner)

    async def _check_anew(self, name: str, marked: re.Match[str] | None) -> None:
        if marked is not None and marked[1] not in map(mark_of, self._claims.urls):
            await self._claims.look()
        self.check(name)

    def _refuse(self, name: str, holder: str) -> None:
        if holder and holder != self.gateway:
            raise self._misdirected(name, holder)

    def _shown(self, gateway: str) -> str:
        url = self._claims.urls.get(gateway)
        return gateway if url is None else f"{gateway} at {url}"

    def _misdirected(self, name: str, gateway: str) -> Misdirected:
        url = self._claims.urls.get(gateway, "")
        return Misdirected(
            f"{_words(name)} is at another gateway, {self._shown(gateway)}",
            hint=f"send its calls to {url or 'that one'}; a session's `base_url` leads there",
            url=url,
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
