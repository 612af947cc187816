"""Calls of a store that gateways share, each repeated while the store is away.

Invariants:
- nothing is called before the store was checked: that it keeps what it acknowledges and takes writes, and that the
  namespace's layout, model and vocabulary are this gateway's; after each loss of the connection it is checked again;
- a call has landed when it returns. One whose reply was lost is repeated, so every call has to be idempotent;
- a call waits for `wait_s` at most, and then raises Unavailable: what it was for may have landed all the same;
- `failure` is the reason why the last call did not get through; empty while they do. One that began before the last
  check says nothing of the store as it is now: it sets none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Self

from gateway.core.addresses import StoreAddress
from gateway.log.base import StoreStatistics
from protos.errors import Conflict, InvalidRequest, LaminarError, Unavailable

log = logging.getLogger(__name__)

LAYOUT = 2
"""Of everything in a namespace. Layouts:
- 2: logs of commands (`gateway.log`);
- 1: experience as keys of their own, and a log of the prompt pool."""
WAIT_S = 10.0
"""How long a call is repeated by default."""
RETRY_S = 0.05
"""Before the first repetition; doubled after each, up to `RETRY_MAX_S`."""
RETRY_MAX_S = 1.0


@dataclass(frozen=True, slots=True)
class Namespace:
    """Gateways of one name share what is in it. `model`, `vocabulary`: of the token ids."""

    name: str = "default"
    model: str = ""
    vocabulary: str = ""

    def check(self, where: str, layout: str, model: str, vocabulary: str) -> None:
        """Raises Conflict for one that was made by others."""
        where = f"namespace {self.name!r} of {where}"
        if layout != str(LAYOUT):
            raise Conflict(
                f"{where} has layout {layout}, and this gateway knows {LAYOUT}",
                hint="start the gateway that wrote it, or give another --redis-namespace",
            )
        if model != self.model:
            raise Conflict(
                f"{where} keeps what model {model!r} generated, not {self.model!r}",
                hint=f"serve --model {model}, or give another --redis-namespace",
            )
        if vocabulary != self.vocabulary:
            raise Conflict(
                f"{where} keeps token ids of another vocabulary",
                hint="give the --tokenizer that they were made with, or another --redis-namespace",
            )


class Attempts(ABC):
    """`connected` grows with each check: what was read before may be older than what a store that came back has."""

    def __init__(self, address: Any, namespace: Namespace, *, accept_unchecked: bool = False) -> None:
        self.address: StoreAddress = address
        self.namespace, self._accept_unchecked = namespace, accept_unchecked
        self._lost = True  # the connection, so that the next attempt checks first
        self._checking = asyncio.Lock()
        self._failed = 0
        self._epoch = ""
        self._unchecked: list[str] = []
        self.failure = ""
        self.connected = 0

    @abstractmethod
    def _passes(self, error: Exception) -> bool:
        """Whether the same call may succeed later: by the error's class or code."""

    @abstractmethod
    async def _connect(self) -> None:
        """Connects anew, to the host that takes writes, and checks that it keeps what it acknowledges."""

    @abstractmethod
    async def _claim(self) -> None:
        """Makes the namespace, unless it is there, and passes what it says to `_claimed`."""

    @abstractmethod
    async def close(self) -> None: ...

    @classmethod
    async def connect(
        cls,
        address: Any,
        *,
        namespace: str = "default",
        model: str = "",
        vocabulary: str = "",
        accept_unchecked: bool = False,
    ) -> Self:
        """Raises InvalidRequest for a store that does not keep what it acknowledges, Conflict for a namespace of
        another model, vocabulary or layout, Unavailable when it does not answer."""
        store = cls(address, Namespace(namespace, model, vocabulary), accept_unchecked=accept_unchecked)
        try:
            await store.attempt(_nothing, 0.0)
        except BaseException:
            await store.close()
            raise
        if store._unchecked:
            log.warning("%s: accepted without a check: %s", address, ", ".join(store._unchecked))
        log.info("connected to %s, namespace %s", address, namespace)
        return store

    @classmethod
    async def examine(cls, address: Any, *, accept_unchecked: bool = False) -> list[str]:
        """As `connect`, without a namespace: changes nothing. Returns the settings that cannot be checked."""
        store = cls(address, Namespace(""), accept_unchecked=accept_unchecked)
        try:
            await store.attempt(store._connect, 0.0, check=False)
        finally:
            await store.close()
        return store._unchecked

    def check(self) -> None:
        """Raises Unavailable while calls do not get through."""
        if self.failure:
            raise self._unavailable(self.failure)

    def statistics(self) -> StoreStatistics:
        return StoreStatistics(
            str(self.address), self.namespace.name, self.failure, self._failed, self.connected, self._unchecked
        )

    async def attempt(self, work: Callable[[], Awaitable[Any]], wait_s: float, *, check: bool = True) -> Any:
        """What `work` returns, which is repeated for `wait_s` at most (0: one attempt)."""
        deadline, retry_s = time.monotonic() + wait_s, RETRY_S
        while True:
            began = self.connected
            error: LaminarError
            cause: Exception
            try:
                if check and self._lost:
                    await self._check_once()
                    began = self.connected
                found = await work()
            except (InvalidRequest, Conflict) as e:
                if not self.connected:
                    raise
                error, cause = self._unavailable(self._fail(e, began)), e  # another one came back: this may be mended
            except LaminarError:
                raise
            except Exception as e:
                if not self._passes(e):
                    raise
                error, cause = self._unavailable(self._fail(e, began)), e
            else:
                if self.failure:
                    log.info("%s answers again", self.address)
                    self.failure = ""
                return found
            if time.monotonic() + retry_s > deadline:
                raise error from cause
            await asyncio.sleep(retry_s)
            retry_s = min(RETRY_MAX_S, 2 * retry_s)

    def _fail(self, error: Exception, began: int) -> str:
        self._failed += 1
        failure = str(error) or type(error).__name__
        if began < self.connected:
            return failure
        self._lost = True
        if not self.failure and self.connected:
            log.error("%s: %s; what is to be kept there waits", self.address, failure)
        self.failure = failure
        return failure

    def _unavailable(self, failure: str) -> Unavailable:
        return Unavailable(f"{self.address}: {failure}", hint=f"try again once this {self.address.KIND} answers")

    async def _check_once(self) -> None:
        async with self._checking:
            if self._lost:
                await self._connect()
                await self._claim()
                self.connected += 1
                self._lost = False

    def _claimed(self, layout: str, model: str, vocabulary: str, epoch: str) -> None:
        """What the namespace says. `epoch`: of its making; another one than before means that all was lost."""
        self.namespace.check(str(self.address), layout, model, vocabulary)
        if self._epoch and epoch != self._epoch:
            log.error("%s has lost all that it kept: it came back empty", self.address)
        self._epoch = epoch


async def _nothing() -> None:
    """What a connection is checked for."""
