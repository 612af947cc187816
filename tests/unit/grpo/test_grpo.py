"""The arithmetic of GRPO: advantages, clipping, and where the gradient points."""

from __future__ import annotations

import math

import pytest
import torch

from deploy.demo.training.grpo import Clip, group_advantages, token_loss

pytestmark = pytest.mark.slow  # torch takes a second to import

CLIP = Clip(low=0.2, high=0.28)


def test_advantages_are_centred_and_scaled_within_each_group() -> None:
    rewards = torch.tensor([1.0, 0.0, 5.0, 1.0, 0.0, 7.0])
    groups = torch.tensor([0, 0, 1, 0, 0, 1])
    advantages = group_advantages(rewards, groups)
    assert advantages[[0, 1, 3, 4]].tolist() == pytest.approx([1, -1, 1, -1], abs=1e-3)
    assert advantages[[2, 5]].tolist() == pytest.approx([-1, 1], abs=1e-3)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3])
def test_a_group_of_equal_rewards_teaches_exactly_nothing(reward: float) -> None:
    rewards = torch.tensor([reward] * 7 + [0.0, 1.0])
    groups = torch.tensor([0] * 7 + [1, 1])
    advantages = group_advantages(rewards, groups)
    assert advantages[:7].tolist() == [0.0] * 7
    assert advantages[7:].abs().min() > 0.9


def test_a_single_sample_has_no_advantage_and_no_batch_has_none() -> None:
    assert group_advantages(torch.tensor([0.7]), torch.tensor([0])).tolist() == [0.0]
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long)).tolist() == []


def gradient(log_ratio: float, advantage: float) -> float:
    """Of the loss with respect to the new logprob."""
    logprob = torch.tensor([-1.0 + log_ratio], requires_grad=True)
    token_loss(logprob, torch.tensor([-1.0]), torch.tensor([advantage]), CLIP).loss.sum().backward()
    assert logprob.grad is not None
    return float(logprob.grad)


def test_descending_the_loss_makes_good_tokens_likelier_and_bad_ones_rarer() -> None:
    assert gradient(0.0, advantage=2.0) == pytest.approx(-2.0)
    assert gradient(0.0, advantage=-2.0) == pytest.approx(2.0)
    assert gradient(0.0, advantage=0.0) == 0.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"),
    [
        (1.27, 1.0, True),
        (1.29, 1.0, False),  # already likelier by more than the upper clip
        (0.81, -1.0, True),
        (0.79, -1.0, False),  # already rarer by more than the lower clip
        (1.5, -1.0, True),  # the wrong way: always mended
        (0.5, 1.0, True),
    ],
)
def test_the_clip_stops_only_what_went_far_enough_in_the_wanted_direction(
    ratio: float, advantage: float, moves: bool
) -> None:
    assert (gradient(math.log(ratio), advantage) != 0.0) is moves
    loss = token_loss(torch.tensor([math.log(ratio)]), torch.tensor([0.0]), torch.tensor([advantage]), CLIP)
    assert loss.clipped.tolist() == [not moves]


def test_kl_is_zero_on_policy_and_positive_off_it() -> None:
    behaviour = torch.tensor([-1.0, -2.0, -0.5])
    same = token_loss(behaviour, behaviour, torch.ones(3), CLIP)
    assert same.kl.tolist() == [0.0, 0.0, 0.0]
    assert not same.clipped.any()
    other = token_loss(behaviour + torch.tensor([0.5, -0.5, 0.1]), behaviour, torch.ones(3), CLIP)
    assert (other.kl > 0).all()
