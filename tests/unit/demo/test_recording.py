"""What daemons say, as the demo keeps it."""

from __future__ import annotations

import msgspec
import pytest

from deploy.demo.recording import (
    GatewayStatus,
    Move,
    Note,
    Publish,
    Recording,
    Refresh,
    Repack,
    Step,
    timeline_event,
    trainer_event,
)
from tests.unit.demo.synthetic import make


def test_a_recording_survives_json() -> None:
    recording = make(3)
    again = Recording.from_json(recording.to_json())
    assert len(again) == len(recording) > 1000
    assert list(again) == list(recording)


def test_timeline_events_are_read_by_kind_and_later_fields_ignored() -> None:
    raw = {"seq": 7, "kind": "repack", "t_unix_s": 5, "version": 3, "freed": ["engine-1"], "reason": "why", "new": 1}
    raw["moves"] = [{"session_id": "s", "source": "a", "destination": "b", "tokens": 12}]
    move = Move(session_id="s", source="a", destination="b", tokens=12)
    assert timeline_event(raw) == Repack(t_unix_s=5.0, version=3, moves=(move,), freed=("engine-1",), reason="why")
    assert timeline_event({"seq": 8, "kind": "turn", "t_unix_s": 5}) is None


def test_a_field_of_another_type_is_refused_by_name() -> None:
    raw = {"kind": "refresh", "t_unix_s": 1.0, "engine": "e", "from_version": [], "to_version": 2, "seconds": 1.0}
    with pytest.raises(msgspec.ValidationError, match="from_version"):
        timeline_event(raw)


def test_trainer_events() -> None:
    publish = trainer_event({"t": 10.0, "event": "publish", "version": 2, "step": 1, "stall_s": 0.1, "sealed_s": 0.2})
    assert isinstance(publish, Publish)
    assert publish.broadcast_s is None
    assert publish.began_unix_s == pytest.approx(9.8)
    assert trainer_event({"t": 1.0, "event": "hello"}) is None


def test_last_and_of() -> None:
    recording = Recording()
    assert recording.last(GatewayStatus) is None
    recording.add(Note(t=1.0, kind="phase", text="a"))
    recording.extend([GatewayStatus(t=2.0), GatewayStatus(t=3.0)])
    last = recording.last(GatewayStatus)
    assert last is not None
    assert last.t == 3.0
    assert [note.text for note in recording.of(Note)] == ["a"]
    assert recording.of(Step) == []
    assert recording.of(Refresh) == []


def test_a_counter_that_is_not_there_is_zero() -> None:
    assert GatewayStatus(counters={"moves": 4}).counter("moves") == 4
    assert GatewayStatus(counters={"cuts_by_reason": {"reset": 1}}).counter("moves") == 0
