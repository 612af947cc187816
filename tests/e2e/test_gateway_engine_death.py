"""kill -9 of a real engine in mid-stream: the client gets the very tokens of the uncut turn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.fleet import Fleet, until
from tests.support.tiny_model import Dtype

pytestmark = pytest.mark.slow

TOKENS = 400
"""More than an engine that is held computes (`tests/support/held_engine.py`)."""
ASKED: dict[str, Any] = {
    "model": "policy",
    "messages": [{"role": "user", "content": "What is the sum of 12 and 30?"}],
    "max_tokens": TOKENS,
    "temperature": 0,
    "extra_body": {"ignore_eos": True, "return_token_ids": True, "return_weight_versions": True},
}
NUMERICS: list[tuple[Dtype, tuple[str, ...]]] = [("float32", ()), ("bfloat16", ("--batch-invariant",))]


def stream(fleet: Fleet, when_it_flows: Callable[[], None] | None = None) -> tuple[list[int], Any]:
    """The streamed turn's token ids and last choice; calls `when_it_flows` once after the first tokens.

    The turn stands still meanwhile: on a busy machine it would be over before the call has done anything.
    """
    ids: list[int] = []
    last = None
    if when_it_flows is not None:
        fleet.hold()
    with (
        openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="unused", max_retries=0) as client,
        client.chat.completions.create(stream=True, **ASKED) as chunks,
    ):
        for chunk in chunks:
            ids += getattr(chunk.choices[0], "token_ids", None) or []
            last = chunk.choices[0]
            if when_it_flows is not None and len(ids) > 20:
                when_it_flows()
                fleet.go_on()
                when_it_flows = None
    return ids, last


@pytest.mark.parametrize(("dtype", "flags"), NUMERICS, ids=["float32", "bfloat16-invariant"])
def test_a_turn_whose_engine_dies_equals_the_uncut_one(dtype: Dtype, flags: tuple[str, ...], tmp_path: Path) -> None:
    engine_flags = ("--max-model-len=2048", "--kv-cache-tokens=8192", *flags)
    with Fleet(tmp_path, dtype=dtype, engine_flags=engine_flags) as fleet:
        uncut, _ = stream(fleet)
        killed: list[str] = []

        def kill() -> None:
            killed.append(fleet.running_engine())
            fleet.engines[killed[0]].kill()

        cut, last = stream(fleet, when_it_flows=kill)
        assert len(uncut) == TOKENS
        assert cut == uncut
        assert last.finish_reason == "length"
        counters = fleet.status()["counters"]
        assert (counters["turns_cut"], counters["turns_resumed"], counters["turns_lost"]) == (1, 1, 0)

        until(lambda: fleet.engine_states()[killed[0]][0] == "dead", "notice of the death")
        fleet.start_engine(killed[0])
        until(lambda: fleet.engine_states()[killed[0]] == ("serving", 0), "the engine's return")
        assert stream(fleet)[0] == uncut


def test_with_every_engine_gone_the_turn_waits_for_one_to_return(tmp_path: Path) -> None:
    flags = ("--max-model-len=2048", "--kv-cache-tokens=8192")
    with Fleet(tmp_path, num_engines=1, engine_flags=flags) as fleet:
        uncut, _ = stream(fleet)

        def restart() -> None:
            fleet.engines["e0"].kill()
            fleet.start_engine("e0")

        cut, _ = stream(fleet, when_it_flows=restart)
        assert cut == uncut
        assert fleet.status()["counters"]["turns_lost"] == 0


def test_a_client_that_leaves_frees_its_engine(tmp_path: Path) -> None:
    flags = ("--max-model-len=2048", "--kv-cache-tokens=8192")
    with Fleet(tmp_path, num_engines=1, engine_flags=flags, gateway_flags=("--disconnect-grace-s=0",)) as fleet:
        fleet.hold()
        with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="unused", max_retries=0) as client:
            chunks = client.chat.completions.create(stream=True, **ASKED)
            next(iter(chunks))
            chunks.close()
        until(lambda: fleet.status()["counters"]["turns_aborted"] == 1, "the abort")
        until(
            lambda: fleet.status()["engines"][0]["kv_usage"] < 0.5 and not fleet.status()["engines"][0]["running"],
            "room",
        )
