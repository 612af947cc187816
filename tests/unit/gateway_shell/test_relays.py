"""The gateway's view of the relays beside engines."""

from __future__ import annotations

import asyncio

import pytest

from gateway import relays
from gateway.relays import Relays
from paramserver.client import RelayClient
from tests.support.cutting_engine import until


async def test_a_relay_that_does_not_answer_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = 0
    versions = RelayClient.versions

    async def counted(client: RelayClient, model: str) -> object:
        nonlocal asked
        asked += 1
        return await versions(client, model)

    monkeypatch.setattr(relays, "RETRY_S", 0.01)
    monkeypatch.setattr(RelayClient, "versions", counted)
    async with asyncio.TaskGroup() as tasks:
        found = Relays("policy", tasks, lambda address, version: None)
        found.follow("127.0.0.1:1")
        await until(lambda: asked > 3, "the relay asked again")
        await found.let_go("127.0.0.1:1")
    said = [r.getMessage() for r in caplog.records if r.name == "gateway.relays"]
    assert len(said) == 1
    assert "relay 127.0.0.1:1 does not answer yet, and is asked again until it does: no relay answers at" in said[0]
