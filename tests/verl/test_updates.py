"""verl's updates of weights through relays: by its own manager on local Ray, and to engines outside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.verl.scene import Scene

pytestmark = [pytest.mark.verl, pytest.mark.slow]


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    with ExitStack() as stack:
        yield Scene(tmp_path_factory.mktemp("updates"), stack).run("updates")


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
