"""Text relayed to real engines, through the official client: the same text, and deaths that are made good or told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.fleet import Fleet, until

pytestmark = pytest.mark.slow

TOKENS = 1200


def asked(max_tokens: int) -> dict[str, Any]:
    more = {"ignore_eos": True, "stream_interval": 4}  # the engine's own, which the gateway does not know
    return {
        "model": "policy",
        "prompt": "What is the sum of 12 and 30?",
        "max_tokens": max_tokens,
        "temperature": 0,
        "extra_body": more,
    }


def read_and_kill(client: openai.OpenAI, fleet: Fleet, killed: list[str]) -> None:
    """A stream whose engine dies once it flows."""
    fleet.hold()
    with client.completions.create(stream=True, **asked(TOKENS)) as events:
        for _ in events:
            if not killed:
                killed.append(fleet.running_engine())
                fleet.engines[killed[0]].kill()
                fleet.go_on()


def test_text_of_real_engines_and_their_deaths(tmp_path: Path) -> None:
    flags = ("--max-model-len=2048", "--kv-cache-tokens=8192")
    with Fleet(tmp_path, engine_flags=flags, gateway_flags=("--relay-text",)) as fleet:
        engine_url = fleet.engines["e0"].ready["url"]
        with (
            openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="unused", max_retries=0) as client,
            openai.OpenAI(base_url=f"{engine_url}/v1", api_key="unused", max_retries=0) as direct,
        ):
            text = direct.completions.create(**asked(64)).choices[0].text
            whole = client.completions.with_raw_response.create(**asked(64))
            assert whole.headers["X-Laminar-Weight-Version"] == "0"
            assert whole.parse().choices[0].text == text
            streamed = [c.choices[0].text for c in client.completions.create(stream=True, **asked(64)) if c.choices]
            assert len(streamed) > 1
            assert "".join(streamed) == text

            killed: list[str] = []
            with pytest.raises((openai.APIError, httpx.HTTPError)):
                read_and_kill(client, fleet, killed)
            assert killed, "its stream had begun"
            again = client.completions.with_raw_response.create(**asked(64))
            assert again.headers["X-Laminar-Engine"] not in killed
            assert again.parse().choices[0].text == text
            until(lambda: fleet.engine_states()[killed[0]][0] == "dead", "notice of the death")
        told = fleet.status()["relayed_text"]
        assert (told["running"], told["failed"]) == (0, 1)
        assert fleet.status()["counters"]["turns_started"] == 0, "none of it took the token path"
