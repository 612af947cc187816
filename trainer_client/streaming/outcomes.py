"""What became of each rank's part of a publish, and what all ranks make of it together.

Invariants: every rank comes to the same result, whichever rank failed. A rank that fails ends the version, and what
the others then raise is a consequence: it never hides the cause.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

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
from trainer_client.streaming.ranks import Ranks

log = logging.getLogger(__name__)

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


def in_passes(one_pass: Callable[[], Outcome], num_max: int) -> TicketData:
    """The ticket of the first pass that succeeds, of at most `num_max`. Raises the error that all ranks agreed on."""
    for number in range(1, num_max + 1):
        found = one_pass()
        if not found.code:
            assert found.ticket is not None, "the first rank writes, and has a ticket"
            return found.ticket
        if not found.again or number == num_max:
            break
        log.warning("the publish begins again: %s", found.message)
    raise found.error()
