"""What a segment is sampled with: what is left of its turn, and a seed of its own."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.parameters import OTHERS, PARAMETERS
from gateway.core.sampling import kinds_for, sampled_with, segment_sampling, segment_seed
from gateway.core.types import LogprobsKind, SamplingParams, SessionId, TurnId, TurnRequest
from protos.engines import ENGINE_KINDS
from protos.trajectories import SampledWith


def request(choice: int = 0, turn: int = 0, **sampling: int) -> TurnRequest:
    params = SamplingParams(**{"max_tokens": 10, **sampling})
    return TurnRequest(TurnId("t"), SessionId("s"), turn, (1,), params, choice=choice)


def test_no_two_segments_share_a_seed() -> None:
    seeds = [segment_seed(*told) for told in itertools.product((0, 1, -1), range(4), range(4), range(12))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 1 << 32 for seed in seeds)


@given(st.integers(), st.integers(0, 9), st.integers(0, 99), st.integers(0, 9))
def test_the_same_place_draws_the_same_seed(seed: int, choice: int, turn: int, generated: int) -> None:
    found = segment_sampling(request(choice, turn, seed=seed), generated)
    assert found.seed == segment_seed(seed, choice, turn, generated)
    assert found == segment_sampling(request(choice, turn, seed=seed), generated)


@pytest.mark.parametrize(
    ("sampling", "kind", "told"),
    [
        ({}, "processed", "policy"),
        ({}, "raw", "policy"),
        ({"temperature": 0.7}, "processed", "policy"),
        ({"temperature": 0.7}, "raw", "raw"),
        ({"temperature": 0.0}, "processed", "greedy"),
        ({"temperature": 0.0}, "raw", "greedy"),
        ({"temperature": 0.0, "top_k": 3}, "raw", "raw"),
        ({"json_schema": "{}"}, "raw", "raw"),
        ({"frequency_penalty": 0.1}, "processed", "policy"),
        ({"min_p": 0.1}, "raw", "raw"),
        ({"min_tokens": 2}, "raw", "raw"),
        ({"repetition_penalty": 1.1}, "raw", "raw"),
        ({"logit_bias": ((5, 1.0),)}, "raw", "raw"),
    ],
)
def test_the_kind_of_logprobs_is_told(sampling: dict[str, Any], kind: LogprobsKind, told: str) -> None:
    found = sampled_with(SamplingParams(max_tokens=1, **sampling), kind)
    assert found.logprobs == told
    assert found.constrained is ("json_schema" in sampling)


def test_a_segment_has_what_is_left_of_its_turn() -> None:
    assert segment_sampling(request(min_tokens=4), 3) == SamplingParams(max_tokens=7, min_tokens=1)
    assert segment_sampling(request(min_tokens=4), 6) == SamplingParams(max_tokens=4)
    assert segment_sampling(request(), 0).seed is None


def test_a_segment_after_min_tokens_is_sampled_from_the_policy() -> None:
    found = [sampled_with(segment_sampling(request(min_tokens=4), at), "raw") for at in (0, 3, 4)]
    assert [(told.min_tokens, told.logprobs) for told in found] == [(4, "raw"), (1, "raw"), (0, "policy")]


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_sglangs_logprobs_of_a_truncated_policy_are_told_as_what_they_are(sampling: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=1, **sampling)
    found = {kind: sampled_with(params, "processed", kind).logprobs for kind in ENGINE_KINDS}
    assert found == {"vllm": "policy", "embedded": "policy", "sglang": "untruncated"}
    greedy = dataclasses.replace(params, temperature=0.0)
    assert sampled_with(greedy, "processed", "sglang").logprobs == "greedy"


def test_every_parameter_of_sampling_is_recorded() -> None:
    params = SamplingParams(max_tokens=3, min_tokens=2, min_p=0.1, repetition_penalty=1.2, logit_bias=((5, -1.0),))
    found = sampled_with(params, "processed")
    assert (found.min_p, found.repetition_penalty, found.logit_bias) == (0.1, 1.2, {"5": -1.0})
    assert found.min_tokens == 2


def test_a_segment_recorded_before_min_tokens_was_is_still_read() -> None:
    told = msgspec.to_builtins(sampled_with(SamplingParams(max_tokens=1), "processed"))
    del told["min_tokens"]
    assert msgspec.convert(told, SampledWith).min_tokens == 0


def test_what_is_truncated_and_trained_on_goes_where_its_logprobs_are_told() -> None:
    assert kinds_for(constrained=False) is None
    assert kinds_for(constrained=False, truncated=True) == {"vllm", "embedded"}
    assert kinds_for(constrained=True, truncated=True) == {"vllm"}


def test_what_some_kinds_of_engines_lack_goes_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kinds_for(constrained=False, parameters=["temperature", "min_p"]) is None
    monkeypatch.setitem(
        ENGINE_KINDS, "embedded", dataclasses.replace(ENGINE_KINDS["embedded"], lacks=frozenset({"min_p"}))
    )
    assert kinds_for(constrained=False, parameters=["temperature", "top_p"]) is None
    assert kinds_for(constrained=False, parameters=["top_p", "min_p"]) == {"vllm", "sglang"}
    assert kinds_for(constrained=False, truncated=True, parameters=["min_p"]) == {"vllm"}


def test_what_a_kind_of_engine_lacks_is_a_parameter() -> None:
    """A misspelt one would be sent to it all the same."""
    lacked = frozenset[str]().union(*(kind.lacks for kind in ENGINE_KINDS.values()))
    assert lacked <= {parameter.name for parameter in PARAMETERS} | set(OTHERS)
