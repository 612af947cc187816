"""What counts as standing still."""

from __future__ import annotations

from tests.soak.liveness import STALL_S, Liveness


def test_what_grows_and_serves_is_no_finding() -> None:
    found = Liveness()
    for second in range(0, int(3 * STALL_S), 60):
        assert found.look({"versions": second}, {"relay-1": True}, float(second)) == []


def test_a_stall_is_found_once_and_again_after_it_moved() -> None:
    found = Liveness()
    assert found.look({"versions": 29}, {}, 0.0) == []
    assert found.look({"versions": 29}, {}, STALL_S - 1) == []
    assert found.look({"versions": 29}, {}, STALL_S) == [f"no versions for {STALL_S:.0f} s"]
    assert found.look({"versions": 29}, {}, STALL_S + 5) == []
    assert found.look({"versions": 30}, {}, STALL_S + 10) == []
    assert found.look({"versions": 30}, {}, 2 * STALL_S + 10) == [f"no versions for {STALL_S:.0f} s"]


def test_a_process_that_does_not_come_back_is_found() -> None:
    found = Liveness()
    found.look({}, {"relay-1": True, "relay-2": True}, 0.0)
    assert found.look({}, {"relay-1": False, "relay-2": True}, STALL_S) == [
        f"relay-1 does not serve for {STALL_S:.0f} s"
    ]
