"""A whole run over stand-ins: how it ends, in what order, and what it leaves behind."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.demo import run as run_module
from deploy.demo.display import PlainDisplay
from deploy.demo.outcome import verdict, write_report
from deploy.demo.plan import ENGINES, RELAYS, Plan, Settings
from deploy.demo.processes import Command
from deploy.demo.recording import EngineChange, GatewayStatus, LastPlans, Note, PlanSeen, Recording, Step
from deploy.demo.report import summarise
from deploy.demo.run import Outcome, Run

pytestmark = pytest.mark.slow  # each starts the demo's processes

STAND_IN = str(Path(__file__).with_name("standin.py"))


@dataclass(frozen=True, slots=True)
class StandInPlan(Plan):
    """The plan of a run whose processes are stand-ins. `trainer_does` is "train", "fail" or "stall"; without `cuts` no
    turn is ever cut."""

    trainer_does: str = "train"
    cuts: bool = True

    def etcd(self) -> Command:
        return _daemon("etcd", etcd="127.0.0.1:1")

    def relay(self, name: str, etcd_address: str) -> Command:
        return _daemon(name, grpc="127.0.0.1:1")

    def engine(self, name: str, port: int = 0) -> Command:
        return _daemon(name, url=f"http://127.0.0.1:{port or 1}")

    def gateway(self, engines: Mapping[str, str], relays: Sequence[str]) -> Command:
        return Command("gateway", ("-S", STAND_IN, "gateway", "cuts" if self.cuts else "none"))

    def trainer(self, relay_address: str, gateway_url: str) -> Command:
        steps, out = str(self.settings.steps), str(self.settings.trainer_events)
        return Command("trainer", ("-S", STAND_IN, "trainer", self.trainer_does, steps, out), ends_by_itself=True)

    def runner(self, environment: str, gateway_url: str) -> Command:
        return _daemon(f"agents-{environment}")


def _daemon(name: str, **announced: str) -> Command:
    return Command(name, ("-S", STAND_IN, "daemon", json.dumps(announced)))


@dataclass(frozen=True, slots=True)
class Played:
    plan: StandInPlan
    outcome: Outcome
    recording: Recording


async def play(plan: StandInPlan, recording: Recording, stop: asyncio.Event | None = None, **waits: float) -> Played:
    """`waits`: lengths of the run's module, by name, that are shorter here."""
    with pytest.MonkeyPatch.context() as patch:
        for name, seconds in {"AWAY_S": 0.05, **waits}.items():
            patch.setattr(run_module, name, seconds)
        outcome = await Run(plan, recording, PlainDisplay(), stop or asyncio.Event()).run()
    return Played(plan, outcome, recording)


def settings(directory: Path, **options: object) -> Settings:
    made = Settings(
        model_dir=directory,
        report_dir=directory / "report",
        data_dir=directory / "data",
        pool_dir=directory / "pools",
        **{"steps": 3, **options},  # type: ignore[arg-type]
    )
    made.logs.mkdir(parents=True)
    return made


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """One run to its end, which several tests look at."""
    return asyncio.run(play(StandInPlan(settings(tmp_path_factory.mktemp("whole"))), Recording()))


def test_a_run_kills_an_engine_brings_it_back_and_ends_by_itself(whole: Played) -> None:
    outcome, recording = whole.outcome, whole.recording
    assert outcome.problem is None
    killed = [(exit.name, exit.status) for exit in outcome.exits if exit.ending == "killed on purpose"]
    assert killed == [("engine-1", -signal.SIGKILL)]
    assert all(exit.clean for exit in outcome.exits)
    assert [note.kind for note in recording.of(Note) if note.engine] == ["kill", "restart", "restart"]
    assert len(recording.of(Step)) == 3
    assert len(recording.of(EngineChange)) == 1  # asked for on every poll, recorded once
    assert recording.last(GatewayStatus) is not None


def test_processes_end_consumers_first(whole: Played) -> None:
    order = [exit.name for exit in whole.outcome.exits if exit.ending == "on request"]
    ranks = {"agents-tool-chain": 1, "agents-reasoning": 1, "gateway": 2, "etcd": 5}
    ranks |= dict.fromkeys(ENGINES, 3) | dict.fromkeys(RELAYS, 4)
    assert [ranks[name] for name in order] == sorted(ranks.values())


def test_a_report_of_the_run_is_left(whole: Played) -> None:
    directory = whole.plan.settings.report_dir
    ok, why, page = write_report(whole.plan.settings, whole.recording, whole.outcome)
    clean, repack = why.split("; ")
    assert (ok, clean) == (True, f"no turn was lost, and all {len(whole.outcome.exits)} processes ended cleanly")
    assert repack.startswith("nothing was repacked, which is no fault: whenever the planner looked")
    assert page.read_text().startswith("<!doctype html>")
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["turns_lost"], summary["wall_s"]) == (0, round(whole.outcome.wall_s, 2))
    assert (summary["steps"], summary["engines_killed"], summary["dtype"]) == (3, 1, "bfloat16")
    again = Recording.from_json((directory / "recording.jsonl").read_bytes())
    assert list(again) == list(whole.recording)
    assert (directory / "logs" / "trainer.log").exists()


