"""What ranks of one publish make of their errors together."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from protos.errors import Conflict, Corrupt, InvalidRequest, LaminarError, StaleEpoch, Unavailable, VersionLost
from trainer_client.streaming.outcomes import Outcome, agreed


class Gathered:
    """Ranks whose outcomes are known."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.count, self.index = len(outcomes), 0
        self._sent = [msgspec.msgpack.encode(one) for one in outcomes]

    def exchange(self, data: bytes) -> list[bytes]:
        assert data == self._sent[0]
        return self._sent


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("cause", "consequence"),
    [
        # one rank found NaN and ended the version, under the hands of another that writes or commits
        (InvalidRequest("tensor 'w' holds NaN"), Conflict("version 1 has ended")),
        (InvalidRequest("tensor 'w' holds NaN"), VersionLost("version 1 has ended")),
        (InvalidRequest("tensor 'w' holds NaN"), StaleEpoch("another master")),
        # a chunk was damaged on its way: the version can be published again, whatever the others met meanwhile
        (StaleEpoch("damaged on its way"), Conflict("version 1 has ended")),
        (Unavailable("connection lost"), VersionLost("version 1 has ended")),
        (Corrupt("digests differ"), Unavailable("connection lost")),
    ],
)
def test_the_cause_comes_before_its_consequence(cause: LaminarError, consequence: LaminarError, turned: bool) -> None:
    outcomes = [Outcome.of(cause), Outcome.of(consequence), Outcome()]
    if turned:
        outcomes = [outcomes[1], outcomes[2], outcomes[0]]
    found = agreed(Gathered(outcomes), outcomes[0])
    assert (type(found.error()), found.message) == (type(cause), cause.message)
