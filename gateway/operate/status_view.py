"""The output of `gateway status`: the `/status` of a running gateway, for people."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from protos import terminal
from protos.foreign_text import one_line, quoted
from protos.terminal import PIPE_COLUMNS, add_row, line

ENGINE_COLUMNS = ("engine", "kind", "state", "version", "intake", "admitted", "running", "waiting", "KV used", "dtype")
LEFT_OUT_FIRST = ("dtype", "kind", "admitted", "waiting", "KV used", "intake")


def show(status: Mapping[str, Any], console: Console | None = None) -> None:
    console = console or terminal.console()
    table = engines_table(status["engines"], console.width)
    for part in (*map(line, _head(status)), table, *map(line, warnings_of(status))):
        console.print(part, soft_wrap=True)


def _head(status: Mapping[str, Any]) -> Sequence[str]:
    sessions, counters, buffer = status["sessions"], status["counters"], status["buffer"]
    return (
        f"model {status['model']}, mode {status['mode']}: newest version {status['newest_version']}, "
        f"the trainer's {status['trainer_version']}",
        f"sessions {sessions['live']}, turns on engines {turns_on(status['engines'])}, waiting {sessions['queued']}; "
        f"{status['tokens_per_s']:.0f} tokens/s",
        f"turns ended {counters['turns_completed']}, cut {counters['turns_cut']}, resumed {counters['turns_resumed']}, "
        f"lost {counters['turns_lost']}{_version_lost(counters)}; moves {counters['moves']}, refreshes "
        f"{counters['refreshes']}{_failed(counters)}",
        f"buffer {buffer['trajectories']} trajectories, leased {buffer['leased']}{evicted(buffer)}",
        *_prompt_pool(status.get("prompt_pool")),
        *_access(status.get("access")),
    )


def turns_on(engines: Sequence[Mapping[str, Any]]) -> int:
    """Turns that have a place: those that wait for one are counted apart."""
    return sum(engine["running"] for engine in engines)


def _version_lost(counters: Mapping[str, Any]) -> str:
    ended = counters.get("turns_version_lost", 0)
    return f", ended with their version {ended}" if ended else ""


def _failed(counters: Mapping[str, Any]) -> str:
    """Since the start: what ails an engine now stands among the warnings."""
    if not (failures := counters["refresh_failures"]):
        return ""
    last = counters.get("last_refresh_failure_unix_s", 0.0)
    return (
        f", failed {failures}{time.strftime(', the last at %Y-%m-%d %H:%M:%S', time.localtime(last)) if last else ''}"
    )


def evicted(buffer: Mapping[str, int]) -> str:
    """What left the buffer unused since the start; nothing where none did."""
    why = {"stale": "too stale", "for_room": "for room", "equal": "of equal rewards", "by_readers": "by readers"}
    found = [f"{count} {text}" for name, text in why.items() if (count := buffer.get(f"evicted_{name}", 0))]
    return f"; evicted unused: {', '.join(found)}" if found else ""


def _access(access: Mapping[str, Any] | None) -> Sequence[str]:
    """Who may use it, and where it is operated; nothing for a gateway on loopback without keys."""
    if not access:
        return ()
    admin = access.get("admin_listen", "")
    found = [f"admin listener: {admin}"] if admin else []
    if access["keys"] is not None:
        keys = ", ".join(f"{count} {role}" for role, count in access["keys"].items())
        found.append(f"API keys: {keys}{'; agents may reward themselves' if access['agents_may_reward'] else ''}")
    elif access["insecure"]:
        found.append("INSECURE: no credentials are asked for, and whoever reaches it may do everything (--insecure)")
    return found


def _prompt_pool(pool: Mapping[str, int] | None) -> Sequence[str]:
    """Of all pools together; nothing for a gateway that has no tasks."""
    if not pool or not (pool["tasks"] or pool["leased"]):
        return ()
    return (
        f"prompt pool {pool['tasks']} tasks, {pool['leases']} samples leased; since the start {pool['finished']} "
        f"finished, {pool['failed']} failed, {pool['expired']} leases expired, {pool['given_up']} given up",
    )


def engines_table(engines: Sequence[Mapping[str, Any]], width: int = PIPE_COLUMNS) -> Table:
    """Where `width` has no room for all columns, those that matter least are left out, and none is cut."""
    rows = [dict(zip(ENGINE_COLUMNS, _row(engine), strict=True)) for engine in engines]
    widths = {name: max(map(cell_len, (name, *(row[name] for row in rows)))) + 2 for name in ENGINE_COLUMNS}
    for name in LEFT_OUT_FIRST:
        if sum(widths.values()) - 2 > width:
            del widths[name]
    table = Table(*widths, box=None, pad_edge=False)
    for row in rows:
        add_row(table, *(row[name] for name in widths))
    return table


def _row(e: Mapping[str, Any]) -> Sequence[str]:
    behind = f" of {e['available']}" if e["available"] > e["version"] else ""
    behind = behind if e.get("loads", True) else " (loads none)"
    numbers = (str(e["admitted"]), str(e["running"]), str(e["waiting"]), f"{e['kv_usage']:.0%}")
    cells = (e["name"], e["kind"], e["state"], f"{e['version']}{behind}", e["intake"], *numbers, e["dtype"] or "?")
    return [one_line(cell) for cell in cells]


def _ails(engine: Mapping[str, Any]) -> bool:
    return bool(engine["state"] != "serving" or engine["available"] > engine["version"])


def _holders(engine: Mapping[str, Any]) -> Sequence[str]:
    return [
        f"{engine['name']} is held on version {engine['version']} by session {held['session_id']} "
        f"(on_version_loss {held['on_version_loss']})"
        + ("" if held["idle_s"] is None else f", idle for {held['idle_s']:.0f} s")
        for held in engine["held_by"]
    ]


def warnings_of(status: Mapping[str, Any]) -> Sequence[str]:
    """What an operator should look at, with what would be right."""
    engines = status["engines"]
    keys = (status.get("access") or {}).get("failure")
    found = [f"the API keys stay as they were: {keys}"] if keys else []
    why = {e["name"]: "" if e["reason"] == e["last_error"] else e["reason"] for e in engines}
    found += [f"{e['name']} {why[e['name']]}" for e in engines if why[e["name"]]]
    hidden = [e for e in engines if e["last_error"] and _ails(e) and e["last_error"] not in why[e["name"]]]
    found += [f"{e['name']}, last error: {e['last_error']}" for e in hidden]
    found += [f"{e['name']} {e['failing']}" for e in engines if e.get("failing")]
    found += [line for e in status["engines"] for line in _holders(e)]
    found += [f"{count} turns wait: {reason}" for reason, count in status["sessions"]["waiting_for"].items()]
    bounds = status.get("bounds") or {}
    if refused := bounds.get("refused_connections"):
        found.append(
            f"{refused} connections were refused since the start: {bounds['connections']} are open, "
            f"{bounds['strangers']} of them without a key (--connections-max, --connections-per-address)"
        )
    if refused := bounds.get("refused_by_key"):
        most = ", ".join(f"{name} {of['sessions']}/{of['turns']}" for name, of in [*bounds["holders"].items()][:4])
        found.append(
            f"{refused} sessions and turns were refused since the start by --sessions-per-key and --turns-per-key; "
            f"sessions/turns now: {most or 'none'}"
        )
    admission = status["admission"]
    if admission["full"]:
        excess = f", {admission['excess']} beyond it" if admission.get("excess") else ""
        found.append(
            f"no new sessions: {admission['running']} running and {admission['buffered']} buffered trajectories reach "
            f"the bound of {admission['bound']}{excess}; reader {quoted(admission['reader'])} takes "
            f"{admission['batch']} at once"
        )
    if idle := admission.get("idle", 0) + admission.get("silent", 0):
        found.append(
            f"{idle} sessions had no request for long: {admission['idle']} do not count against the bound (`gateway "
            f"sessions --abandon` ends them), {admission['silent']} do for a runner, a child or their reward"
        )
    found += [f"reader {quoted(name)}: {note}" for name, note in admission.get("notes", {}).items()]
    found += admission["waiting_groups"]
    if (shared := status.get("shared_experience")) and shared["failure"]:
        found.append(
            f"finished trajectories wait for {shared['address']}: {shared['waiting']} do, and no trainer gets any; "
            f"{shared['failure']}"
        )
    if status["store_failure"]:
        found.append(f"the store cannot be written, and no turn begins: {status['store_failure']}")
    found += [
        f"versions of relay {address} are refused: {why}" for address, why in status.get("refused_relays", {}).items()
    ]
    found += [
        f"relay {address} does not answer: its engines keep the version they hold (start it, or check its address)"
        for address in status.get("unreachable_relays", ())
    ]
    found += status.get("engines_elsewhere", {}).values()
    if unclaimed := status.get("unclaimed"):
        found.append(f"other gateways may take this one's engines, for its claims on them are not renewed: {unclaimed}")
    if not any(e["state"] in ("serving", "draining") for e in status["engines"]):
        found.append("no engine serves: new turns wait, then get 429")
    elif not any(e["intake"] == "open" for e in status["engines"]):
        found.append("no engine takes new sessions: their turns wait, then get 429")
    if mismatches := status["counters"]["version_mismatches"]:
        found.append(f"{mismatches} turns since the start were contradicted by their engines' versions")
    if len(dtypes := sorted({e["dtype"] for e in engines if e["dtype"]})) > 1:
        each = ", ".join(f"{e['name']} in {e['dtype']}" for e in engines if e["dtype"])
        found.append(f"engines compute in {' and '.join(dtypes)} ({each}): greedy turns that move between them change")
    for engine in engines:
        if (label := engine.get("started_with")) and not engine["version"]:
            found.append(
                f"engine {engine['name']} calls its weights {quoted(label)}, no version: they count as version 0"
            )
    if unseeded := status["counters"].get("turns_unseeded"):
        where = ", ".join(e["name"] for e in engines if not e.get("seeds", True)) or "engines that are gone"
        found.append(f"{unseeded} times a turn's seed was ignored, on {where}: such a segment's record has no seed")
    return found
