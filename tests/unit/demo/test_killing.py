"""When and whom to kill."""

from __future__ import annotations

from itertools import zip_longest

import pytest

from deploy.demo.recording import EngineStatus, GatewayStatus
from deploy.demo.victim import choose_victim


def status(*running: int, state: str = "serving", versions: tuple[int, ...] = ()) -> GatewayStatus:
    engines = (
        EngineStatus(name=f"engine-{i}", state=state, running=n, version=version)
        for i, (n, version) in enumerate(zip_longest(running, versions, fillvalue=1), start=1)
    )
    return GatewayStatus(engines=tuple(engines))


def test_the_busiest_serving_engine_after_a_third() -> None:
    choice = choose_victim(status(3, 7, 5), steps_done=2, steps=8)
    assert choice.engine == "engine-2"
    assert choice.reason == "7 turns in mid-generation"


def test_after_a_third_of_the_time_where_steps_are_slow() -> None:
    assert choose_victim(status(3, 7), steps_done=0, steps=8, budget_used=0.3).engine is None
    assert choose_victim(status(3, 7), steps_done=0, steps=8, budget_used=0.34).engine == "engine-2"


def test_rather_one_whose_turns_can_go_on_under_their_version() -> None:
    assert choose_victim(status(8, 3, 2, versions=(5, 4, 4)), steps_done=2, steps=8).engine == "engine-2"
    assert choose_victim(status(8, 3, versions=(5, 4)), steps_done=2, steps=8).engine == "engine-1", "no such one"


def test_the_first_of_equals() -> None:
    assert choose_victim(status(4, 4, 1), steps_done=3, steps=8).engine == "engine-1"


@pytest.mark.parametrize(
    ("seen", "steps_done", "reason"),
    [
        (status(8, 8), 1, "1 of 8 steps done: not a third yet"),
        (None, 2, "fewer than two engines serve"),
        (status(8), 2, "fewer than two engines serve"),
        (status(8, 8, state="refreshing"), 2, "fewer than two engines serve"),
        (status(1, 0, 1), 2, "no engine runs 2 turns right now"),
    ],
)
def test_reasons_to_wait(seen: GatewayStatus | None, steps_done: int, reason: str) -> None:
    choice = choose_victim(seen, steps_done, steps=8)
    assert choice.engine is None
    assert choice.reason.startswith(reason)


def test_a_run_of_one_step_still_sees_a_kill() -> None:
    assert choose_victim(status(2, 2), steps_done=1, steps=1).engine == "engine-1"
