"""TRL's trainers on a fleet of real processes: the weights sampled from are those published, and the reward rises."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from deploy.side_envs import TRL
from tests.support.training.scene import TrainingScene

pytestmark = [pytest.mark.trl, pytest.mark.timeout(1200)]

GROUP_SIZE = 8
RATIO_OFF_MAX = 1e-4
"""Of a sampled token's probability by `transformers` over that of the engine, both in float32 at temperature 1."""

RISE_MIN = 0.03
"""Of the mean reward. The engines' seeds differ from run to run, and so does how fast it rises."""

EARLY = 6
"""Steps that each change the weights: later ones may sample groups whose rewards are all 1, which teach nothing."""


def rise_of(rewards: Sequence[float]) -> float:
    """From the first three steps to the last three."""
    return (sum(rewards[-3:]) - sum(rewards[:3])) / 3


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[TrainingScene]:
    with ExitStack() as stack:
        yield TrainingScene(TRL.python, tmp_path, stack)


def test_grpo_trains_on_what_the_published_weights_sampled(scene: TrainingScene) -> None:
    *steps, logged = scene.train("tests.trl.grpo")
    assert [step["version"] for step in steps] == list(range(1, len(steps) + 1))
    assert all(step["sampled_under"] == [step["version"]] for step in steps)
    assert all(step["masked_tokens"] > 0 for step in steps), "the message between the turns"
    assert max(step["ratio_off"] for step in steps) < RATIO_OFF_MAX
    assert min(step["ratio_off_version_before"] for step in steps[1:EARLY]) > 10 * RATIO_OFF_MAX
    assert abs(logged["ratio_min"] - 1) < RATIO_OFF_MAX, "as TRL measures it"
    assert abs(logged["ratio_max"] - 1) < RATIO_OFF_MAX
    assert logged["steps"] == len(steps)
    assert rise_of([step["reward"] for step in steps]) > RISE_MIN


def test_async_grpo_trains_on_groups_with_branches_and_knows_their_versions(scene: TrainingScene) -> None:
    scene.publish_earlier_run()
    *versions, run = scene.train("tests.trl.async_grpo")
    syncs = len(run["versions_by_sync"])
    assert run["calls"] == ["init", *["send"] * syncs, "destroy"]
    assert run["versions_by_sync"] == {str(count): count + 1 for count in range(1, syncs + 1)}
    assert len(versions) >= syncs // 2, "engines took versions as they came"
    assert all(found["counted_by_trl_as"] == [found["version"] - 1] for found in versions)
    assert all(found["rows"] == 2 * GROUP_SIZE * found["groups"] for found in versions), "two branches a session"
    assert max(found["ratio_off"] for found in versions) < RATIO_OFF_MAX
    before = [found["ratio_off_version_before"] for found in versions]
    assert min(ratio for ratio in before if ratio is not None) > 10 * RATIO_OFF_MAX
    assert abs(run["ratio"]["ratio"] - 1) < RATIO_OFF_MAX, "as TRL measures it, in its first step"
    assert max(run["staleness"]) > 0, "rollouts go on while it trains"
    first, last = run["expected_rewards"]
    assert last - first > RISE_MIN


def test_the_worker_reports_what_fails_and_gives_back_what_trl_did_not_take(scene: TrainingScene) -> None:
    [report] = scene.train("tests.trl.worker_alone")
    assert report["agents_fail"] == "RolloutFailed: a rollout failed 1 times; the last time: the tool is away"
    assert report["no_tasks"].startswith("InvalidRequest: there are no tasks left")
    assert report["taken_groups"] == 1, "a group's rows stand together"
    assert report["advantages_sum"] < 1e-4
    assert report["before_first_sync"] == [0]
    assert 1 <= report["short_group_rows"] <= 4
    assert (report["terminated"], report["leased_after_sigterm"]) == (-signal.SIGTERM, 0)
    assert report["killed"] == -signal.SIGKILL
    assert report["leased_after_sigkill"] == 8, "two groups: the next worker of that name takes them back"
    buffer = httpx.get(f"{scene.gateway}/status").raise_for_status().json()["buffer"]
    assert buffer["leased"] == 0, "acknowledged or given back"
    assert buffer["acked"] >= 4
    assert buffer["trajectories"] >= 8, "two groups that nobody took"
