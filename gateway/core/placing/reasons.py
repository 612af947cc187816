"""Why an engine takes no new sessions now, in a sentence for operators and clients. Pure."""

from __future__ import annotations

from gateway.core.fleet.hold import hold
from gateway.core.fleet.state import EngineState, FleetState

ENGINES_NAMED_MAX = 4
"""Engines in one sentence."""
REASON_CHARS_MAX = 300
"""Characters of one engine's reason: an engine's own messages may be long."""


def closed_reason(fleet: FleetState, engine: EngineState, now: float) -> str:
    """Empty if its intake is open, or opens with the next decision."""
    match engine.status:
        case "dead":
            return engine.poll_error or "it was not polled yet"
        case "refreshing":
            return f"loads version {engine.loading}"
        case "fenced":
            return f"its load failed, and it holds no whole version: {engine.load_error}{_next_try(engine, now)}"
        case "joining":
            return _joining(engine, now)
        case "serving":
            return _serving(fleet, engine, now)


def closed_reasons(fleet: FleetState, now: float) -> str:
    """The reasons of all engines, in one sentence; empty if one of them takes new sessions."""
    engines = sorted(fleet.engines.values(), key=lambda e: e.name)  # at once: others may join meanwhile
    if any(e.takes_turns and e.intake_open for e in engines):
        return ""
    reasons = [f"engine {e.name} {why[:REASON_CHARS_MAX]}" for e in engines if (why := closed_reason(fleet, e, now))]
    more = f"; and {len(reasons) - ENGINES_NAMED_MAX} more" if len(reasons) > ENGINES_NAMED_MAX else ""
    return "; ".join(reasons[:ENGINES_NAMED_MAX]) + more


def _joining(engine: EngineState, now: float) -> str:
    if engine.must_load and not engine.loads:
        return f"is paused: resume it, since engines of kind {engine.kind} load no version that would"
    found = "was paused when it joined, so it may hold half a version"
    found = found if engine.must_load else f"holds version {engine.version}"
    if engine.turns:
        return f"{found}, and turns from before its restart have not left it yet"
    if engine.loadable is None:
        return f"{found}, and relay {engine.relay} has not reported yet which version is wanted"
    if not engine.relay:
        return f"{found}, and has no relay to load one from: name it with --relay, or resume the engine yourself"
    if not engine.available:
        return f"{found}, and relay {engine.relay} holds no version to load yet: publish one"
    why = f": {engine.load_error}" if engine.load_error else ""
    return f"{found}, and is to load version {engine.available}{why}{_next_try(engine, now)}"


def _serving(fleet: FleetState, engine: EngineState, now: float) -> str:
    if engine.suspected:
        return engine.suspicion or "is being polled again, because a connection to it broke"
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
