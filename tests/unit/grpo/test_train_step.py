"""One optimiser step of the demo's trainer on a tiny model."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
import torch

from deploy.demo.training.families import lay_out
from deploy.demo.training.policy import Policy
from deploy.demo.training.trainer import Settings, describe, train_step
from tests.support.tiny_model import VOCAB, tiny_model
from tests.support.trajectories import make_trajectory
from trainer_client import Packed, pack

pytestmark = pytest.mark.slow  # the models of transformers take seconds to import


def settings(**changes: object) -> Settings:
    return Settings(relay="", gateway="", model_dir=Path(), out=Path(), **changes)  # type: ignore[arg-type]


@pytest.fixture
def policy() -> Policy:
    return Policy(tiny_model("qwen2", "float32"), lr=1e-4, dtype=torch.float32)


@pytest.fixture
def batch(policy: Policy) -> Packed:
    """Two groups of three, one answer of each rewarded; the recorded logprobs are the policy's own."""
    rng = random.Random(11)

    def ids(count: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(count)]

    rows = []
    for group in ("a", "b"):
        prompt = ids(7)
        rows += [
            make_trajectory(group, i, prompt, (ids(3), ids(2)), (ids(2), []), reward=float(i == 1), version=4)
            for i in range(3)
        ]
    packed = pack(rows)
    with torch.no_grad():
        layout = lay_out(packed, [[0, 1, 2], [3, 4, 5]])
        packed.logprobs[layout.tokens.numpy()] = policy.logprobs(layout, torch.from_numpy(packed.input_ids)).numpy()
    return packed


def row_logprobs(policy: Policy, batch: Packed) -> list[float]:
    ids = torch.from_numpy(batch.input_ids)
    with torch.no_grad():
        return [float(policy.logprobs(lay_out(batch, [[row]]), ids).sum()) for row in range(batch.num_trajectories)]


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in policy.model.parameters()]).clone()


def test_a_step_makes_rewarded_answers_likelier_and_the_others_rarer(policy: Policy, batch: Packed) -> None:
    before = row_logprobs(policy, batch)
    stats = train_step(policy, batch, settings(), threading.Event())
    changes = [after - earlier for after, earlier in zip(row_logprobs(policy, batch), before, strict=True)]
    assert all((change > 0) is (row % 3 == 1) for row, change in enumerate(changes)), changes
    assert stats is not None
    assert (stats.live, stats.loss_tokens) == (6, 30)
    assert stats.kl == pytest.approx(0.0, abs=1e-6), "on policy"
    assert stats.clip_fraction == 0.0
    assert stats.loss == pytest.approx(0.0, abs=1e-4), "on policy, equal lengths: advantages sum to zero"
    assert stats.grad_norm > 0


def test_micro_batches_are_one_step(policy: Policy, batch: Packed) -> None:
    whole = Policy(tiny_model("qwen2", "float32"), lr=1e-4, dtype=torch.float32)
    one = train_step(whole, batch, settings(), threading.Event())
    many = train_step(policy, batch, settings(micro_tokens=1), threading.Event())
    assert one is not None
    assert many is not None
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    assert many.loss_tokens == one.loss_tokens
    # Adam's first step has the size of lr for any gradient: where that is near zero, rounding decides a part of it
    torch.testing.assert_close(weights(policy), weights(whole), rtol=0, atol=2e-5)


def test_groups_of_equal_rewards_are_left_out(policy: Policy, batch: Packed) -> None:
    batch.rewards[3:] = 0.5
    stats = train_step(policy, batch, settings(), threading.Event())
    assert stats is not None
    assert (stats.live, stats.loss_tokens) == (3, 15)
    before = weights(policy)
    batch.rewards[:] = 1.0
    stats = train_step(policy, batch, settings(), threading.Event())
    assert stats is not None
    assert (stats.live, stats.loss_tokens, stats.grad_norm, stats.loss) == (0, 0, 0.0, 0.0)
    assert torch.equal(weights(policy), before)


def test_a_trajectory_without_a_sampled_token_is_left_out(policy: Policy, batch: Packed) -> None:
    batch.loss_mask[batch.row(1)] = False
    stats = train_step(policy, batch, settings(), threading.Event())
    assert stats is not None
    assert (stats.live, stats.loss_tokens) == (5, 25)


def test_a_step_that_is_stopped_changes_nothing_now_or_later(policy: Policy, batch: Packed) -> None:
    class SecondTime(threading.Event):
        """Set from its second reading on: after the first micro-batch."""

        readings = 0

        def is_set(self) -> bool:
            self.readings += 1
            return self.readings > 1

    before = weights(policy)
    assert train_step(policy, batch, settings(micro_tokens=1), SecondTime()) is None
    assert torch.equal(weights(policy), before)
    assert policy.update(grad_norm_max=1.0) == 0.0, "no gradient is left behind"


def test_what_a_step_says_of_its_batch(batch: Packed) -> None:
    assert describe(batch, trainer_version=6) == {
        "reward_mean": pytest.approx(1 / 3),
        "staleness_mean": 2.0,
        "staleness_max": 2,
        "tokens": 6 * 14,
        "trajectories": 6,
    }
