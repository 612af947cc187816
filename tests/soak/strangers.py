"""Callers without the right to what they try, for as long as the soak runs: one that is let in fails it.

A call that meets a fault says nothing. What refuses is counted, so that a run shows that somebody was asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import aiohttp

from protos.access.credentials import Credentials
from protos.errors import Forbidden, LaminarError, Unauthenticated
from tests.soak import attempts
from tests.soak.access import Access
from tests.soak.judge import Judge
from tests.soak.places import Places

TRY_S = 5.0

Attempt = tuple[str, str, Callable[[], Awaitable[None]]]
"""Who tries, at what, and how: it returns when it was let in."""


class Strangers:
    """They try at each of `places`, at no link: no fault spares them an answer."""

    def __init__(self, access: Access, places: Places, judge: Judge) -> None:
        self._access, self._places, self._judge = access, places, judge

    async def run(self) -> None:
        """For ever."""
        while True:
            await self.once()
            await asyncio.sleep(TRY_S)

    async def once(self) -> None:
        """Each attempt at each of them."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=attempts.TIMEOUT_S)) as http:
            for who, where, attempt in (*self._at_relays(), *self._at_engines(), *self._at_gateways(http)):
                await self._try(who, where, attempt)

    def _at_relays(self) -> Iterator[Attempt]:
        reader, foreigner = Credentials(self._access.of("reader")), Credentials(self._access.elsewhere / "admin")
        for name, address in self._places.relays.items():
            yield "nobody", name, partial(attempts.status, address)
            yield "a reader that pins", name, partial(attempts.pin, address, reader)
        for name, address in self._places.data.items():
            yield "nobody that fetches", name, partial(attempts.fetch, address, None)
            yield "another fleet's administrator that fetches", name, partial(attempts.fetch, address, foreigner)

    def _at_engines(self) -> Iterator[Attempt]:
        trainer = attempts.tls_of(Credentials(self._access.of("trainer")))
        nobody = attempts.tls_without_certificate()
        for name, door in self._places.engines.items():
            yield "nobody that loads, in the clear", name, partial(attempts.load, door, None)
            yield "nobody that loads", name, partial(attempts.load, door, nobody)
            yield "a trainer that loads", name, partial(attempts.load, door, trainer)

    def _at_gateways(self, http: aiohttp.ClientSession) -> Iterator[Attempt]:
        agent = {"Authorization": f"Bearer {self._access.keys['runner']}"}
        for name, url in self._places.gateways.items():
            yield "nobody", name, partial(attempts.sample, http, url, {})
            yield "an agent that samples", name, partial(attempts.sample, http, url, agent)

    async def _try(self, who: str, where: str, attempt: Callable[[], Awaitable[None]]) -> None:
        try:
            await attempt()
        except (Forbidden, Unauthenticated):
            self._judge.counts["strangers refused"] += 1
            self._judge.counts[f"refused, of them: {who}, at {where.rpartition('-')[0]}s"] += 1
        except (LaminarError, OSError, TimeoutError, aiohttp.ClientError):
            pass  # the handshake ended, or a fault met the call: nobody was let in
        else:
            self._judge.find("stranger let in", f"{who}, at {where}")
