"""Tokens and logprobs come from exactly the distribution that the request asked for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gateway.engines.embedded.batching.sequence import SamplingParams
from gateway.engines.embedded.compute.sampling import SamplingRow, sample, uniform

pytestmark = pytest.mark.slow


def row(position: int = 0, forbidden: tuple[int, ...] = (), **params: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), position, forbidden)


def logits(rows: int = 1, vocab: int = 512, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def processed(values: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """The distribution written down naively."""
    probs = torch.softmax(values.double() / temperature, -1)
    order = probs.argsort(descending=True)
    keep = order[: top_k or len(order)]
    mass = probs[keep] / probs[keep].sum()
    keep = keep[: int((mass.cumsum(0) - mass < top_p).sum())]
    result = torch.zeros_like(probs)
    result[keep] = probs[keep] / probs[keep].sum()
    return result


def test_greedy_takes_the_likeliest_and_reports_the_raw_logprob() -> None:
    values = logits(3)
    tokens = sample(values.clone(), [row(temperature=0.0, logprobs=0)] * 3)
    assert [t.id for t in tokens] == values.argmax(-1).tolist()
    expected = torch.log_softmax(values, -1).max(-1).values
    assert [t.logprob for t in tokens] == pytest.approx(expected.tolist(), abs=1e-5)


def test_without_logprobs_none_are_reported() -> None:
    tokens = sample(logits(2), [row(temperature=0.0), row(temperature=1.0)])
    assert [t.logprob for t in tokens] == [None, None]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.0, 20, 1.0), (1.3, 0, 0.7), (0.8, 50, 0.9)]
)
def test_draws_follow_the_processed_distribution(temperature: float, top_k: int, top_p: float) -> None:
    values = logits()[0]
    expected = processed(values, temperature, top_k, top_p)
    draws = 4000
    rows = [row(i, temperature=temperature, top_k=top_k, top_p=top_p, seed=1, logprobs=0) for i in range(draws)]
    tokens = sample(values.expand(draws, -1).clone(), rows)
    counts = torch.bincount(torch.tensor([t.id for t in tokens]), minlength=512).double()
    assert counts[expected == 0].sum() == 0, "a token outside the truncation was drawn"
    statistic = float(((counts - draws * expected) ** 2 / (draws * expected).clamp(min=1e-9))[expected > 1e-3].sum())
    freedom = int((expected > 1e-3).sum())
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)
    for token in tokens[:50]:
        assert token.logprob == pytest.approx(math.log(expected[token.id]), abs=1e-4)


def test_nucleus_wider_than_the_first_candidates() -> None:
    flat = torch.zeros(1, 4096)
    drawn = {sample(flat.clone(), [row(i, top_p=0.9, seed=3)])[0].id for i in range(60)}
    token = sample(flat.clone(), [row(0, top_p=0.9, seed=3, logprobs=0)])[0]
    assert token.logprob == pytest.approx(-math.log(4096 * 0.9), abs=1e-3)
    assert len(drawn) > 50


def test_raw_logprobs_are_of_the_unprocessed_distribution() -> None:
    values = logits()
    token = sample(values.clone(), [row(temperature=0.5, logprobs=0)], processed_logprobs=False)[0]
    assert token.logprob == pytest.approx(float(torch.log_softmax(values[0], -1)[token.id]), abs=1e-5)


def test_top_logprobs_are_the_likeliest_in_order() -> None:
    values = logits()
    token = sample(values.clone(), [row(temperature=0.0, logprobs=3)])[0]
    best, at = torch.log_softmax(values[0], -1).topk(3)
    assert [id for id, _ in token.top] == at.tolist()
    assert [value for _, value in token.top] == pytest.approx(best.tolist(), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidden_tokens_never_come(temperature: float) -> None:
    values = torch.full((1, 512), -5.0)
    values[0, 2] = 50.0
    token = sample(values, [row(temperature=temperature, forbidden=(2,), logprobs=0)])[0]
    assert token.id != 2
    assert token.logprob == pytest.approx(-math.log(511), abs=1e-4)


@pytest.mark.parametrize("vocab", [512, 1000, 257])
def test_a_row_does_not_depend_on_the_others(vocab: int) -> None:
    values = logits(6, vocab)
    rows = [row(i, temperature=[0.0, 1.0, 0.7][i % 3], top_p=[1.0, 0.9][i % 2], seed=i, logprobs=0) for i in range(6)]
    together = sample(values.clone(), rows)
    alone = [sample(values[i : i + 1].clone(), [rows[i]])[0] for i in range(6)]
    assert together == alone


def test_noise_is_uniform_and_a_function_of_seed_and_position() -> None:
    draws = [uniform(5, i) for i in range(2000)]
    assert draws == [uniform(5, i) for i in range(2000)]
    assert all(0.0 <= u < 1.0 for u in draws)
    assert sum(draws) / 2000 == pytest.approx(0.5, abs=0.03)
    assert len({uniform(seed, 0) for seed in range(-50, 50)}) == 100


def adjusted(values: torch.Tensor, prompt: list[int], said: list[int], **params: Any) -> torch.Tensor:
    """The logits after bias and penalties, written down naively, token by token."""
    result = values.double().tolist()
    for token_id, bias in params.get("logit_bias", ()):
        result[token_id] += bias
    for token_id in {*prompt, *said}:
        by = params.get("repetition_penalty", 1.0)
        result[token_id] = result[token_id] / by if result[token_id] > 0 else result[token_id] * by
    for token_id in set(said):
        result[token_id] -= params.get("presence_penalty", 0.0)
        result[token_id] -= params.get("frequency_penalty", 0.0) * said.count(token_id)
    return torch.tensor(result, dtype=torch.float64)


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.7},
        {"presence_penalty": 1.5},
        {"frequency_penalty": -0.8},
        {"logit_bias": ((3, 5.0), (7, -100.0))},
        {"repetition_penalty": 0.6, "presence_penalty": 0.3, "frequency_penalty": 0.9, "logit_bias": ((3, 1.0),)},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_bias_and_penalties_are_in_the_token_and_its_logprob(params: dict[str, Any], temperature: float) -> None:
    values, prompt, said = logits()[0], [3, 4, 5, 5], [5, 6, 6, 7]
    expected = adjusted(values, prompt, said, **params)
    rows = [
        SamplingRow(
            SamplingParams(temperature=temperature, logprobs=0, seed=2, **params), position, (), [*prompt, *said], 4
        )
        for position in range(64)
    ]
    plain = row(temperature=0.0, logprobs=0)
    *tokens, other = sample(values.expand(65, -1).clone(), [*rows, plain])
    policy = torch.log_softmax(expected / (temperature or 1.0), -1)
    assert [t.logprob for t in tokens] == pytest.approx([float(policy[t.id]) for t in tokens], abs=1e-4)
    if temperature == 0.0:
        assert {t.id for t in tokens} == {int(expected.argmax())}
    assert other.id == int(values.argmax()), "a row beside it is left as it is"


def test_raw_logprobs_are_those_before_bias_and_penalties() -> None:
    values = logits()
    params = SamplingParams(logprobs=0, seed=2, logit_bias=((3, 50.0),))
    [token] = sample(values.clone(), [SamplingRow(params, 0)], processed_logprobs=False)
    assert token.id == 3
    assert token.logprob == pytest.approx(float(torch.log_softmax(values[0], -1)[3]), abs=1e-5)


def test_raw_logprobs_are_those_before_end_tokens_are_forbidden() -> None:
    values = logits()
    likeliest = int(values[0].argmax())
    params = SamplingParams(temperature=0.0, logprobs=1, min_tokens=2)
    [token] = sample(values.clone(), [SamplingRow(params, 0, (likeliest,))], processed_logprobs=False)
    raw = torch.log_softmax(values[0], -1)
    assert token.id == int(values[0].topk(2).indices[1])
    assert token.logprob == pytest.approx(float(raw[token.id]), abs=1e-5)
    assert token.top == ((likeliest, pytest.approx(float(raw[likeliest]), abs=1e-5)),)


def test_min_p_leaves_out_what_is_less_likely_than_its_share_of_the_likeliest() -> None:
    values = logits()[0]
    probs = torch.softmax(values.double() / 0.8, -1)
    kept = probs >= 0.2 * probs.max()
    expected = (probs * kept / probs[kept].sum()).log()
    rows = [row(i, temperature=0.8, min_p=0.2, seed=1, logprobs=0) for i in range(2000)]
    tokens = sample(values.expand(2000, -1).clone(), rows)
    assert {t.id for t in tokens} == set(kept.nonzero()[:, 0].tolist())
    assert [t.logprob for t in tokens] == pytest.approx([float(expected[t.id]) for t in tokens], abs=1e-4)
