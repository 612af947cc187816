"""Why an engine takes no new sessions now, in a sentence for whoever has to mend or to wait. Pure."""

from __future__ import annotations

from gateway.core.fleet import EngineState, FleetState
from gateway.core.hold import hold

ENGINES_NAMED_MAX = 4
"""In one sentence."""
REASON_CHARS_MAX = 300
"""Of one engine's in it: an engine's own words may be long."""


def closed_reason(fleet: FleetState, engine: EngineState, now: float) -> str:
    """Empty where its intake is open, or opens by itself with the next decision."""
    match engine.status:
        case "dead":
            return engine.look_error or "it was not looked at yet"
        case "refreshing":
            return f"loads version {engine.loading}"
        case "fenced":
            return f"its load failed, and it holds no whole version: {engine.load_error}{_next_try(engine, now)}"
        case "joining":
            return _joining(engine, now)
        case "serving":
            return _serving(fleet, engine, now)


def closed_reasons(fleet: FleetState, now: float) -> str:
    """Of every engine that takes none, in one sentence; empty when one does."""
    if any(e.status == "serving" and e.intake_open for e in fleet.engines.values()):
        return ""
    told = [
        f"engine {e.name} {why[:REASON_CHARS_MAX]}"
        for e in fleet.sorted_engines()
        if (why := closed_reason(fleet, e, now))
    ]
    more = f"; and {len(told) - ENGINES_NAMED_MAX} more" if len(told) > ENGINES_NAMED_MAX else ""
    return "; ".join(told[:ENGINES_NAMED_MAX]) + more


def _joining(engine: EngineState, now: float) -> str:
    met = (
        "was met paused, so that it may hold half a version" if engine.must_load else f"holds version {engine.version}"
    )
    if engine.turns:
        return f"{met}, and turns from before its restart are still to leave it"
    if engine.loadable is None:
        return f"{met}, and relay {engine.relay} has not reported yet which version is wanted"
    if not engine.relay:
        return f"{met}, and no relay is named to load one from: name it with --relay, or resume the engine yourself"
    if not engine.available:
        return f"{met}, and relay {engine.relay} holds no version yet to load: publish one"
    why = f": {engine.load_error}" if engine.load_error else ""
    return f"{met}, and is to load version {engine.available}{why}{_next_try(engine, now)}"


def _serving(fleet: FleetState, engine: EngineState, now: float) -> str:
    if engine.suspected:
        return "is being looked at, for a connection to it broke"
    if engine.intake_open:
        return ""
    held = hold(fleet, engine, now)
    if held is not None:
        ends = f"{max(0.0, held.left_s):.0f} s more at most (--version-hold-s {fleet.config.version_hold_s:g})"
        return f"stays on version {engine.version} for {held.who}: {ends}"
    if engine.turns and engine.newer:
        return f"loads version {engine.available} once its {len(engine.turns)} turns have ended"
    if engine.newer:
        return f"is to load version {engine.available}{_next_try(engine, now)}"
    if len(engine.turns) >= fleet.config.max_running:
        return f"is full: {len(engine.turns)} turns run, of {fleet.config.max_running} at most (--max-running)"
    return ""


def _next_try(engine: EngineState, now: float) -> str:
    wait_s = engine.refresh_not_before - now
    return f"; next try in {wait_s:.0f} s" if wait_s > 0 else ""
