"""What happened to turns and sessions since the gateway started."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

Count = Annotated[int, Meta(ge=0)]


@dataclass(slots=True)
class Counters:
    """Each only grows. The description of a counter is its help in the metrics and its text in the served schema."""

    turns_started: Annotated[Count, Meta(description="Turns that began.")] = 0
    turns_completed: Annotated[Count, Meta(description="Turns that ended with an answer, whole or at its limit.")] = 0
    turns_cut: Annotated[
        Count,
        Meta(description="Streams of turns that an engine ended without a finish. A turn counts once for each cut."),
    ] = 0
    turns_resumed: Annotated[
        Count, Meta(description="Places that turns got on another engine, or again on theirs, after a cut.")
    ] = 0
    turns_lost: Annotated[
        Count,
        Meta(
            description="Turns that failed after their begin: their clients got an error. Not those that their "
            "session's policy ended (`turns_version_lost`)."
        ),
    ] = 0
    turns_version_lost: Annotated[
        Count,
        Meta(
            description="Turns that ended with a 410: no engine serves their session's version, and its "
            "`on_version_loss` takes no other."
        ),
    ] = 0
    turns_aborted: Annotated[
        Count, Meta(description="Turns that ended because their client left or their session ended.")
    ] = 0
    turns_orphaned: Annotated[
        Count, Meta(description="Turns that lost their client while they ran, and waited for it to come back.")
    ] = 0
    turns_joined: Annotated[
        Count, Meta(description="Turns whose answer a repeated request got, instead of a turn of its own.")
    ] = 0
    turns_recovered: Annotated[
        Count, Meta(description="Turns of the gateway's earlier life that this one continued.")
    ] = 0
    turns_mixed_version: Annotated[
        Count, Meta(description="Completed turns whose tokens more than one weight version sampled.")
    ] = 0
    turns_mixed_dtype: Annotated[
        Count,
        Meta(
            description="Completed turns that engines of different dtypes computed: a greedy one may differ from an "
            "unmoved one."
        ),
    ] = 0
    turns_unseeded: Annotated[
        Count,
        Meta(description="Stretches of turns with a `seed` on an engine that ignores it: their segments have no seed."),
    ] = 0
    moves: Annotated[Count, Meta(description="Moves of running turns to another engine, made by the gateway.")] = 0
    repacks: Annotated[Count, Meta(description="Plans of moves that were carried out.")] = 0
    tokens_generated: Annotated[Count, Meta(description="Tokens that engines sampled for recorded turns.")] = 0
    version_mismatches: Annotated[
        Count, Meta(description="Pieces of streams that report another weight version than their engine was on.")
    ] = 0
    trajectories_finished: Annotated[Count, Meta(description="Sessions that ended with a reward.")] = 0
    sessions_abandoned: Annotated[Count, Meta(description="Sessions that ended without a reward.")] = 0
    cuts_by_reason: Annotated[dict[str, int], Meta(description="The cuts of `turns_cut`, by what the stream did.")] = (
        field(default_factory=dict)
    )
