"""A turn cut anywhere and resumed from prompt + generated ids equals the uncut one: in float32, and in bfloat16's
batch-invariant mode exactly, logprobs included, whatever else is in the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gateway.engines.embedded.batching.sequence import SamplingParams, Token
from gateway.engines.embedded.compute.selfcheck import check_invariance
from gateway.engines.embedded.engine import Engine
from protos.errors import LaminarError
from tests.support.tiny_model import Family, tiny_model
from tests.unit.embedded.helpers import config, ids, prompts, request, run

pytestmark = pytest.mark.slow  # each turn is computed once for every place to cut it

LENGTH = 24
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 11}


def invariant_engine(family: Family = "llama", **overrides: object) -> Engine:
    return Engine(config(tiny_model(family, "bfloat16"), dtype="bfloat16", batch_invariant=True, **overrides))


def cut_everywhere(
    engine: Engine, prompt: list[int], params: dict[str, object]
) -> tuple[list[Token], list[list[Token]]]:
    """The uncut turn, and for each cut position the tokens before it with what a resumed request adds."""
    uncut = run(engine, request("uncut", prompt, max_tokens=LENGTH, logprobs=0, ignore_eos=True, **params))["uncut"]
    resumed = []
    for cut in range(1, LENGTH):
        r = request("r", prompt + ids(uncut[:cut]), max_tokens=LENGTH - cut, logprobs=0, ignore_eos=True, **params)
        noise = [
            request(f"n{i}", p, max_tokens=1 + (cut * 7 + i) % 9, temperature=1.0, seed=cut)
            for i, p in enumerate(prompts(*[1 + (cut * 13 + i * 29) % 80 for i in range(cut % 4)], seed=cut))
        ]
        resumed.append(uncut[:cut] + run(engine, *noise[: len(noise) // 2], r, *noise[len(noise) // 2 :])["r"])
    return uncut, resumed


@pytest.mark.parametrize(
    ("family", "params"),
    [
        ("llama", SAMPLED),
        pytest.param("llama", {}, marks=pytest.mark.slow),
        pytest.param("qwen2", SAMPLED, marks=pytest.mark.slow),
        pytest.param("qwen2", {}, marks=pytest.mark.slow),
    ],
    ids=["llama-sampled", "llama-greedy", "qwen2-sampled", "qwen2-greedy"],
)
def test_bfloat16_invariant_cut_equals_uncut_bit_for_bit(family: Family, params: dict[str, object]) -> None:
    engine = invariant_engine(family)
    [prompt] = prompts(50, seed=9)
    uncut, resumed = cut_everywhere(engine, prompt, params)
    for turn in resumed:
        assert turn == uncut, "ids or logprobs differ"


@pytest.mark.parametrize("params", [{}, pytest.param(SAMPLED, marks=pytest.mark.slow)], ids=["greedy", "sampled"])
def test_float32_cut_equals_uncut(params: dict[str, object]) -> None:
    uncut, resumed = cut_everywhere(Engine(config()), prompts(30, seed=5)[0], params)
    for turn in resumed:
        assert ids(turn) == ids(uncut)


def test_second_turn_of_a_session_is_the_same_with_and_without_its_cache() -> None:
    engine = invariant_engine()
    [prompt] = prompts(45, seed=12)
    first = run(engine, request("a", prompt, max_tokens=40, logprobs=0))["a"]
    second = [*prompt, *ids(first), 8, 9, 10]
    warm = run(engine, request("b", second, max_tokens=20, logprobs=0))["b"]
    engine.scheduler.new_epoch()
    assert run(engine, request("c", second, max_tokens=20, logprobs=0))["c"] == warm
    assert run(invariant_engine(max_num_seqs=2), request("d", second, max_tokens=20, logprobs=0))["d"] == warm


def test_preemption_changes_nothing() -> None:
    batch = prompts(90, 91, 92, 93, seed=6)
    requests = [request(str(i), p, max_tokens=60, logprobs=0, ignore_eos=True) for i, p in enumerate(batch)]
    roomy, tight = invariant_engine(), invariant_engine(kv_cache_tokens=320)
    assert run(roomy, *requests) == run(tight, *requests)
    assert tight.statistics().preemptions > 0
    assert roomy.statistics().preemptions == 0


def test_more_sequences_than_rows_of_a_pass() -> None:
    batch = prompts(*range(10, 31), seed=7)
    requests = [request(str(i), p, max_tokens=12, logprobs=0, ignore_eos=True) for i, p in enumerate(batch)]
    together = run(invariant_engine(max_num_seqs=21, kv_cache_tokens=2048), *requests)
    one_by_one = invariant_engine(max_num_seqs=1)
    for r in requests:
        assert run(one_by_one, r)[r.request_id] == together[r.request_id]


def test_the_start_up_check_passes_and_leaves_no_trace() -> None:
    engine = invariant_engine()
    check_invariance(engine)
    engine.reset_counters()
    assert engine.statistics().generation_tokens == engine.statistics().num_blocks_cached == 0


def test_the_start_up_check_notices_rows_that_depend_on_others(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = invariant_engine()
    forward = engine._model.forward

    def leaky(*args: Any, **kwargs: Any) -> torch.Tensor:
        hidden = forward(*args, **kwargs)
        return hidden + hidden.mean(0) * 2**-6

    monkeypatch.setattr(engine._model, "forward", leaky)
    with pytest.raises(LaminarError, match="not batch-invariant"):
        check_invariance(engine)


def test_seeds_differ_and_repeat() -> None:
    engine = invariant_engine()
    [prompt] = prompts(20)
    turns = {
        seed: ids(run(engine, request("a", prompt, max_tokens=20, temperature=1.0, seed=seed))["a"])
        for seed in (1, 2, 3)
    }
    assert len({tuple(t) for t in turns.values()}) == 3
    assert ids(run(engine, request("a", prompt, max_tokens=20, temperature=1.0, seed=2))["a"]) == turns[2]
    assert SamplingParams().seed == 0
