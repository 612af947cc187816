"""Whether a relay has announced the version that a trainer says it published.

Invariants:
- a version that is not known yet is waited for, up to `WAIT_S`: a trainer samples as soon as its tensors are copied,
  before its version is sealed and has come to a relay. What was given a number counts as announced, also if it is lost;
- while no relay answers, or none reaches its registry, nothing is said against a version: who asked decides without
  them. A gateway that has just started waits for their first answer before that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from gateway.core.types import NO_VERSION, Version

WAIT_S = 5.0
LOOK_S = 1.0
"""Between two looks at the relays themselves, whose watches may be late or cut."""


@dataclass(frozen=True, slots=True)
class Looked:
    """What relays say now: the newest version of the model that was announced, sealed or not, and the other models
    there. `certain`: one of them reaches its registry, so that it knows of every announcement."""

    newest: Version = NO_VERSION
    others: Sequence[str] = ()
    certain: bool = False


@dataclass(frozen=True, slots=True)
class Heard:
    """`nobody`: no relay answers, or there is none. `others`: models that the relays have besides, of one unknown."""

    verdict: Literal["announced", "unknown", "nobody"]
    others: Sequence[str] = ()


class Announcers(Protocol):
    """The relays that a gateway follows."""

    def addresses(self) -> Sequence[str]: ...

    def answering(self) -> Sequence[str]: ...

    async def look(self) -> Looked: ...


class Announcements:
    """`newest`: the newest version that a watch has reported; `changed` is called whenever one reports."""

    def __init__(self, relays: Announcers, newest: Callable[[], Version]) -> None:
        self._relays, self._newest = relays, newest
        self._changed = asyncio.Event()  # replaced at each change: whoever took it before a look misses none
        self._first_answer_until = asyncio.get_running_loop().time() + WAIT_S

    def changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def heard_of(self, version: Version) -> Heard:
        loop, looked = asyncio.get_running_loop(), Looked()
        deadline = loop.time() + WAIT_S
        while True:
            changed, answering = self._changed, bool(self._relays.answering())
            if answering:
                if version <= self._newest():
                    return Heard("announced")
                looked = await self._relays.look()
                if version <= looked.newest:
                    return Heard("announced")
            elif not self._relays.addresses() or loop.time() >= min(deadline, self._first_answer_until):
                return Heard("nobody")
            remaining_s = deadline - loop.time()
            if remaining_s <= 0:
                return Heard("unknown", looked.others) if looked.certain else Heard("nobody")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(LOOK_S, remaining_s)):
                    await changed.wait()
