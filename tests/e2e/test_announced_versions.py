"""A trainer that publishes and samples at once, and one whose model nobody serves: over a real relay."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from protos.errors import VersionUnknown
from tests.support.relays import Relays
from tests.support.scripted_engine import MODEL, ScriptedEngine
from tests.unit.gateway_api.test_status import gateway
from trainer_client import AsyncExperienceReader, AsyncPublisher

pytestmark = pytest.mark.slow

PUBLISHES = 30


async def test_a_version_is_known_when_it_is_sampled_and_a_wrong_models_is_not(
    relays: Relays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_client.experience.ANNOUNCED_PATIENCE_S", 0.0)
    address = (await asyncio.to_thread(relays.start, "a")).ready["grpc"]
    weights = {"w": np.ones(8, np.float32)}
    async with (
        ScriptedEngine("e0") as e0,
        gateway(tmp_path, e0, relay=address) as (found, _),
        AsyncExperienceReader(found.url) as reader,
    ):
        async with AsyncPublisher(address, "polciy") as publisher:
            ticket = await publisher.publish(weights, step=1)
        reader.trainer_version = ticket.version
        wrong = f"version 1 of model '{MODEL}': the newest is none; relays have versions of polciy"
        with pytest.raises(VersionUnknown, match=wrong):
            await reader.sample(trajectories=1, wait_s=0)
        async with AsyncPublisher(address, MODEL) as publisher:
            for step in range(PUBLISHES):
                ticket = await publisher.publish(weights, step=step)
                reader.trainer_version = ticket.version
                assert (await reader.sample(trajectories=1, wait_s=0)).why == "no trajectory waits"
        assert not found.parts.trainer.status().notes
        assert found.parts.trainer.version == ticket.version == PUBLISHES
