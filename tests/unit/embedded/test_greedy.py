"""In float32 greedy output is `transformers`' own, token for token, whatever shares the batch and the cache."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from gateway.engines.embedded.compute import linear
from gateway.engines.embedded.engine import Engine
from tests.support.tiny_model import EOS_ID, Family, tiny_model
from tests.unit.embedded.helpers import config, ids, prompts, request, run

pytestmark = pytest.mark.slow  # the models of transformers take seconds to import

FAMILIES = ("llama", "qwen2")
NEW_TOKENS = 32


@cache
def reference_model(family: Family) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(tiny_model(family))


def reference(family: Family, prompt: list[int]) -> list[int]:
    return list(generate(family, tuple(prompt)))


@cache
def generate(family: Family, prompt: tuple[int, ...]) -> tuple[int, ...]:
    with torch.inference_mode():
        output = reference_model(family).generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
    return tuple(output[0, len(prompt) :].tolist())


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers_in_a_mixed_batch(family: Family, invariant: bool) -> None:
    batch = prompts(1, 5, 16, 33, 70, 100, 130)
    batch += [[*batch[4][:64], 7, 8], batch[4]]  # siblings, and one that shares a prefix
    engine = Engine(config(tiny_model(family), batch_invariant=invariant))
    results = run(engine, *(request(str(i), p, max_tokens=NEW_TOKENS) for i, p in enumerate(batch)))
    for i, prompt in enumerate(batch):
        assert ids(results[str(i)]) == reference(family, prompt)
    assert engine.statistics().prefix_hits >= 64 + 64
    assert engine.statistics().num_blocks_used == 0


def test_equals_transformers_without_packed_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where weights are plain tensors."""
    monkeypatch.setattr(linear, "can_pack", lambda device, dtype: False)
    [prompt] = prompts(30)
    assert ids(run(Engine(config()), request("a", prompt, max_tokens=NEW_TOKENS))["a"]) == reference("llama", prompt)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers_through_preemption(family: Family) -> None:
    batch = prompts(60, 61, 62, seed=1)
    engine = Engine(config(tiny_model(family), kv_cache_tokens=256))
    results = run(engine, *(request(str(i), p, max_tokens=NEW_TOKENS) for i, p in enumerate(batch)))
    assert engine.statistics().preemptions > 0
    for i, prompt in enumerate(batch):
        assert ids(results[str(i)]) == reference(family, prompt)


def test_next_turn_continues_from_cached_blocks() -> None:
    engine = Engine(config())
    [first] = prompts(40, seed=2)
    turn = first + ids(run(engine, request("a", first, max_tokens=NEW_TOKENS))["a"]) + [5, 6, 7]
    hits = engine.statistics().prefix_hits
    assert ids(run(engine, request("b", turn, max_tokens=NEW_TOKENS))["b"]) == reference("llama", turn)
    assert engine.statistics().prefix_hits - hits == 64


def test_logprobs_are_the_models_own() -> None:
    [prompt] = prompts(20)
    tokens = run(Engine(config()), request("a", prompt, max_tokens=8, logprobs=0))["a"]
    with torch.inference_mode():
        logits = reference_model("llama")(torch.tensor([prompt + ids(tokens)])).logits[0]
    expected = torch.log_softmax(logits, -1)
    for i, token in enumerate(tokens):
        assert token.logprob == pytest.approx(float(expected[len(prompt) - 1 + i, token.id]), abs=1e-4)


def stopping_prompt() -> tuple[list[int], int]:
    """A prompt whose greedy answer ends with the end token, and after how many tokens."""
    candidates = prompts(*[3] * 100, seed=3)
    answers = run(Engine(config()), *(request(str(i), p, max_tokens=NEW_TOKENS) for i, p in enumerate(candidates)))
    for i, prompt in enumerate(candidates):
        answer = ids(answers[str(i)])
        if answer[-1] == EOS_ID and len(answer) > 3:
            assert answer == reference("llama", prompt)
            return prompt, len(answer)
    raise AssertionError("no prompt of the 100 ends by itself")


@pytest.mark.slow
def test_end_token_ends_unless_ignored_or_too_early() -> None:
    prompt, length = stopping_prompt()
    engine = Engine(config())
    for r in (
        request("stops", prompt, max_tokens=NEW_TOKENS),
        request("ignores", prompt, max_tokens=NEW_TOKENS, ignore_eos=True),
        request("waits", prompt, max_tokens=NEW_TOKENS, min_tokens=length + 2),
    ):
        engine.add(r)
    ends = {}
    lengths: dict[str, int] = {}
    while not engine.idle:
        for delta in engine.step():
            lengths[delta.request_id] = lengths.get(delta.request_id, 0) + 1
            if delta.finish_reason is not None:
                ends[delta.request_id] = (delta.finish_reason, delta.stop_reason)
    assert lengths["stops"] == length
    assert ends["stops"] == ("stop", None)
    assert (lengths["ignores"], ends["ignores"]) == (NEW_TOKENS, ("length", None))
    assert lengths["waits"] >= length + 2


def test_stop_token_ids_end_with_their_id() -> None:
    [prompt] = prompts(10, seed=4)
    answer = reference("llama", prompt)
    engine = Engine(config())
    engine.add(request("a", prompt, max_tokens=NEW_TOKENS, stop_token_ids=frozenset({answer[5]})))
    deltas = []
    while not engine.idle:
        deltas += engine.step()
    assert [d.token.id for d in deltas if d.token] == answer[: answer.index(answer[5]) + 1]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", answer[5])
