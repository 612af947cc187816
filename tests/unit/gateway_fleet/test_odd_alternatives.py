"""Alternatives beside the sampled token that no engine may send: the engine's fault, and never an error of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.scripted_engine import ScriptedEngine
from tests.unit.gateway_api.test_status import gateway

NUM = 6  # tokens, one an event
ODD: dict[str, list[dict[str, Any] | None]] = {
    "an id beyond the vocabulary": [{"token_id:9999": -1.0}],
    "an id beyond any vocabulary": [{"token_id:999999999": -1.0}],
    "more lists than tokens": [{"token_id:5": -1.0}, {"token_id:6": -1.0}],
    "a number that is none": [{"token_id:5": None}],
    "more than were requested": [{f"token_id:{number}": -1.0 for number in range(5, 100)}],
    "infinite": [{"token_id:5": 1e999}],
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("how", ODD)
async def test_odd_alternatives_are_a_cut_and_the_turn_goes_on_elsewhere(
    tmp_path: Path, how: str, stream: bool
) -> None:
    odd, e1 = ScriptedEngine("e0", chunk=1, top=ODD[how]), ScriptedEngine("e1", chunk=1, top=[{"token_id:5": -1.0}])  # type: ignore[arg-type]
    async with odd, e1, gateway(tmp_path, odd, e1) as (found, http):
        for _ in range(2):  # one of them begins at the odd one
            body = {"model": "policy", "prompt": [5], "max_tokens": NUM, "stream": stream, "logprobs": 2}
            async with http.post("/v1/completions", json=body) as answer:
                text = await answer.text()
                assert answer.status == 200, text
                assert "error" not in text
        assert len(odd.requests) == 1
        assert found.sessions.counters.cuts_by_reason == {"protocol": 1}
