"""The requests and the output of `gateway sessions`: who holds what, and how idle ones are ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.operate.repack_view import call
from protos.foreign_text import quoted

SHOWN_MAX = 10_000


async def list_sessions(url: str, idle_s: int | None) -> dict[str, Any]:
    query = "" if idle_s is None else f"&idle_s={idle_s}"
    return await call("GET", url, f"/admin/sessions?limit={SHOWN_MAX}{query}")


async def abandon_idle(url: str, idle_s: int | None) -> dict[str, Any]:
    """Ends all that are idle, some at each request."""
    done: dict[str, Any] = {"abandoned": [], "failed": {}}
    while True:
        answer = await call("POST", url, "/admin/sessions/abandon", {"idle_s": idle_s})
        done["abandoned"] += answer["abandoned"]
        done["failed"] |= answer["failed"]
        if not answer["left"] or not answer["abandoned"]:
            return done


def describe(answer: Mapping[str, Any], idle_s: int | None) -> Sequence[str]:
    shown = answer["sessions"]
    silent = "" if idle_s is None else f", {len(shown)} of them without a turn for {idle_s} s"
    idle = sum(session["kept_by"] is None for session in shown)
    head = f"{answer['live']} sessions are live{silent}; {idle} are idle, which no turn, runner or child keeps"
    return [head, *map(_line, shown)]


def _line(session: Mapping[str, Any]) -> str:
    idle_s, kept_by = session["idle_s"], session["kept_by"]
    since = "a turn runs" if idle_s is None else f"no turn for {idle_s:.0f} s"
    why = "idle" if kept_by is None else "in use" if kept_by == "turn" else f"kept by its {kept_by}"
    on = f"on {session['engine'] or 'no engine'}, version {session['version']}"
    return f"{quoted(session['session_id'])}: {since}, {why}; {session['turns']} turns, {on}, {session['state']}"


def describe_abandoned(answer: Mapping[str, Any]) -> Sequence[str]:
    failed = [f"{quoted(name)} is not ended: {why}" for name, why in answer["failed"].items()]
    return [f"{len(answer['abandoned'])} idle sessions are ended", *failed]
