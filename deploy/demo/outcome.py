"""What a run leaves behind: the verdict, and the files of its report."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import msgspec

from deploy.demo.plan import Settings
from deploy.demo.recording import Recording
from deploy.demo.report import Summary, render, report_model, summarise
from deploy.demo.report.model import RunInfo
from deploy.demo.run import Outcome


def verdict(outcome: Outcome, summary: Summary) -> tuple[bool, str]:
    """Whether the run may end with status 0, and why."""
    problems = [] if outcome.problem is None else [outcome.problem.splitlines()[0]]
    if summary.turns_lost:
        problems.append(f"{summary.turns_lost} turns were lost")
    problems += [str(exit) for exit in outcome.exits if not exit.clean]
    if problems:
        return False, "; ".join(problems)
    return True, f"no turn was lost, and all {len(outcome.exits)} processes ended cleanly"


def write_report(settings: Settings, recording: Recording, outcome: Outcome) -> tuple[bool, str, Path]:
    """Writes summary.json, report.html and recording.jsonl; returns the verdict and the page's path."""
    summary = summarise(recording, outcome.wall_s)
    ok, why = verdict(outcome, summary)
    run = RunInfo(
        title="Laminar demo: SmolLM2-135M-Instruct learns by GRPO",
        started_unix_s=outcome.zero_unix_s,
        wall_s=round(outcome.wall_s, 2),
        setup_s=round(outcome.setup_s, 2),
        seed=settings.seed,
        ok=ok,
        verdict=why,
        facts={
            "steps": str(settings.steps),
            "batch": f"{settings.groups} prompts x {settings.group_size} samples",
            "cores": str(os.cpu_count()),
        },
        processes=tuple({**asdict(exit), "clean": exit.clean} for exit in outcome.exits),
    )
    directory = settings.report_dir
    summary_json = msgspec.json.format(msgspec.json.encode(asdict(summary)), indent=2)
    (directory / "summary.json").write_bytes(summary_json + b"\n")
    (directory / "recording.jsonl").write_bytes(recording.to_json())
    page = directory / "report.html"
    page.write_text(render(report_model(recording, run, summary)))
    return ok, why, page
