"""What becomes of a publish whose commit had no reply, while the model has no master."""

from __future__ import annotations

import contextlib
from typing import Any, cast

import pytest

from paramserver.client import commits
from paramserver.client.commits import settled
from paramserver.client.doubts import Doubt, Doubts, TicketData
from paramserver.client.relay import RelayClient
from protos.errors import InDoubt, LaminarError, NotFound, Unavailable, VersionLost


class WithoutMaster:
    """A relay that knows of the master's death, and of nobody who took its place."""

    def __init__(self, refusal: LaminarError) -> None:
        self.doubts = Doubts()
        self._refusal = refusal

    async def last_master_of(self, model: str) -> RelayClient:
        return cast(RelayClient, self)

    async def master_of(self, model: str) -> RelayClient:
        raise self._refusal


@pytest.mark.parametrize("refusal", [Unavailable("a is not a member now"), NotFound("an older relay's word for it")])
async def test_between_a_master_and_the_next_nothing_is_published_again(
    refusal: LaminarError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "MASTER_WAIT_S", 0.05)
    monkeypatch.setattr(commits, "RETRY_S", 0.01)
    relay: Any = WithoutMaster(refusal)
    relay.doubts.add(Doubt(TicketData("policy", 1, "job", 7, "", 0)))
    with pytest.raises(InDoubt, match="publish step 7 again"):
        await settled(relay, "policy", 7)
    assert relay.doubts.of("policy", 7) is not None


def doubt(step: int) -> Doubt:
    return Doubt(TicketData("policy", step, "job", step, "", 0))


def test_publishes_that_run_side_by_side_keep_their_own_doubts() -> None:
    doubts, first, second = Doubts(), doubt(1), doubt(2)
    with contextlib.suppress(InDoubt), doubts.while_unknown(first, VersionLost):
        with doubts.while_unknown(second, VersionLost):
            assert doubts.drop_ended("policy", but=2) == [], "the first one is waited for"
            assert doubts.newest("policy") is second
        assert doubts.of("policy", 2) is None
        raise InDoubt("not known in time")
    assert doubts.of("policy", 1) is first
    assert doubts.drop_ended("policy", but=1) == []
    assert doubts.drop_ended("policy", but=3) == [first]
    assert doubts.newest("policy") is None


@pytest.mark.parametrize(
    ("error", "stays"), [(VersionLost("gone"), False), (InDoubt("?"), True), (KeyboardInterrupt(), True), (None, False)]
)
def test_a_doubt_goes_with_the_outcome_and_with_nothing_else(error: BaseException | None, stays: bool) -> None:
    doubts, one = Doubts(), doubt(1)
    with contextlib.suppress(LaminarError, KeyboardInterrupt), doubts.while_unknown(one, LaminarError):
        if error is not None:
            raise error
    assert (doubts.of("policy", 1) is one) == stays
    doubts.add(again := doubt(1))
    doubts.end(one)
    assert doubts.of("policy", 1) is again
