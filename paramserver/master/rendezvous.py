"""The rendezvous of one trainer's ranks: they wait for each other before their version is numbered.

Invariants:
- the version begins once, when the last rank has announced, and every rank gets the same draft or the same error;
- errors name the ranks that are absent;
- a version that began while a rank was leaving is given up: nobody would write that rank's files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from paramserver.core.layout import Part
from protos.errors import Conflict, LaminarError, Unavailable

if TYPE_CHECKING:
    from paramserver.master.drafts import Draft

Begin = Callable[[Sequence[Part]], Awaitable["Draft"]]
GiveUp = Callable[["Draft", str], None]


class Rendezvous:
    """One version of `count` ranks; `what` names it in errors."""

    def __init__(self, count: int, what: str) -> None:
        self._count = count
        self._what = what
        self._parts: dict[int, Part] = {}
        self._all_here = asyncio.Event()
        self._draft: asyncio.Future[Draft] = asyncio.get_running_loop().create_future()

    @property
    def over(self) -> bool:
        """Whether the version began or failed, or all ranks left."""
        return self._draft.done() or not self._parts

    async def join(self, rank: int, part: Part, begin: Begin, give_up: GiveUp, timeout_s: float) -> Draft:
        """Waits for the other ranks; the last one begins. Unavailable names the ranks that were late, or left since.

        `timeout_s` bounds the wait for the others. `begin`, which waits for room, has a deadline of its own.
        """
        if rank in self._parts:
            raise Conflict(f"rank {rank} has announced {self._what} already", hint="give each rank its own number")
        # All ranks were here once, so the last one waits for room in `begin` now. A rank that left meanwhile cannot
        # come back into the same version: its earlier call has ended, and `_settle` gives the version up for its
        # absence.
        if self._all_here.is_set():
            raise Unavailable(f"rank {rank} left {self._what} while it waited for room", hint="announce it again soon")
        self._parts[rank] = part
        if len(self._parts) == self._count:
            self._all_here.set()
            await self._begin(begin, give_up)
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._all_here.wait()
            except TimeoutError:
                self._end_for_all(timeout_s)
            return await asyncio.shield(self._draft)
        finally:
            if not self._draft.done():
                del self._parts[rank]

    def _end_for_all(self, after_s: float) -> None:
        """One error for all ranks that are here, so that they retry together.

        Were each wait to end by itself, the first rank to leave would be absent for the others, and be named by them.
        """
        if not self._draft.done():
            absent = self._absent()
            why = f"{absent} of {self._count} did not announce {self._what} in {after_s:g} s"
            hint = "every rank calls publish for every version, with the same run and step"
            self._draft.set_exception(Unavailable(why, hint=hint))
        self._all_here.set()

    def _absent(self) -> str:
        """ "rank 2", or "ranks 0, 2"."""
        numbers = [str(n) for n in range(self._count) if n not in self._parts]
        return f"rank{'s' * (len(numbers) > 1)} {', '.join(numbers)}"

    async def _begin(self, begin: Begin, give_up: GiveUp) -> None:
        try:
            draft = await begin([self._parts[n] for n in range(self._count)])
        except LaminarError as error:
            self._draft.set_exception(error)
        except BaseException:
            self._draft.set_exception(Unavailable(f"{self._what} could not begin: the last rank to announce it left"))
            raise
        else:
            self._settle(draft, give_up)

    def _settle(self, draft: Draft, give_up: GiveUp) -> None:
        if len(self._parts) == self._count:
            self._draft.set_result(draft)
            return
        why = f"{self._absent()} of {self._count} left while {self._what} waited for room"
        give_up(draft, why)
        self._draft.set_exception(Unavailable(why, hint="every rank stays until the version has begun"))
