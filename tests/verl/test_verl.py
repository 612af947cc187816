"""verl on local Ray: updates of weights through relays, by its own manager and to engines outside it; its rollouts."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from deploy.side_envs import VERL
from tests.support.training.scene import TrainingScene

pytestmark = [pytest.mark.verl, pytest.mark.slow, pytest.mark.timeout(1200)]

TOLERANCE = 1e-4
"""Of importance ratios, float32 on both sides, temperature 1."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        return TrainingScene(VERL.python, tmp_path_factory.mktemp("verl"), stack).train("tests.verl.program")


@pytest.fixture
def updates(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [report for report in reports if "manager" in report]


@pytest.fixture
def rollouts(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [report for report in reports if "rows" in report]


def test_rollout_workers_load_exactly_what_the_trainer_sent_in_this_update(updates: list[dict[str, Any]]) -> None:
    inside = [update for update in updates if update["manager"] == "CheckpointEngineManager"]
    assert [update["step"] for update in inside] == [0, 7, 7, 3]
    assert len({update["sent"][0] for update in inside}) == len(inside)
    for update in inside:
        assert set(update["loaded"]) == set(update["sent"])
        assert update["replica_calls"] == [
            "abort_all_requests", "release_kv_cache", "resume_kv_cache", "resume_generation",
        ]  # fmt: skip


def test_without_replicas_an_update_is_a_publish_and_nothing_is_aborted(updates: list[dict[str, Any]]) -> None:
    [outside] = [update for update in updates if update["manager"] == "LaminarCheckpointEngineManager"]
    assert outside["version"] == 4
    assert outside["loaded"] == [None, None]
    assert outside["replica_calls"] == []
    assert {outside["cached"]} == set(outside["sent"])


def test_the_cache_of_a_host_has_the_newest_version(updates: list[dict[str, Any]]) -> None:
    assert [update["version"] for update in updates] == [1, 2, 3, 4, 5]
    for update in updates:
        assert {update["cached"]} == set(update["sent"])


def test_all_ranks_take_every_tensor_of_every_update(updates: list[dict[str, Any]]) -> None:
    counts = [update["taken"] for update in updates]
    per_update = counts[0][0]
    assert per_update > 1
    assert counts == [[per_update * number] * 2 for number in range(1, len(updates) + 1)]


def test_rollouts_are_sampled_under_the_weights_published_at_that_step(rollouts: list[dict[str, Any]]) -> None:
    assert [batch["step"] for batch in rollouts] == [0, 7, 7, 8, 3]
    for batch in rollouts:
        assert batch["rows"] == 8
        assert batch["sampled_tokens"] >= 2 * batch["rows"], "two turns each"
        assert batch["masked_tokens"] > 0, "the message between the turns"
        assert batch["ratio_off"] < TOLERANCE
    for batch in rollouts[1:]:
        assert batch["ratio_off_version_before"] > 10 * TOLERANCE


def test_rows_carry_the_steps_of_the_versions_that_sampled_them(rollouts: list[dict[str, Any]]) -> None:
    for batch in rollouts:
        assert batch["min_global_steps"] == batch["max_global_steps"] == [batch["step"]]


def test_rows_carry_the_reward_that_the_agent_gave(rollouts: list[dict[str, Any]]) -> None:
    for batch in rollouts:
        assert all(0 <= reward <= 1 for reward in batch["rewards"])
        assert len(set(batch["rewards"])) > 1


def test_a_v1_trainers_buffer_gives_a_row_for_each_branch_of_each_session(reports: list[dict[str, Any]]) -> None:
    [queued] = [report for report in reports if "queued_step" in report]
    step = queued["queued_step"]
    # Four prompts, two sessions each, two branches each: the key's end is session_branch.
    assert queued["rows_of_sessions"] == sorted(["0_0", "0_1", "1_0", "1_1"] * 4)
    assert queued["min_global_steps"] == queued["max_global_steps"] == [step]
    assert set(queued["rewards"]) <= {0.0, 0.5, 1.0}
    assert queued["ratio_off"] < TOLERANCE
    assert queued["ratio_off_version_before"] > 10 * TOLERANCE


@pytest.mark.long
def test_verls_trainer_trains_on_what_the_versions_it_published_sampled(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """From end to end, by its FSDP engine on a CPU. `make test-integrations` runs it; CI does not."""
    with ExitStack() as stack:
        scene = TrainingScene(VERL.python, tmp_path_factory.mktemp("trained"), stack)
        steps = scene.train("tests.verl.trained")
    assert [step["trained"] for step in steps] == [1, 2, 3]
    assert [step["version"] for step in steps] == [2, 3, 4], "the first is published before the first step"
    assert steps[0]["probability_off"] < TOLERANCE, "sampled under version 1, with which the first step begins"
    assert all(step["grad_norm"] > 0 for step in steps)
