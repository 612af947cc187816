"""A trainer's count of syncs beside our versions, and GRPO's advantages."""

from __future__ import annotations

import pytest

from trainer_client.integrations.rows import advantages_of
from trainer_client.integrations.versions import VersionMap


def test_versions_and_syncs_map_both_ways() -> None:
    versions = VersionMap()
    assert (versions.count_of(5), versions.version_of(1)) == (0, 0)
    versions.synced(1, 41)
    versions.synced(2, 42)
    versions.synced(3, 42)  # published nothing
    versions.synced(4, 44)
    assert [versions.count_of(version) for version in (40, 41, 42, 43, 44, 45)] == [0, 1, 2, 2, 4, 4]
    assert [versions.version_of(count) for count in (0, 1, 2, 3, 4, 5)] == [0, 41, 42, 42, 44, 44]


@pytest.mark.parametrize(
    ("rewards", "wanted"), [([0.0, 1.0], [-1.0, 1.0]), ([3.0, 3.0, 3.0], [0.0, 0.0, 0.0]), ([2.0], [0.0])]
)
def test_advantages_are_rewards_less_their_mean_over_their_deviation(rewards: list[float], wanted: list[float]) -> None:
    assert advantages_of(rewards) == pytest.approx(wanted, abs=1e-6)
