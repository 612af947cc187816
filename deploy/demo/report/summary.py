"""The numbers of one run. Pure: a recording and the wall time in, numbers out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from deploy.demo.recording import GatewayStatus, Note, Publish, Recording, SessionChange, Step


@dataclass(frozen=True, slots=True)
class Summary:
    """summary.json. Counts are of the whole run; seconds are means over versions unless stated otherwise."""

    steps: int  # of the trainer
    versions_published: int  # sealed; the starting weights (version 1) among them
    publish_stall_s: float  # how long training stood still for a publish
    broadcast_s: float  # from the begin of publish until every relay held the version
    trajectories: int  # finished, whether or not a step used them
    turns_cut: int
    turns_resumed: int
    turns_lost: int
    turns_mixed_version: int
    moves: int
    repacks: int
    engines_killed: int  # on purpose
    staleness_max: int  # over the tokens that steps used
    reward_first_third: float
    reward_last_third: float
    tokens_per_s: float  # generated, over the wall time
    wall_s: float  # from the end of the set-up to the end of the trainer's work


def summarise(recording: Recording, wall_s: float) -> Summary:
    """Rewards are of the finished training trajectories, first and last third in order of their ends.

    Thirds are taken within each environment and weighed by its share of the whole run: a changing mix of easy and
    hard environments neither makes a rise nor hides one.
    """
    status = recording.last(GatewayStatus) or GatewayStatus()
    published = recording.of(Publish)
    broadcasts = [seen.broadcast_s for seen in published if seen.broadcast_s is not None]
    steps = recording.of(Step)
    rewards = finished_rewards(recording)
    first, last = weighed_thirds(rewards)
    return Summary(
        steps=len(steps),
        versions_published=len({seen.version for seen in published}),
        publish_stall_s=_mean([seen.stall_s for seen in published]),
        broadcast_s=_mean(broadcasts),
        trajectories=max(status.counter("trajectories_finished"), len(rewards)),
        turns_cut=status.counter("turns_cut"),
        turns_resumed=status.counter("turns_resumed"),
        turns_lost=status.counter("turns_lost"),
        turns_mixed_version=status.counter("turns_mixed_version"),
        moves=status.counter("moves"),
        repacks=status.counter("repacks"),
        engines_killed=sum(1 for note in recording.of(Note) if note.kind == "kill" and note.engine),
        staleness_max=max((step.staleness_max for step in steps), default=0),
        reward_first_third=first,
        reward_last_third=last,
        tokens_per_s=round(status.counter("tokens_generated") / wall_s, 2) if wall_s > 0 else 0.0,
        wall_s=round(wall_s, 2),
    )


def finished_rewards(recording: Recording) -> list[tuple[float, str, float]]:
    """(unix time, environment, reward) of every finished training trajectory, in order of their ends."""
    return sorted(
        (seen.t_unix_s, seen.environment, seen.reward)
        for seen in recording.of(SessionChange)
        if seen.state == "finished" and seen.reward is not None and seen.train
    )


def weighed_thirds(rewards: Sequence[tuple[float, str, float]]) -> tuple[float, float]:
    """Means of the first and last third of (time, environment, reward), each environment weighed by its share."""
    by_environment: dict[str, list[float]] = defaultdict(list)
    for _, environment, reward in rewards:
        by_environment[environment].append(reward)
    parts = [(len(values) / len(rewards), thirds(values)) for values in by_environment.values()]
    first, last = (sum(share * ends[index] for share, ends in parts) for index in (0, 1))
    return round(first, 4), round(last, 4)


def thirds(values: Sequence[float]) -> tuple[float, float]:
    """Means of the first and of the last third; 0 when there are fewer than three values."""
    size = len(values) // 3
    return (_mean(values[:size]), _mean(values[-size:])) if size else (0.0, 0.0)


def _mean(values: Sequence[float]) -> float:
    return round(fmean(values), 4) if values else 0.0
