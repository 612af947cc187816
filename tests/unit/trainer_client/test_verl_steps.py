"""verl's `global_steps` of versions."""

from __future__ import annotations

import pytest

from protos.errors import Unavailable
from trainer_client.integrations.verl.steps import VERSIONS_MAX, Steps


def test_a_version_has_the_step_under_which_it_was_published() -> None:
    steps = Steps()
    steps.seen([(1, 0), (2, 7)])
    steps.seen([(2, 7), (3, 3)])
    assert steps.newest == 3
    assert [steps.of(version) for version in (1, 2, 3)] == [0, 7, 3]


def test_a_version_that_was_never_seen_counts_as_the_one_before_it() -> None:
    steps = Steps()
    steps.seen([(2, 20), (5, 50)])
    assert steps.of(4) == 20
    with pytest.raises(Unavailable, match="version 1 has no step"):
        steps.of(1)


def test_before_the_first_publish_there_is_no_newest_version() -> None:
    with pytest.raises(Unavailable, match="no weights were published"):
        _ = Steps().newest


def test_only_the_newest_versions_are_remembered() -> None:
    steps = Steps()
    steps.seen((version, version) for version in range(1, VERSIONS_MAX + 3))
    with pytest.raises(Unavailable):
        steps.of(2)
    assert steps.of(3) == 3
