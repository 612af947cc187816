"""Versions through a real relay into real engines: who refreshes when, what a session stays on, what a repack moves."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.fleet import Fleet, until
from tests.support.relays import Relays
from tests.support.tiny_model import tiny_model
from trainer_client import Publisher

pytestmark = pytest.mark.slow

ENGINE_FLAGS = ("--max-model-len=2048", "--kv-cache-tokens=8192")
HELLO = [{"role": "user", "content": "What is the sum of 12 and 30?"}]
APART = [[{"role": "system", "content": f"{name} answers."}, *HELLO] for name in ("Ada", "Bob")]
"""Prompts without a common beginning that would be worth being computed once."""
WANTED: dict[str, Any] = {"return_token_ids": True, "return_weight_versions": True, "ignore_eos": True}


@pytest.fixture
def relay(relays: Relays) -> str:
    return str(relays.start("relay").ready["grpc"])


@pytest.fixture
def publisher(relay: str) -> Iterator[Publisher]:
    with Publisher(relay, "policy") as publisher:
        yield publisher


def publish(publisher: Publisher, seed: int) -> int:
    """The tiny model of this seed as the next version, sealed when this returns."""
    ticket = publisher.publish(load_file(tiny_model(seed=seed) / "model.safetensors"), step=seed, wait="sealed")
    return ticket.version


def ask(url: str, messages: list[Any], max_tokens: int = 16) -> Any:
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="policy", messages=messages, max_tokens=max_tokens, temperature=0, extra_body=WANTED
        )
    return answer.choices[0]


def versions(choice: Any) -> list[int]:
    return [int(span["version"]) for span in choice.weight_versions]


def reference(seed: int, max_tokens: int) -> list[int]:
    """Greedy tokens of transformers itself."""
    directory = tiny_model(seed=seed)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, max_new_tokens=max_tokens, min_new_tokens=max_tokens, do_sample=False)
    return [int(i) for i in ids[0, prompt["input_ids"].shape[1] :]]


def test_engines_load_each_version_and_speak_it(relay: str, publisher: Publisher, tmp_path: Path) -> None:
    with Fleet(tmp_path, relay=relay, engine_flags=ENGINE_FLAGS) as fleet:
        for seed in (1, 2):
            version = publish(publisher, seed)
            wanted = dict.fromkeys(fleet.engines, ("serving", version))
            until(lambda wanted=wanted: fleet.engine_states() == wanted, f"version {version}")
            choice = ask(f"{fleet.url}/v1", HELLO)
            assert versions(choice) == [version]
            assert choice.token_ids == reference(seed, 16)
        assert probes(fleet) == ["changed"] * 4, "both computed otherwise with the new weights, at each refresh"
        same = publish(publisher, 2)
        until(lambda: {v for _, v in fleet.engine_states().values()} == {same}, "the same weights as another version")
        assert probes(fleet)[4:] == ["same"] * 2
        assert fleet.status()["counters"]["refreshes_unchanged"] == 2


def probes(fleet: Fleet) -> list[str]:
    told = httpx.get(f"{fleet.url}/admin/timeline").json()["events"]
    return [event["probe"] for event in told if event["kind"] == "refresh"]


def test_the_trainer_hears_that_engines_refused_a_version_and_why(
    relay: str, publisher: Publisher, tmp_path: Path
) -> None:
    """NaN beyond what the publisher looks at."""
    publish(publisher, 1)
    with Fleet(tmp_path, relay=relay, engine_flags=ENGINE_FLAGS) as fleet:
        until(lambda: {v for _, v in fleet.engine_states().values()} == {1}, "version 1")
        weights = load_file(tiny_model(seed=2) / "model.safetensors")
        weights["model.layers.3.mlp.up_proj.weight"][-1, -1] = math.nan
        bad = publisher.publish(weights, step=2, wait="sealed")
        refused = until(bad.refused_loads, "a refusal")
        assert refused[0].engine in fleet.engines
        assert "version 2 computes NaN: its weights hold NaN" in refused[0].error
        assert publisher.status().refused_loads[0].version == bad.version
        good = publish(publisher, 3)
        until(lambda: {v for _, v in fleet.engine_states().values()} == {good}, "the next version")


def test_a_session_stays_on_its_version_while_others_move_on(relay: str, publisher: Publisher, tmp_path: Path) -> None:
    publish(publisher, 1)
    with Fleet(tmp_path, relay=relay, engine_flags=ENGINE_FLAGS) as fleet:
        until(lambda: {v for _, v in fleet.engine_states().values()} == {1}, "version 1")
        session = httpx.post(f"{fleet.url}/sessions", json={}).json()
        first = ask(session["base_url"], HELLO)
        publish(publisher, 2)
        until(lambda: sorted(v for _, v in fleet.engine_states().values()) == [1, 2], "one engine on each version")
        history = [*HELLO, {"role": "assistant", "content": first.message.content}, {"role": "user", "content": "And?"}]
        assert versions(ask(session["base_url"], history)) == [1]
        assert versions(ask(f"{fleet.url}/v1", HELLO)) == [2]
        done = httpx.post(f"{fleet.url}/sessions/{session['session_id']}/finish", json={"reward": 1.0})
        assert done.raise_for_status().json()["mixed"] is False
        until(lambda: {v for _, v in fleet.engine_states().values()} == {2}, "the last engine of version 1 to refresh")


def test_a_strict_session_finds_its_version_where_retention_would_have_retired_it(
    relays: Relays, tmp_path: Path
) -> None:
    relay = str(relays.start("keeps-one", "--retain", "1").ready["grpc"])
    flags = ("--version-hold-s=0",)
    with (
        Publisher(relay, "policy") as publisher,
        Fleet(tmp_path, num_engines=1, relay=relay, engine_flags=ENGINE_FLAGS, gateway_flags=flags) as fleet,
    ):
        publish(publisher, 1)
        until(lambda: fleet.engine_states()["e0"] == ("serving", 1), "version 1")
        session = httpx.post(f"{fleet.url}/sessions", json={"on_version_loss": "strict"}).json()
        first = ask(session["base_url"], HELLO)
        until(lambda: "1" in fleet.status()["pinned_versions"], "the pin of version 1")
        shown = httpx.get(f"{fleet.url}/sessions/{session['session_id']}").json()
        assert (shown["version"], shown["version_pinned"]) == (1, True)
        for seed in (2, 3):
            version = publish(publisher, seed)
            until(lambda wanted=version: fleet.engine_states()["e0"] == ("serving", wanted), f"version {version}")
        history = [*HELLO, {"role": "assistant", "content": first.message.content}, {"role": "user", "content": "And?"}]
        assert versions(ask(session["base_url"], history)) == [1]
        httpx.post(f"{fleet.url}/sessions/{session['session_id']}/finish", json={"reward": 1.0}).raise_for_status()
        until(lambda: fleet.status()["pinned_versions"] == {}, "the pin's end")


def test_a_restarted_engine_gets_no_traffic_before_it_holds_the_newest(
    relay: str, publisher: Publisher, tmp_path: Path
) -> None:
    publish(publisher, 1)
    with Fleet(tmp_path, num_engines=1, relay=relay, engine_flags=ENGINE_FLAGS) as fleet:
        until(lambda: fleet.engine_states()["e0"] == ("serving", 1), "version 1")
        fleet.engines["e0"].kill()
        until(lambda: fleet.engine_states()["e0"][0] == "dead", "notice of the death")
        fleet.start_engine("e0")
        assert versions(ask(f"{fleet.url}/v1", HELLO)) == [1]


def test_the_planner_packs_the_tail_by_itself_and_no_token_differs(
    relay: str, publisher: Publisher, tmp_path: Path
) -> None:
    publish(publisher, 1)
    flags = ("--repack-interval-s=0.2",)
    with Fleet(tmp_path, relay=relay, engine_flags=ENGINE_FLAGS, gateway_flags=flags) as fleet:
        until(lambda: {v for _, v in fleet.engine_states().values()} == {1}, "version 1")
        unmoved = [ask(f"{fleet.url}/v1", prompt, 1200).token_ids for prompt in APART]  # idle engines take turns
        answers: dict[int, Any] = {}

        def again(number: int) -> None:  # where its prompt was computed before
            answers[number] = ask(f"{fleet.url}/v1", APART[number], 1200)

        fleet.hold()  # else the turns might be over before the version is there
        threads = [threading.Thread(target=again, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: [e["running"] for e in fleet.status()["engines"]] == [1, 1], "a turn on each engine")
        publish(publisher, 2)
        until(lambda: fleet.status()["counters"]["moves"], "a move")
        fleet.go_on()
        for thread in threads:
            thread.join()
        assert fleet.status()["counters"]["repacks"] >= 1
        assert [answers[number].token_ids for number in range(2)] == unmoved
        assert {v for a in answers.values() for v in versions(a)} == {1}
        until(lambda: {v for _, v in fleet.engine_states().values()} == {2}, "version 2")
