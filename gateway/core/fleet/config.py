"""The settings of the fleet's decisions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

Mode = Literal["barrier", "drain", "repack", "inflight"]


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """The settings of capacity, intake and refresh; each is an option of `gateway serve`. Times in seconds."""

    mode: Annotated[
        Mode,
        "repack: the long tail is packed onto few engines; drain: engines empty by themselves; inflight: turns pause "
        "while their engine loads, and continue with mixed versions; barrier: all engines wait for the last turn.",
    ] = "repack"
    max_running: Annotated[int, Meta(ge=1), "Turns that one engine runs at once."] = 64  # B of the paper
    kv_max: Annotated[  # C_max of the paper
        float, Meta(gt=0, le=1), "Share of an engine's KV cache that turns may fill."
    ] = 0.9
    intake_batch: Annotated[
        int, Meta(ge=1), "New sessions that an engine takes on one version; then its intake closes."
    ] = 64
    intake_age_s: Annotated[float, Meta(ge=0), "Time after which an engine's intake closes."] = 600.0
    intake_min_batch: Annotated[
        int,
        Meta(ge=1),
        "Least number of new sessions after which a newer version at the relay closes an engine's intake.",
    ] = 1
    version_hold_s: Annotated[
        float,
        Meta(ge=0),
        "How long the last engine on a version stays on it for the version's sessions; less while turns wait.",
    ] = 120.0
    pinned_versions_max: Annotated[
        int,
        Meta(ge=0),
        "Versions that relays keep for sessions with on_version_loss=strict. At the limit, a strict session on a "
        "further version gets 429.",
    ] = 4
    strict_sessions_min: Annotated[
        int,
        Meta(ge=1),
        "Waiting strict sessions that make an engine load their version again, even if they have few tokens.",
    ] = 1
    strict_tokens_min: Annotated[
        int,
        Meta(ge=0),
        "Tokens of waiting strict sessions that make an engine load their version again, even for few sessions.",
    ] = 16_384
    drain_max_s: Annotated[
        float, Meta(ge=0), "How long the last turns of an engine may delay its load of a newer version."
    ] = 60.0
    min_util: Annotated[
        float, Meta(gt=0, le=1), "An engine with fewer turns than this share of --max-running has only its last ones."
    ] = 0.25
    staleness_max: Annotated[
        int, Meta(ge=0), "How many versions a trajectory may be behind the trainer when it is sampled."
    ] = 4
