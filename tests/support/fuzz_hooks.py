"""What schemathesis is told of the gateway, so that what it draws meets sessions, groups and a model that are there.

Loaded by schemathesis in its own environment. Only what is right by the schema is replaced, by what is right, too.
"""

from __future__ import annotations

import zlib
from typing import Any

import schemathesis  # type: ignore[import-not-found]

NAMES = {"session_id": "s", "parent_session_id": "s", "sid": "s", "group_id": "g", "gid": "g"}
NAME_MAX = 256
"""Characters, by the schema; a longer name is one that has to be refused."""
FEW_TOKENS = {"max_tokens": 8, "max_output_tokens": 8, "max_completion_tokens": 8, "min_tokens": 2, "n": 3}
"""What is asked for beyond them takes longer, and shows nothing more."""
WAIT_S_MAX = 300
"""Of the schema; a call that waited so long would hold the others up."""
FEW = 40
"""Names of each kind: what one call makes, others find."""
BATCH = {"trajectories": 4096, "groups": 64, "group_size": 64}
"""Of a trainer: were it smaller, no more than that would be admitted."""


def brief(values: dict[str, Any]) -> dict[str, Any]:
    few = {name: most for name, most in FEW_TOKENS.items() if type(values.get(name)) is int and values[name] > most}
    limit = "max_output_tokens" if "input" in values else "max_tokens"
    return values | ({limit: 8} if values.get(limit) is None else {}) | few


def met(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    out = dict(values)
    for name, kind in NAMES.items():
        if isinstance(out.get(name), str) and len(out[name]) <= NAME_MAX:
            out[name] = f"{kind}{zlib.crc32(out[name].encode(errors='replace')) % FEW}"
    if isinstance(out.get("model"), str):
        out["model"] = "policy"
        out = brief(out)
    if isinstance(sampling := out.get("sampling_params"), dict):
        out["sampling_params"] = brief(sampling)
    if isinstance(out.get("name"), str):
        out["name"] = "e9"
    for name in ("version", "min_version", "max_version"):
        if type(out.get(name)) is int and out[name] >= 0:
            out[name] = 0  # nobody ever publishes another one
    if isinstance(wait_s := out.get("wait_s"), int | float) and 0 < wait_s <= WAIT_S_MAX:
        out["wait_s"] = 0.1
    if "trainer_version" in out:
        out |= {name: most for name, most in BATCH.items() if type(out.get(name)) is int and 0 < out[name] <= 4096}
    if isinstance(out.get("session"), dict):
        out["session"] = met(out["session"])
    return out


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    return met(body)


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    return met(path_parameters)


@schemathesis.hook
def map_query(context: Any, query: Any) -> Any:
    return met(query)


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """Boundary values do not pass by `map_body`."""
    wait_s = case.body.get("wait_s") if isinstance(case.body, dict) else None
    if type(wait_s) in (int, float) and 0 < wait_s <= WAIT_S_MAX:
        case.body = {**case.body, "wait_s": min(wait_s, 0.1)}
