"""Callers without the right to what they try, for as long as the soak runs: one that is let in fails it.

A call that meets a fault says nothing. What refuses in words is counted, so that a run shows that somebody was asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import aiohttp

from paramserver.client import RelayClient
from protos.access.credentials import Credentials
from protos.errors import Forbidden, LaminarError, Unauthenticated
from tests.soak.access import Access
from tests.soak.judge import Judge
from tests.soak.work import MODEL

TRY_S = 5.0
TIMEOUT_S = 5.0


class Strangers:
    """They try at each of `relays` (addresses by name) and `gateways` (URLs by name), at no link: no fault spares them
    an answer."""

    def __init__(self, access: Access, relays: Mapping[str, str], gateways: Mapping[str, str], judge: Judge) -> None:
        self._access, self._relays, self._gateways, self._judge = access, relays, gateways, judge

    async def run(self) -> None:
        """For ever."""
        while True:
            await self.once()
            await asyncio.sleep(TRY_S)

    async def once(self) -> None:
        """Each attempt at each of them."""
        reader = Credentials(self._access.of("reader"))
        agent = {"Authorization": f"Bearer {self._access.keys['runner']}"}
        for name, address in self._relays.items():
            await self._try(f"nobody, at {name}", partial(_status, address))
            await self._try(f"a reader that pins, at {name}", partial(_pin, address, reader))
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as http:
            for name, url in self._gateways.items():
                await self._try(f"nobody, at {name}", partial(_sample, http, url, {}))
                await self._try(f"an agent that samples, at {name}", partial(_sample, http, url, agent))

    async def _try(self, who: str, attempt: Callable[[], Awaitable[None]]) -> None:
        try:
            await attempt()
        except (Forbidden, Unauthenticated):
            self._judge.counts["strangers refused"] += 1
        except (LaminarError, OSError, TimeoutError, aiohttp.ClientError):
            pass  # the handshake ended, or a fault met the call: nobody was let in
        else:
            self._judge.find("stranger let in", who)


async def _status(address: str) -> None:
    """Without credentials, in the clear."""
    async with RelayClient(address, timeout_s=TIMEOUT_S) as relay:
        await relay.status()


async def _pin(address: str, credentials: Credentials) -> None:
    async with RelayClient(address, timeout_s=TIMEOUT_S, credentials=credentials) as relay:
        await relay.acquire(MODEL, None, holder="stranger")


async def _sample(http: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> None:
    async with http.post(f"{url}/experience/sample", json={"trajectories": 1}, headers=headers) as answer:
        if answer.status in (401, 403):
            raise Forbidden(await answer.text())
        answer.raise_for_status()
