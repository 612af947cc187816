"""The door: who may enter, whether it computes, and that a half-loaded engine stays fenced."""

from __future__ import annotations

import pytest

from gateway.engines.embedded.control import Control, EnginePaused, PauseMode
from protos.errors import Conflict


def updating() -> Control:
    control = Control()
    control.init_transfer()
    control.start_update()
    return control


@pytest.mark.parametrize(
    ("mode", "idle", "state", "computes", "admits"),
    [
        ("abort", True, "paused", False, False),
        ("wait", False, "draining", True, False),
        ("wait", True, "paused", False, False),
        ("keep", False, "paused", False, True),
    ],
)
def test_pause_modes(mode: PauseMode, idle: bool, state: str, computes: bool, admits: bool) -> None:
    control = Control()
    control.pause(mode, idle=idle)
    assert (control.state, control.computes) == (state, computes)
    if admits:
        control.check_admission()
    else:
        with pytest.raises(EnginePaused, match=state):
            control.check_admission()
    control.resume()
    assert (control.state, control.computes) == ("serving", True)
    control.check_admission()


def test_an_update_fences_until_its_finish() -> None:
    control = updating()
    assert (control.state, control.computes) == ("updating", False)
    with pytest.raises(EnginePaused, match="updating"):
        control.check_admission()
    control.touch()
    control.loaded()
    with pytest.raises(Conflict, match="finish the weight update first"):
        control.resume()
    control.finish_update("2", "1")
    assert control.state == "serving"


def test_an_update_inside_a_pause_returns_to_the_pause() -> None:
    control = updating()
    control.pause("keep", idle=False)
    control.touch()
    control.loaded()
    control.finish_update("2", "1")
    assert control.state == "paused"


def test_a_load_that_failed_halfway_keeps_the_fence_until_a_good_one() -> None:
    control = updating()
    control.touch()
    with pytest.raises(Conflict, match="mixed"):
        control.finish_update("2", "1")
    assert control.state == "updating"
    control.touch()
    control.loaded()
    control.finish_update("1", "1")
    assert control.state == "serving"


def test_a_second_load_that_fails_takes_the_first_ones_success_away() -> None:
    control = updating()
    control.touch()
    control.loaded()
    control.touch()
    with pytest.raises(Conflict, match="mixed"):
        control.finish_update("2", "1")


def test_a_label_needs_weights() -> None:
    control = updating()
    with pytest.raises(Conflict, match="false label"):
        control.finish_update("2", "1")
    control.finish_update("1", "1")
    assert control.state == "serving"


def test_a_failed_reload_outside_a_session_fences_too() -> None:
    control = Control()
    control.touch()
    assert control.state == "updating"
    with pytest.raises(Conflict):
        control.resume()
    control.loaded()
    assert control.state == "serving"


def test_sessions_in_order_only() -> None:
    control = Control()
    with pytest.raises(Conflict, match="init_weight_transfer_engine"):
        control.start_update()
    with pytest.raises(Conflict, match="start_weight_update"):
        control.check_session()
    control.init_transfer()
    control.start_update()


def test_a_session_left_open_can_be_begun_anew_and_must_receive_again() -> None:
    control = updating()
    control.touch()
    control.loaded()
    control.start_update()
    assert control.state == "updating"
    with pytest.raises(Conflict, match="false label"):
        control.finish_update("2", "1")
