"""Where the ranks of one trainer meet before their version is numbered.

Invariants:
- the version begins once, when the last rank has come, and every rank gets the same draft or the same error;
- a rank that leaves before that is missed by name;
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


class Meeting:
    """One version of `count` ranks; `what` names it in errors."""

    def __init__(self, count: int, what: str) -> None:
        self._count = count
        self._what = what
        self._parts: dict[int, Part] = {}
        self._all_here = asyncio.Event()
        self._draft: asyncio.Future[Draft] = asyncio.get_running_loop().create_future()

    @property
    def over(self) -> bool:
        """Begun or failed, or nobody is here any more."""
        return self._draft.done() or not self._parts

    async def attend(self, rank: int, part: Part, begin: Begin, give_up: GiveUp, timeout_s: float) -> Draft:
        """Waits for the others; the last to come begins. Unavailable names who did not come in time, or left since.

        `timeout_s` bounds the wait for the others. `begin`, which waits for room, has a deadline of its own.
        """
        if rank in self._parts:
            raise Conflict(f"rank {rank} has announced {self._what} already", hint="give each rank its own number")
        if self._all_here.is_set():  # it left while room was waited for: what begins without it is given up
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
        """Those who are here come again together; each would name the others if its own wait ended by itself."""
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
