"""`agents-env inspect`: a session's trajectories turn by turn, with versions and logprobs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import click

from agents_env.failures import RolloutFailed, RunFailed
from agents_env.run import run_to_end
from agents_env.server import GATEWAY_KEY, Sampling, Server, Usage, api_key
from protos.terminal import say

SHOWN_CHARS_MAX = 1 << 20
"""Of a line of a turn's text."""


def start(session_id: str, gateway: str, *, tokens: bool, as_json: bool) -> None:
    found = run_to_end(_look(session_id, gateway, tokens=tokens), "warning")
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    say(*described(found), chars_max=SHOWN_CHARS_MAX)


async def _look(session_id: str, gateway: str, *, tokens: bool) -> Mapping[str, Any]:
    query = "?tokens=true" if tokens else ""
    async with Server(gateway, Sampling(""), api_key=api_key(), patience_s=0.0) as server:
        try:
            return await server.get(f"/sessions/{quote(session_id, safe='')}/trajectories{query}", Usage())
        except RolloutFailed as error:
            keyless = f"; its key is read from {GATEWAY_KEY}" if error.kind in ("http 401", "http 403") else ""
            raise RunFailed(f"session {session_id} at {server.root}: {error.message}{keyless}") from error


def described(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines of `agents-env inspect`."""
    yield f"session {found['session_id']}: {found['state']}, {len(found['trajectories'])} trajectories"
    for recorded in found["trajectories"]:
        yield from _trajectory(recorded)


def _trajectory(recorded: Mapping[str, Any]) -> Iterator[str]:
    t = recorded["trajectory"]
    yield ""
    yield (
        f"trajectory {t['leaf'] + 1} of {t['leaves']}: group {t['group_id']}, sample {t['sample_index']}, "
        f"reward {t['reward']:g}, {t['status']}, {t['turns']} turns, {len(t['token_ids'])} tokens, "
        f"{sum(t['loss_mask'])} trained on"
    )
    if t["tags"]:
        yield "tags: " + ", ".join(f"{name}={value}" for name, value in sorted(t["tags"].items()))
    for span in recorded["spans"]:
        yield from _span(t, span, recorded["tokens"])


def _span(t: Mapping[str, Any], span: Mapping[str, Any], tokens: Sequence[str]) -> Iterator[str]:
    start, end = span["start"], span["end"]
    head = f"turn {span['turn'] + 1}, {'sampled' if span['sampled'] else 'prompt'}, tokens {start} to {end - 1}"
    yield ""
    yield head + (_origin(t, span) if span["sampled"] else "")
    if not tokens:
        yield from (f"  | {line}" for line in span["text"].split("\n"))
        return
    yield "  position       id  version   logprob  trained  token"
    for at in range(start, end):
        trained = t["loss_mask"][at] == 1
        version, logprob = (str(t["versions"][at]), f"{t['logprobs'][at]:.4f}") if trained else ("", "")
        mark = "yes" if trained else ""
        yield f"  {at:8} {t['token_ids'][at]:8} {version:>8} {logprob:>9}  {mark:7}  {tokens[at]!r}"


def _origin(t: Mapping[str, Any], span: Mapping[str, Any]) -> str:
    """The engines and versions of a sampled span, and its mean logprob."""
    segments = [s for s in t["segments"] if span["start"] <= s["start"] < span["end"]]
    made = ", then ".join(f"version {s['version']} on {s['engine']} ({s['evidence']})" for s in segments)
    trained = [t["logprobs"][at] for at in range(span["start"], span["end"]) if t["loss_mask"][at]]
    mean = f", mean logprob {sum(trained) / len(trained):.3f}" if trained else ", not trained on"
    return f": {made}{mean}"
