"""From events to summary, report model and page."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from itertools import pairwise

import pytest

from deploy.demo.recording import GatewayStatus, Note, Publish, Recording, Refresh, RelaySeen, Segment, SessionChange
from deploy.demo.report import render, report_model, summarise
from deploy.demo.report.model import Bar, ReportModel, RunInfo, jumps, place, travels
from deploy.demo.report.summary import thirds, weighed_thirds
from tests.unit.demo.synthetic import ENGINES, KILL_S, RELAYS, REPACK_S, ZERO, make

RUN = RunInfo(
    title="a run", started_unix_s=ZERO, wall_s=270.0, setup_s=30.0, seed=1, ok=True, verdict="fine", processes=()
)


def segment(session: str, t0: float, t1: float, *, turn: int = 0, engine: str = "engine-1", **more: str) -> Segment:
    texts = {"cause": "start", "end": "finished", **more}
    return Segment(
        session_id=session,
        turn=turn,
        engine=engine,
        version=1,
        started_unix_s=ZERO + t0,
        ended_unix_s=ZERO + t1,
        tokens=5,
        **texts,
    )


def finished(t: float, reward: float, *, train: bool = True) -> SessionChange:
    return SessionChange(
        t_unix_s=ZERO + t, session_id=f"s{t}", state="finished", reward=reward, environment="tool-chain", train=train
    )


@pytest.fixture(scope="module")
def model() -> ReportModel:
    recording = make(1)
    return report_model(recording, RUN, summarise(recording, RUN.wall_s))


# ---- summary


def test_summary_of_nothing_is_zeros() -> None:
    summary = summarise(Recording(), 0.0)
    assert {getattr(summary, field) for field in type(summary).__slots__} == {0}


def test_summary_counts_versions_once_and_means_their_times() -> None:
    publish = Publish(t=ZERO, version=1, step=0, stall_s=0.1, sealed_s=0.2, broadcast_s=0.4)
    late = Publish(t=ZERO, version=2, step=1, stall_s=0.3, sealed_s=0.4, broadcast_s=None)
    summary = summarise(Recording([publish, late]), 10.0)
    assert (summary.versions_published, summary.publish_stall_s, summary.broadcast_s) == (2, 0.2, 0.4)


def test_summary_takes_the_last_counters() -> None:
    statuses = [GatewayStatus(counters={"turns_cut": n, "tokens_generated": 100 * n}) for n in (1, 2)]
    summary = summarise(Recording(statuses), 10.0)
    assert (summary.turns_cut, summary.tokens_per_s) == (2, 20.0)


def test_rewards_are_of_training_trajectories_in_order_of_their_ends() -> None:
    seen = [finished(3, 1.0), finished(1, 0.0), finished(2, 0.5), finished(4, 0.0, train=False)]
    summary = summarise(Recording(seen), 10.0)
    assert (summary.reward_first_third, summary.reward_last_third) == (0.0, 1.0)


def test_a_changing_mix_of_environments_is_no_rise() -> None:
    early = [(t, "easy", 0.9) for t in (1, 2, 3)] + [(t, "hard", 0.1) for t in (4, 5, 6, 7, 8, 9)]
    late = [(10 + t, "easy", 0.9) for t in range(6)] + [(20.0, "hard", 0.1)]
    first, last = weighed_thirds([*early, *late])
    assert first == last == pytest.approx((9 * 0.9 + 7 * 0.1) / 16, abs=1e-4)
    assert weighed_thirds([]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], (0.0, 0.0)), ([1.0, 1.0], (0.0, 0.0)), ([0.0, 9.0, 1.0], (0.0, 1.0)), ([0, 1, 9, 9, 9, 2, 4], (0.5, 3.0))],
)
def test_thirds(values: list[float], expected: tuple[float, float]) -> None:
    assert thirds(values) == expected


# ---- timeline


def test_overlapping_segments_get_lanes_of_their_own() -> None:
    bars = place([segment("a", 0, 4), segment("b", 1, 2), segment("c", 2.5, 3)], ZERO)
    assert [(bar.session, bar.lane) for bar in bars] == [("a", 0), ("b", 1), ("c", 1)]


def test_a_session_keeps_its_lane_when_it_is_free() -> None:
    parts = [segment("a", 0, 1), segment("b", 0.5, 2), segment("b", 3, 4, turn=1), segment("a", 3.5, 5, turn=1)]
    assert [(bar.session, bar.lane) for bar in place(parts, ZERO)] == [("a", 0), ("b", 1), ("b", 1), ("a", 0)]


@pytest.mark.parametrize("seed", range(5))
def test_no_two_bars_on_a_lane_overlap(seed: int) -> None:
    lanes: dict[tuple[str, int], list[Bar]] = defaultdict(list)
    for bar in place(make(seed).of(Segment), ZERO):
        lanes[bar.engine, bar.lane].append(bar)
    assert len(lanes) > 10
    for bars in lanes.values():
        for before, after in pairwise(sorted(bars, key=lambda bar: (bar.t0, bar.t1))):
            assert before.t1 <= after.t0 + 0.002, (before, after)


def test_jumps_join_the_segments_of_one_turn() -> None:
    parts = [
        segment("a", 0, 1, end="moved"),
        segment("a", 1.5, 2, engine="engine-2", cause="move", end="cut"),
        segment("a", 2.5, 3, engine="engine-3", cause="cut"),
        segment("a", 3.5, 4, engine="engine-3", turn=1),
        segment("b", 0, 1),
    ]
    bars = place(parts, ZERO)
    names = [(bars[j.source].engine, bars[j.target].engine, j.cause) for j in jumps(bars)]
    assert names == [("engine-1", "engine-2", "move"), ("engine-2", "engine-3", "cut")]


def test_the_model_shows_the_kill_the_repack_and_the_refreshes(model: ReportModel) -> None:
    dead = [span for span in model.spans if span.kind == "dead"]
    assert [(span.engine, span.t0) for span in dead] == [("engine-2", KILL_S)]
    assert dead[0].t1 > KILL_S
    assert [plan["t"] for plan in model.repacks] == [REPACK_S]
    assert len([span for span in model.spans if span.kind == "refresh"]) > 10
    assert {jump.cause for jump in model.jumps} >= {"cut"}
    assert [engine.name for engine in model.engines] == list(ENGINES)
    assert model.duration_s >= RUN.wall_s


def test_an_engine_that_never_came_back_is_dead_to_the_end() -> None:
    recording = Recording([Note(t=ZERO + 20, kind="kill", text="killed", engine="engine-1")])
    spans = report_model(recording, RUN, summarise(recording, RUN.wall_s)).spans
    assert [(span.t0, span.t1) for span in spans] == [(20.0, RUN.wall_s)]


# ---- versions


def test_a_version_is_followed_from_the_trainer_to_the_engines() -> None:
    publish = Publish(t=ZERO + 1.5, version=2, step=1, stall_s=0.1, sealed_s=0.2, broadcast_s=0.5)
    held = RelaySeen(t=ZERO + 1.3, relay="relay-2", version=2, kind="available", sealed_unix_s=ZERO + 1.2)
    loaded = [Refresh(t_unix_s=ZERO + t, engine="engine-1", from_version=1, to_version=2, seconds=0.5) for t in (7, 30)]
    (travel,) = travels(Recording([publish, held, *loaded]), ZERO)
    assert (travel.began, travel.copied, travel.sealed) == pytest.approx((1.0, 1.1, 1.2))
    assert travel.held == {"relay-2": 1.3}
    assert travel.loaded == {"engine-1": 7.0}


def test_a_version_that_only_relays_told_of(model: ReportModel) -> None:
    seen = RelaySeen(t=ZERO + 1, relay="relay-1", version=5, kind="available", sealed_unix_s=ZERO + 0.9)
    (travel,) = travels(Recording([seen]), ZERO)
    assert (travel.version, travel.began) == (5, None)
    assert travel.sealed == pytest.approx(0.9)
    assert model.relays == RELAYS


# ---- page


def test_the_page_is_one_file_that_asks_nobody(model: ReportModel) -> None:
    page = render(model)
    assert not re.findall(r"(?:src|href)\s*=", page)
    assert not re.findall(r"@import|url\((?!#)", page)
    assert set(re.findall(r"https?://[^\s\"'<]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "/*data*/" not in page


def test_the_page_carries_its_data(model: ReportModel) -> None:
    embedded = re.search(r'<script type="application/json" id="data">(.*?)</script>', render(model), re.DOTALL)
    assert embedded is not None
    data = json.loads(embedded[1])
    assert len(data["bars"]) == len(model.bars) > 500
    assert data["jumps"][0] == [model.jumps[0].source, model.jumps[0].target, "cut"]
    assert data["summary"]["turns_lost"] == 0


def test_no_name_can_break_out_of_the_data() -> None:
    evil = "</script><script>alert(1)</script>"
    recording = Recording([segment(evil, 0, 1)])
    page = render(report_model(recording, RUN, summarise(recording, 1.0)))
    assert "alert(1)</script>" not in page
    assert page.count("</script>") == 2
