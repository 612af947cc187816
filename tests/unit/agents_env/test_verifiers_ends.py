"""`agents-env verifiers`: how sessions end by their traces, against a real gateway."""

from __future__ import annotations

from pathlib import Path

import httpx

from agents_env.verifiers import Ending, Ends, _end
from tests.support.scripted_engine import ScriptedEngine
from tests.unit.gateway_api.test_status import gateway


async def test_a_rollout_whose_calls_were_all_refused_has_no_session_to_abandon(tmp_path: Path) -> None:
    """Such as one that sends images. A reward without a session is still a failure: it would be lost."""
    ends = Ends()
    async with (
        ScriptedEngine("e0") as e0,
        gateway(tmp_path, e0) as (found, _),
        httpx.AsyncClient(base_url=found.url, timeout=60.0, trust_env=False) as http,
    ):
        await _end(http, Ending("never-began", None, "images are refused"), ends)
        assert (ends.abandoned, ends.failed) == (1, 0)
        await _end(http, Ending("never-began", 1.0), ends)
        assert (ends.finished, ends.failed) == (0, 1)