async def test_a_process_that_fails_ends_the_run_with_its_last_words(tmp_path: Path) -> None:
    outcome = (await play(StandInPlan(settings(tmp_path), trainer_does="fail"), Recording())).outcome
    assert outcome.problem is not None
    assert "trainer" in outcome.problem
    assert "fails as it was told to" in outcome.problem
    assert [exit.status for exit in outcome.exits if exit.name == "trainer"] == [1]


async def test_a_run_in_which_nothing_goes_on_ends_with_what_stands_still(tmp_path: Path) -> None:
    plan = StandInPlan(settings(tmp_path), trainer_does="stall")
    outcome = (await play(plan, Recording(), STALL_S=0.3, STALL_POLL_S=0.05)).outcome
    assert outcome.problem is not None
    # None of the gateway's tokens, where it was not looked at yet.
    assert re.match("no progress for 0 s, after 0 training steps, [07] tokens and 0 traj", outcome.problem)
    assert all(exit.clean for exit in outcome.exits)


async def test_a_budget_that_is_over_ends_nothing(tmp_path: Path) -> None:
    outcome = (await play(StandInPlan(settings(tmp_path, budget_s=0.01)), Recording())).outcome
    assert outcome.problem is None, "the trainer alone knows what still fits"


async def test_a_kill_that_cuts_no_turn_is_made_again_and_then_told(tmp_path: Path) -> None:
    plan, recording = StandInPlan(settings(tmp_path), cuts=False), Recording()
    outcome = (await play(plan, recording, CUT_SEEN_S=0.05)).outcome
    assert outcome.problem is None
    assert [exit.ending for exit in outcome.exits].count("killed on purpose") == run_module.KILLS_MAX
    assert sum("no turn was cut by that" in note.text for note in recording.of(Note)) == run_module.KILLS_MAX
    ok, why = verdict(outcome, summarise(recording, outcome.wall_s), recording, plan.settings)
    assert (ok, why) == (False, "no turn was cut, though 3 engines were killed in mid-generation")


async def test_a_request_to_stop_ends_everything_cleanly(tmp_path: Path) -> None:
    stop, recording = asyncio.Event(), Recording()
    running = asyncio.create_task(play(StandInPlan(settings(tmp_path), trainer_does="stall"), recording, stop))
    async with asyncio.timeout(60):
        while not recording.of(Note)[-1:] or "set-up took" not in recording.of(Note)[-1].text:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    stop.set()
    outcome = (await running).outcome
    assert outcome.interrupted
    assert len(outcome.exits) == 11
    assert {exit.status for exit in outcome.exits} == {0}


async def test_no_kill_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.demo.victim.RUNNING_MIN", 99)
    plan = StandInPlan(settings(tmp_path, steps=1))
    played = await play(plan, Recording(), KILL_GRACE_S=0.2)
    outcome, recording = played.outcome, played.recording
    assert outcome.problem is not None
    assert "none was killed" in outcome.problem
    ok, why = verdict(outcome, summarise(recording, outcome.wall_s), recording, plan.settings)
    assert not ok
    assert "none was killed" in why


# ---- the verdict

CLEAN = Outcome(None, interrupted=False, exits=(), zero_unix_s=0.0, setup_s=1.0, wall_s=10.0)


def told(tmp_path: Path, *, steps: int = 3, plans: tuple[PlanSeen, ...] = (), **counters: int) -> tuple[bool, str]:
    """The verdict on a run that ended cleanly."""
    done = [
        Step(
            t=0,
            step=i,
            version=i,
            reward_mean=0,
            loss=0,
            staleness_mean=0,
            staleness_max=0,
            tokens=1,
            seconds=1,
            wait_s=0,
        )
        for i in range(1, steps + 1)
    ]
    looks = [
        GatewayStatus(repack=LastPlans(plans=plans)),
        GatewayStatus(counters={"turns_cut": 1, "repacks": 1} | counters),
    ]
    recording = Recording([*done, *looks])
    return verdict(CLEAN, summarise(recording, 10.0), recording, settings(tmp_path))


def test_all_that_should_happen_did(tmp_path: Path) -> None:
    assert told(tmp_path) == (True, "no turn was lost, and all 0 processes ended cleanly")


def test_a_lost_turn_fails_the_run(tmp_path: Path) -> None:
    assert told(tmp_path, turns_lost=1) == (False, "1 turns were lost")


def test_a_run_without_a_step_or_without_a_cut_fails(tmp_path: Path) -> None:
    assert told(tmp_path, steps=0) == (False, "no training step was done")
    (tmp_path / "b").mkdir()
    assert told(tmp_path / "b", turns_cut=0)[0] is False


def test_fewer_steps_than_asked_for_are_told_and_no_fault(tmp_path: Path) -> None:
    ok, why = told(tmp_path, steps=2)
    assert ok
    assert "2 of 3 training steps fitted into 240 s on this processor, which is no fault" in why


def test_no_repack_is_told_with_the_planners_own_reason(tmp_path: Path) -> None:
    ok, why = told(tmp_path, repacks=0)
    assert ok
    assert "no engine had turns of an older version" in why
    (tmp_path / "b").mkdir()
    ok, why = told(
        tmp_path / "b", repacks=0, plans=(PlanSeen(version=1, reasons=("engine-2 stays: it does not pay",)),)
    )
    assert ok
    assert "in 1 looks it never paid, mostly because engine-2 stays: it does not pay" in why
