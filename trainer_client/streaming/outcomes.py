"""What became of each rank's part of a publish, and what all ranks make of it together.

Invariants:
- every rank comes to the same result, whichever rank failed, and whatever it raised: an error that is none of ours is
  named with its rank on the others, and is the cause of the one that its own rank raises; a rank that was interrupted
  (KeyboardInterrupt, SystemExit) raises that itself, once the others have heard;
- a rank that fails ends the version, and what the others then raise is a consequence: it never hides the cause.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable
from typing import ParamSpec

import msgspec

from paramserver.client import TicketData
from protos.decoding import decode_msgpack
from protos.errors import (
    BY_CODE,
    Conflict,
    InvalidRequest,
    LaminarError,
    NotFound,
    StaleEpoch,
    Unavailable,
    VersionLost,
)
from trainer_client.streaming.ranks import LEAVE_S, Ranks

log = logging.getLogger(__name__)

P = ParamSpec("P")

PASSES_MAX = 3
"""Times that tensors are taken for one version. Each waits for the next master by itself."""
WORDS_MAX = 1500
"""Of a message and of a hint that ranks exchange, in characters."""
OF_AN_ENDED_VERSION = frozenset({Conflict.code, NotFound.code, VersionLost.code})
"""What a relay replies to a rank whose version another rank has ended meanwhile."""


class Outcome(msgspec.Struct):
    """What became of one rank's part. `code`: of its error; "" for none. `again`: the next master may take it."""

    code: str = ""
    message: str = ""
    hint: str = ""
    again: bool = False
    same: str = ""  # a digest of the manifest
    run: str = ""
    ticket: TicketData | None = None

    @classmethod
    def of(cls, error: LaminarError) -> Outcome:
        again = isinstance(error, StaleEpoch | Unavailable)
        code = next(
            kind.code for kind in type(error).__mro__ if issubclass(kind, LaminarError) and kind.code in BY_CODE
        )
        return cls(code, error.message[:WORDS_MAX], error.hint[:WORDS_MAX], again)

    def error(self) -> LaminarError:
        return BY_CODE.get(self.code, LaminarError)(self.message, hint=self.hint)


class Agreement:
    """One rank's part in what all ranks make of a publish."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._foreign: tuple[str, BaseException] | None = None  # an error here that is none of ours, by its message

    def tried(self, work: Callable[P, Outcome], *args: P.args, **kwargs: P.kwargs) -> Outcome:
        """The outcome of `work`, which takes part in no collective, or that of its error."""
        try:
            return work(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001  (raised by every rank, once they have agreed)
            return self.failed(error)

    def failed(self, error: BaseException) -> Outcome:
        """The outcome of a rank that raised `error`. A trainer of one process raises it as it is."""
        if isinstance(error, LaminarError):
            return Outcome.of(error)
        if self._ranks.count == 1:
            raise error
        found = Outcome.of(LaminarError(f"rank {self._ranks.index} raised {type(error).__name__}: {error}"))
        self._foreign = (found.message, error)
        return found

    def error(self, found: Outcome) -> BaseException:
        """What this rank raises: the error that all do, but for what interrupted it."""
        if self._foreign is not None and not isinstance(self._foreign[1], Exception):
            return self._foreign[1]
        error = found.error()
        if self._foreign is not None and self._foreign[0] == found.message:
            error.__cause__ = self._foreign[1]
        return error

    def agreed(self, outcome: Outcome) -> Outcome:
        """See the function of that name."""
        return agreed(self._ranks, outcome)

    def through(self, stages: Iterable[Callable[[], Outcome]], give_up: Callable[[LaminarError], object]) -> Outcome:
        """What all ranks make of stages that each goes through, one after the other, until one fails.

        `give_up` ends the version of this rank, if it has one. An error that comes out of a stage is of a collective:
        the ranks are out of step, and only the caller knows how to get them out. It goes through at once.
        """
        found = Outcome()
        try:
            for stage in stages:
                found = self.agreed(stage())
                if found.code:
                    break
        except BaseException as error:
            give_up(LaminarError(f"its publisher raised {type(error).__name__}: {error}"))
            raise
        if found.code and found.ticket is None:
            give_up(found.error())
        return found

    def can_leave(self, error: BaseException) -> bool:
        """Whether the others come to the next exchange although this rank's iterator raised `error`: they have taken
        all that they take together, as those do who share `gathered`. Waits for LEAVE_S."""
        others_come = getattr(self._ranks, "others_come", None)
        if self._ranks.count == 1 or others_come is None:
            return False
        traceback.clear_frames(error.__traceback__)  # they hold the `gathered` below, which goes on when it is let go
        return bool(others_come(LEAVE_S))

    def in_passes(self, one_pass: Callable[[], Outcome], num_max: int) -> TicketData:
        """The ticket of the first pass that succeeds, of at most `num_max`. Raises the error that all agreed on."""
        for number in range(1, num_max + 1):
            found = one_pass()
            if not found.code:
                assert found.ticket is not None, "the first rank writes, and has a ticket"
                return found.ticket
            if not found.again or number == num_max:
                break
            log.warning("the publish begins again: %s", found.message)
        raise self.error(found)


def agreed(ranks: Ranks, outcome: Outcome) -> Outcome:
    """The outcome of all ranks: an error if there is one, else one with a ticket.

    Of errors, one that may be the consequence of another comes last; before it one after which the publish begins
    again, and first one after which it does not.
    """
    if ranks.count == 1:
        return outcome
    sent = msgspec.msgpack.encode(outcome)
    found = [decode_msgpack(one, Outcome) for one in ranks.exchange(sent)]
    failed = [one for one in found if one.code]
    if failed:
        return min(failed, key=lambda one: (one.code in OF_AN_ENDED_VERSION, one.again))
    if len({one.same for one in found}) > 1:
        return Outcome.of(
            InvalidRequest("the ranks announce different tensors", hint="pass the same manifest on every rank")
        )
    if len({one.run for one in found}) > 1:
        return Outcome.of(InvalidRequest("the ranks are of different runs", hint="pass the same run= on every rank"))
    return next((one for one in found if one.ticket is not None), found[0])
