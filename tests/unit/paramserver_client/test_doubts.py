"""What becomes of a publish whose commit had no reply, while the model has no master."""

from __future__ import annotations

from typing import Any, cast

import pytest

from paramserver.client import commits
from paramserver.client.commits import Doubt, settled
from paramserver.client.relay import RelayClient
from paramserver.client.ticket import Ticket
from protos.errors import InDoubt, LaminarError, NotFound, Unavailable


class WithoutMaster:
    """A relay that knows of the master's death, and of nobody who took its place."""

    def __init__(self, refusal: LaminarError) -> None:
        self.doubts: dict[str, Doubt] = {}
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
    relay.doubts["policy"] = Doubt(Ticket(relay, "policy", 1, "job", 7, None), None)
    with pytest.raises(InDoubt, match="publish step 7 again"):
        await settled(relay, "policy", 7)
    assert "policy" in relay.doubts
