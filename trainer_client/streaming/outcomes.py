"""What became of each rank's part of a publish, and what all ranks make of it together.

Invariants: every rank comes to the same result, whichever rank failed; an error that begins nothing again comes before
one that does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from paramserver.client import TicketData
from protos.decoding import decode_msgpack
from protos.errors import BY_CODE, InvalidRequest, LaminarError, StaleEpoch, Unavailable
from trainer_client.streaming.ranks import Ranks

log = logging.getLogger(__name__)

PASSES_MAX = 3
"""Times that tensors are taken for one version. Each waits for the next master by itself."""
WORDS_MAX = 1500
"""Of a message and of a hint that ranks exchange, in characters."""


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
    """The outcome of all ranks: an error that begins nothing again, else one that does, else one with a ticket."""
    if ranks.count == 1:
        return outcome
    sent = msgspec.msgpack.encode(outcome)
    found = [decode_msgpack(one, Outcome) for one in ranks.exchange(sent)]
    failed = [one for one in found if one.code]
    if failed:
        return next((one for one in failed if not one.again), failed[0])
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
