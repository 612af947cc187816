"""The live view of a run. Pure: a recording in, a rich renderable or one plain line out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deploy.demo.recording import (
    EngineStatus,
    GatewayStatus,
    Note,
    Publish,
    Recording,
    Refresh,
    RelaySeen,
    Repack,
    Segment,
    SessionChange,
    Step,
    StepProgress,
    TrainerPace,
)

VERSIONS_SHOWN = 4
EVENTS_SHOWN = 6
REWARDS_SHOWN = 64  # the newest finished trajectories, whose mean reward is shown
RATE_WINDOW_S = 10.0
BARS = " ▁▂▃▄▅▆▇█"
STATE_STYLE = {"serving": "green", "draining": "yellow", "refreshing": "cyan", "fenced": "red", "dead": "bold red"}


@dataclass(frozen=True, slots=True)
class Progress:
    """What the screen needs to know beside the recording."""

    phase: str
    seconds: float
    budget_s: float
    steps: int
    relays: Sequence[str]
    zero_unix_s: float


def screen(recording: Recording, progress: Progress) -> RenderableType:
    """The whole live view."""
    return Group(
        Panel(_head(recording, progress), box=box.ROUNDED, padding=(0, 1)),
        _engines(recording),
        _versions(recording, progress.relays),
        _rewards(recording, progress.steps),
        _events(recording, progress.zero_unix_s),
    )


def line(recording: Recording, progress: Progress) -> str:
    """The same in one line, for logs."""
    status = recording.last(GatewayStatus) or GatewayStatus()
    engines = " ".join(f"{e.name}:v{_show(e.version)}/{e.state}/{e.running}+{e.waiting}" for e in status.engines)
    steps = recording.of(Step)
    newest = _show(status.newest_version)
    reward = f" reward {steps[-1].reward_mean:.2f} staleness {steps[-1].staleness_mean:.2f}" if steps else ""
    counts = " ".join(
        f"{name} {status.counter(key)}"
        for name, key in (("finished", "trajectories_finished"), ("moves", "moves"), ("cut", "turns_cut"))
    )
    return (
        f"[{progress.seconds:5.0f} s] {how_far(recording, progress)}{reward} | newest v{newest}"
        f" | {engines} | {counts} lost {status.counter('turns_lost')}"
    )


def how_far(recording: Recording, progress: Progress) -> str:
    """The steps done, the share of the next one, and when training will have ended, as the trainer expects it."""
    done, pace = len(recording.of(Step)), recording.last(TrainerPace)
    text = f"step {done} of {progress.steps}"
    if pace is None or done >= pace.steps:
        return text
    within = recording.last(StepProgress)
    if within is not None and within.step == done + 1:
        text += f" and {within.share:.0%} of the next"
    if pace.steps < progress.steps:
        text += f" ({pace.steps} fit into {progress.budget_s:.0f} s)"
    left_s = pace.left_s - (progress.zero_unix_s + progress.seconds - pace.t)
    return f"{text}, some {max(left_s, 0):.0f} s to go"


def spark(values: Sequence[float], low: float = 0.0, high: float = 1.0) -> str:
    """Values as a row of bars."""
    span = (high - low) or 1.0
    return "".join(BARS[1 + round(max(0.0, min(1.0, (value - low) / span)) * (len(BARS) - 2))] for value in values)


def _head(recording: Recording, progress: Progress) -> Text:
    status = recording.last(GatewayStatus) or GatewayStatus()
    count, sessions = status.counter, status.sessions
    text = Text.assemble(
        (f"Laminar demo · {progress.phase} ", "bold"),
        f"· {progress.seconds:.0f} s · {how_far(recording, progress)}\n",
        f"trajectories {count('trajectories_finished')} · in the buffer {status.buffer.trajectories}"
        f" · sessions {sessions.live} · running turns {sessions.running_turns}"
        f" · queued {sessions.queued} · {status.tokens_per_s:.0f} tokens/s\n",
        f"moves {count('moves')} · repacks {count('repacks')} · refreshes {count('refreshes')}",
        f" · turns cut {count('turns_cut')}, resumed {count('turns_resumed')}, ",
    )
    lost = count("turns_lost")
    text.append(f"lost {lost}", style="bold red" if lost else "green")
    return text


def _engines(recording: Recording) -> Table:
    table = _table("engine", "version", "state", "intake", "KV use", ">running", ">waiting", ">tokens/s")
    status = recording.last(GatewayStatus) or GatewayStatus()
    rates = tokens_per_s(recording.of(Segment), status.t)
    for engine in status.engines:
        table.add_row(*_engine_cells(engine, rates.get(engine.name, 0.0)))
    return table


def tokens_per_s(segments: Sequence[Segment], now_unix_s: float) -> dict[str, float]:
    """Per engine, over the segments that ended in the last seconds."""
    recent = [seen for seen in segments if now_unix_s - seen.ended_unix_s <= RATE_WINDOW_S]
    rates: dict[str, float] = defaultdict(float)
    for seen in recent:
        rates[seen.engine] += seen.tokens / RATE_WINDOW_S
    return rates


def _engine_cells(engine: EngineStatus, rate: float) -> tuple[RenderableType, ...]:
    state = Text(engine.state, style=STATE_STYLE.get(engine.state, ""))
    full = round(max(0.0, min(1.0, engine.kv_usage)) * 12)
    kv = Text("█" * full, style="blue") + Text("░" * (12 - full), style="dim") + Text(f" {engine.kv_usage:4.0%}")
    numbers = (str(engine.running), str(engine.waiting), f"{rate:.0f}")
    return engine.name, f"v{_show(engine.version)}", state, engine.intake, kv, *numbers


def _versions(recording: Recording, relays: Sequence[str]) -> Table:
    table = _table("version", ">copied", ">sealed", *relays, "loaded by")
    published = {seen.version: seen for seen in recording.of(Publish)}
    seen = recording.of(RelaySeen)
    status = recording.last(GatewayStatus) or GatewayStatus()
    for version in sorted({one.version for one in seen})[-VERSIONS_SHOWN:]:
        publish = published.get(version)
        states = [
            _relay_state([one for one in seen if one.version == version and one.relay == relay]) for relay in relays
        ]
        engines = ", ".join(engine.name for engine in status.engines if engine.version == version)
        copied, sealed = ("…", "…") if publish is None else (_ms(publish.stall_s), _ms(publish.sealed_s))
        table.add_row(f"v{version}", copied, sealed, *states, engines)
    return table


def _relay_state(seen: Sequence[RelaySeen]) -> Text:
    """Where one version stands on one relay: its latest state, with the progress of a transfer."""
    kinds = {one.kind for one in seen}
    for kind, label, style in (("retired", "retired", "dim"), ("lost", "lost", "red"), ("available", "held", "green")):
        if kind in kinds:
            return Text(label, style=style)
    if not seen:
        return Text("·", style="dim")
    last = seen[-1]
    return Text(f"copying {last.bytes_done / (last.bytes_total or 1):.0%}", style="cyan")


def _rewards(recording: Recording, steps: int) -> Text:
    taken = recording.of(Step)
    rewards = [step.reward_mean for step in taken]
    stale = [step.staleness_mean for step in taken]
    newest = [seen.reward for seen in recording.of(SessionChange) if seen.reward is not None][-REWARDS_SHOWN:]
    recent = f" · newest {len(newest)} trajectories {fmean(newest):.2f}" if newest else ""
    numbers = " ".join(f"{reward:.2f}" for reward in rewards[-steps:])
    ages = f"mean {stale[-1]:.2f}, largest {max(step.staleness_max for step in taken)}" if stale else ""
    return Text.assemble(
        (" reward    ", "bold"),
        (spark(rewards), "green"),
        f" {numbers}{recent}\n",
        (" staleness ", "bold"),
        (spark(stale, high=2.0), "yellow"),
        f" {ages}",
    )


def _events(recording: Recording, zero_unix_s: float) -> Panel:
    lines = events(recording)[-EVENTS_SHOWN:]
    text = "\n".join(f"{t - zero_unix_s:6.1f} s  {event}" for t, event in lines)
    return Panel(Text(text), title="events", title_align="left", box=box.ROUNDED, padding=(0, 1))


def events(recording: Recording) -> list[tuple[float, str]]:
    """What is worth a line each, in order of time."""
    lines: list[tuple[float, str]] = []
    for seen in recording:
        if isinstance(seen, Note):
            lines.append((seen.t, seen.text))
        elif isinstance(seen, Refresh):
            text = f"{seen.engine} loaded v{seen.to_version} (had v{seen.from_version}) in {seen.seconds:.2f} s"
            lines.append((seen.t_unix_s, text))
        elif isinstance(seen, Repack):
            text = f"repack: {len(seen.moves)} sessions of v{seen.version} move, {', '.join(seen.freed)} is freed"
            lines.append((seen.t_unix_s, text))
        elif isinstance(seen, Step):
            text = f"step {seen.step}: reward {seen.reward_mean:.2f}, v{seen.version} published"
            lines.append((seen.t, text))
    return sorted(lines)


def _table(*columns: str) -> Table:
    """A column that begins with ">" is set to the right."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), expand=True)
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", no_wrap=True)
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


def _show(version: int | None) -> str:
    return "?" if version is None else str(version)
