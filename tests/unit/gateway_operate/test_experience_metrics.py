"""What /metrics tells of finished trajectories: what waits, what trainers took, how stale it was, what was removed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import aiohttp

from gateway.core.types import Version
from gateway.operate.metrics import STALENESS_MAX
from tests.support.scripted_engine import MODEL, ScriptedEngine
from tests.unit.gateway_api.test_status import gateway


async def series(http: aiohttp.ClientSession) -> dict[str, float]:
    """Name and labels of ours, those of OpenTelemetry left out, to the value; zeros are left out."""
    async with http.get("/metrics") as answer:
        text = await answer.text()
    told: dict[str, float] = {}
    for name, labels, value in re.findall(r"^laminar_gateway_(\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        pairs = [f"{key}={of}" for key, of in re.findall(r'(\w+)="([^"]*)"', labels) if not key.startswith("otel_")]
        told[" ".join([name, *pairs])] = float(value)
    return {name: value for name, value in told.items() if value}


async def post(http: aiohttp.ClientSession, path: str, **body: Any) -> Any:
    async with http.post(path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def finished(http: aiohttp.ClientSession, name: str) -> None:
    await post(http, "/v1/completions", model=MODEL, prompt=[5], max_tokens=4, session_id=name)
    await post(http, f"/sessions/{name}/finish", reward=1.0)


async def sample(http: aiohttp.ClientSession, version: int, staleness_max: int) -> Any:
    wanted = {"trajectories": 1, "trainer_version": version, "staleness_max": staleness_max, "wait_s": 0.01}
    return await post(http, "/experience/sample", reader="r", **wanted)


async def test_trajectories_are_counted_by_what_became_of_them(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", version="3") as e0, gateway(tmp_path, e0) as (found, http):
        for name in ("one", "two", "three"):
            await finished(http, name)
        batch = await sample(http, version=5, staleness_max=4)
        told = await series(http)
        assert (told["buffered_trajectories"], told["leased_trajectories"]) == (2, 1)
        await post(http, "/experience/ack", lease_id=batch["lease_id"])
        found.fleet.state.newest = Version(30)
        assert (await sample(http, version=30, staleness_max=40))["trajectories"] == []
        told = await series(http)
    assert told["trajectories_sampled_total"] == told["trajectories_acknowledged_total"] == 1
    assert told["trajectories_evicted_total reason=stale"] == 2
    assert "buffered_trajectories" not in told
    assert told["trajectories_by_staleness_total at=use behind=2"] == 1
    assert told["trajectories_by_staleness_total at=finish behind=0"] == 3
    assert told["tokens_by_staleness_total behind=0"] == 12


async def test_what_is_very_stale_shares_a_label(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", version="3") as e0, gateway(tmp_path, e0) as (_, http):
        for name in ("one", "two"):
            await finished(http, name)
        for version in (3 + STALENESS_MAX, 3 + STALENESS_MAX + 5):
            assert (await sample(http, version, staleness_max=100))["trajectories"]
        told = await series(http)
    assert told[f"trajectories_by_staleness_total at=use behind={STALENESS_MAX}"] == 2
