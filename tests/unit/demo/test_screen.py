"""The live view, as text."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from deploy.demo.display import LiveDisplay, PlainDisplay
from deploy.demo.recording import (
    EngineStatus,
    GatewayStatus,
    Note,
    Recording,
    RelaySeen,
    Segment,
    Step,
    StepProgress,
    TrainerPace,
)
from deploy.demo.screen import Progress, events, how_far, line, screen, spark, tokens_per_s
from tests.unit.demo.synthetic import RELAYS, ZERO, make

PROGRESS = Progress("training", seconds=120.0, budget_s=240.0, steps=8, relays=RELAYS, zero_unix_s=ZERO)


def shown(recording: Recording) -> str:
    console = Console(width=120, file=io.StringIO())
    console.print(screen(recording, PROGRESS))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_every_part_of_the_run_is_on_the_screen() -> None:
    text = shown(make(1))
    for words in ("engine-3", "relay-2", "serving", "step 8 of 8", "lost 0", "v9", "copied", "sealed", "held"):
        assert words in text, words
    assert "step 8: reward" in text  # the events line


def test_an_empty_recording_is_shown_too() -> None:
    assert "step 0 of 8" in shown(Recording())
    assert line(Recording(), PROGRESS).startswith("[  120 s] step 0 of 8 | newest v?")


@pytest.mark.parametrize(
    ("kind", "words"), [("transfer", "copying 40%"), ("available", "held"), ("retired", "retired"), ("lost", "lost")]
)
def test_where_a_version_stands_on_a_relay(kind: str, words: str) -> None:
    seen = RelaySeen(t=ZERO, relay="relay-2", version=1, kind=kind, bytes_done=4, bytes_total=10)
    assert words in shown(Recording([seen])).split("v1")[1]


def test_a_lost_turn_and_a_dead_engine_are_plain_to_see() -> None:
    engine = EngineStatus(name="engine-1", version=3, state="dead", running=2, kv_usage=0.5)
    text = shown(Recording([GatewayStatus(engines=(engine,), counters={"turns_lost": 2})]))
    assert "lost 2" in text
    assert "dead" in text
    assert "50%" in text


def test_one_line_says_it_all() -> None:
    text = line(make(1), PROGRESS)
    assert "step 8 of 8 reward" in text
    assert "engine-1:v" in text
    assert text.endswith("lost 0")


def test_how_far_training_is_and_how_long_it_will_take() -> None:
    t = ZERO + 100
    pace = TrainerPace(t=t, done=0, groups=2, steps=6, left_s=150.0)
    seen = [pace, StepProgress(t=t + 9, step=1, share=0.25), StepProgress(t=t + 18, step=1, share=0.5)]
    words = "step 0 of 8 and 50% of the next (6 fit into 240 s), some 130 s to go"
    assert how_far(Recording(seen), PROGRESS) == words
    all_fit = TrainerPace(t=t, done=0, groups=4, steps=8, left_s=10.0)
    assert how_far(Recording([all_fit]), PROGRESS) == "step 0 of 8, some 0 s to go"
    assert words in shown(Recording(seen))
    assert words in line(Recording(seen), PROGRESS)


def test_events_are_in_order_of_time() -> None:
    times = [t for t, _ in events(make(1))]
    assert times == sorted(times)
    assert len(times) > 20


def test_tokens_per_s_counts_what_ended_lately() -> None:
    seen = [segment for segment in make(1).of(Segment) if segment.engine == "engine-1"]
    now = ZERO + 200
    expected = sum(one.tokens for one in seen if now - 10 <= one.ended_unix_s <= now) / 10
    before = [one for one in seen if one.ended_unix_s <= now]
    assert tokens_per_s(before, now) == {"engine-1": pytest.approx(expected)}
    assert tokens_per_s(before, now + 100) == {}


def test_spark() -> None:
    assert spark([0.0, 0.5, 1.0, 7.0]) == "▁▅██"
    assert spark([]) == ""


def test_lines_come_once_each(capsys: pytest.CaptureFixture[str]) -> None:
    recording = Recording([Note(t=ZERO + 3, kind="phase", text="something happened")])
    with PlainDisplay() as display:
        display.update(recording, PROGRESS)
        display.update(recording, PROGRESS)
    assert capsys.readouterr().out.splitlines() == ["[    3 s] something happened", line(recording, PROGRESS)]


def test_the_live_display_draws_in_place() -> None:
    console = Console(width=100, height=60, force_terminal=True, file=io.StringIO())
    with LiveDisplay(console) as display:
        display.update(make(1), PROGRESS)
    step = Step(
        t=1,
        step=1,
        version=2,
        reward_mean=0.5,
        loss=0,
        staleness_mean=0,
        staleness_max=0,
        tokens=1,
        seconds=1,
        wait_s=0,
    )
    with LiveDisplay(console) as display:
        display.update(Recording([step]), PROGRESS)
    assert "step 1 of 8" in console.file.getvalue()  # type: ignore[attr-defined]
