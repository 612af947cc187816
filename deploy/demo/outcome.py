"""The result of a run: the verdict, and the files of its report."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import msgspec

from deploy.demo.plan import Settings
from deploy.demo.recording import GatewayStatus, Recording
from deploy.demo.report import Summary, render, report_model, summarise
from deploy.demo.report.model import RunInfo
from deploy.demo.run import Outcome


def verdict(outcome: Outcome, summary: Summary, recording: Recording, settings: Settings) -> tuple[bool, str]:
    """Whether the run ends with status 0, and why: the problems, or else what was shown and what was not."""
    problems = [] if outcome.problem is None else [outcome.problem.splitlines()[0]]
    if summary.turns_lost:
        problems.append(f"{summary.turns_lost} turns were lost")
    problems += [str(exit) for exit in outcome.exits if not exit.clean]
    if not problems and not summary.steps:
        problems.append("no training step was done")
    if not problems and not summary.turns_cut:
        problems.append(f"no turn was cut, though {summary.engines_killed} engines were killed in mid-generation")
    if problems:
        return False, "; ".join(problems)
    shown = [f"no turn was lost, and all {len(outcome.exits)} processes ended cleanly"]
    if summary.steps < settings.steps:
        shown.append(
            f"{summary.steps} of {settings.steps} training steps fitted into {settings.budget_s:.0f} s on this "
            "processor, which is no fault: give it more (--budget-s)"
        )
    if not summary.repacks:
        shown.append(no_repack(recording))
    return True, "; ".join(shown)


def no_repack(recording: Recording) -> str:
    """Why nothing was packed, and why that is no fault: no plan would have gained anything."""
    looks = [plan for seen in recording.of(GatewayStatus) for plan in seen.repack.plans if plan.reasons]
    if not looks:
        return (
            "nothing was repacked, which is no fault: whenever the planner looked, no engine had turns of an older "
            "version, or others that could take them"
        )
    (reason, _), *_ = Counter(reason for plan in looks for reason in plan.reasons).most_common(1)
    return f"nothing was repacked, which is no fault: in {len(looks)} looks it never paid, mostly because {reason}"


def write_report(settings: Settings, recording: Recording, outcome: Outcome) -> tuple[bool, str, Path]:
    """Writes summary.json, report.html and recording.jsonl; returns the verdict and the page's path."""
    summary = summarise(recording, outcome.wall_s)
    ok, why = verdict(outcome, summary, recording, settings)
    run = RunInfo(
        title=f"Laminar demo: {settings.model_dir.name} learns by GRPO",
        started_unix_s=outcome.zero_unix_s,
        wall_s=round(outcome.wall_s, 2),
        setup_s=round(outcome.setup_s, 2),
        seed=settings.seed,
        ok=ok,
        verdict=why,
        facts={
            "steps": f"{summary.steps} of {settings.steps}",
            "batch": f"at most {settings.groups} prompts x {settings.group_size} samples",
            "cores": str(os.cpu_count()),
            "dtype": settings.dtype,
            "threads": f"trainer {settings.trainer_threads}, engines {settings.engine_threads}",
        },
        processes=tuple({**asdict(exit), "clean": exit.clean} for exit in outcome.exits),
    )
    directory = settings.report_dir
    computed = {"dtype": settings.dtype, "trainer_threads": settings.trainer_threads, "seed": settings.seed}
    summary_json = msgspec.json.format(msgspec.json.encode({**asdict(summary), **computed}), indent=2)
    (directory / "summary.json").write_bytes(summary_json + b"\n")
    (directory / "recording.jsonl").write_bytes(recording.to_json())
    page = directory / "report.html"
    page.write_text(render(report_model(recording, run, summary)))
    return ok, why, page
