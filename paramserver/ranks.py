"""Where the ranks of one trainer meet before their version is numbered.

Invariants:
- the version begins once, when the last rank has come, and every rank gets the same draft or the same error;
- a rank that leaves before that is missed by name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from paramserver.core.layout import Part
from protos.errors import Conflict, LaminarError, Unavailable

if TYPE_CHECKING:
    from paramserver.drafts import Draft

Begin = Callable[[Sequence[Part]], Awaitable["Draft"]]


class Meeting:
    """One version of `count` ranks; `what` names it in errors."""

    def __init__(self, count: int, what: str) -> None:
        self._count = count
        self._what = what
        self._parts: dict[int, Part] = {}
        self._draft: asyncio.Future[Draft] = asyncio.get_running_loop().create_future()

    @property
    def over(self) -> bool:
        """Begun or failed, or nobody is here any more."""
        return self._draft.done() or not self._parts

    async def attend(self, rank: int, part: Part, begin: Begin, timeout_s: float) -> Draft:
        """Waits for the others; the last to come begins. Unavailable names who did not come in time."""
        if rank in self._parts:
            raise Conflict(f"rank {rank} has announced {self._what} already", hint="give each rank its own number")
        self._parts[rank] = part
        if len(self._parts) == self._count:
            await self._begin(begin)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._draft)
        except TimeoutError:
            missing = [str(n) for n in range(self._count) if n not in self._parts]
            raise Unavailable(
                f"ranks {', '.join(missing)} of {self._count} did not announce {self._what} in {timeout_s:g} s",
                hint="every rank calls publish for every version, with the same run and step",
            ) from None
        finally:
            if not self._draft.done():
                del self._parts[rank]

    async def _begin(self, begin: Begin) -> None:
        try:
            draft = await begin([self._parts[n] for n in range(self._count)])
        except LaminarError as error:
            self._draft.set_exception(error)
        except BaseException:
            self._draft.set_exception(Unavailable(f"{self._what} could not begin"))
            raise
        else:
            self._draft.set_result(draft)
