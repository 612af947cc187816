"""`gateway top`: a running gateway in a terminal, as its feed shows it. The dashboard at `/ui` shows the same."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gateway.core.phases import PHASES
from gateway.operate.feed_reader import Seen, frames
from gateway.operate.status_view import engines_table, evicted, turns_on, warnings_of
from protos import terminal
from protos.errors import LaminarError, Unavailable
from protos.terminal import PIPE_COLUMNS, add_row, line

RETRY_S = (0.5, 1.0, 2.0, 5.0)
DRAWN_PER_S = 2.0
BAR = 30
FIXED_LINES = 15
"""Lines beside those of engines, waits and events."""
SETTLED_S = 3.0
"""A connection that brought something so recently was one that worked."""
EVENTS_SHOWN = 6
WAITS_SHOWN = 8
PHASE_STYLE = {
    "decode": "cyan",
    "prefill": "magenta",
    "move": "red",
    "queue": "yellow",
    "tool": "bright_black",
    "idle": "dark_red",
}
HIDDEN_FIELDS = frozenset({"seq", "t_unix_s", "kind", "engine", "state", "reason", "error"})


async def once(url: str, console: Console | None = None) -> None:
    """Prints the gateway as it is now. Raises Unavailable, InvalidRequest, Unauthenticated and Forbidden."""
    seen = Seen()
    async with aclosing(frames(url, limit=1)) as messages:
        async for kind, frame in messages:
            seen.take(kind, frame)
    if not seen.life:
        raise Unavailable(f"the feed of {url} ended before its first message")
    (console or terminal.console()).print(view(seen, lines=10_000), soft_wrap=True)


async def follow(url: str, console: Console | None = None) -> None:
    """Shows it until cancelled; connects again when the connection ends. Raises what the first connection meets."""
    console = console or terminal.console()
    seen, failures = Seen(), 0
    with Live(Text("connecting"), console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                await _show(url, seen, live, console)
                why = "the gateway ended the connection"
            except Unavailable as e:
                if not seen.life:
                    raise
                why = str(e)
            retry_s = RETRY_S[min(failures, len(RETRY_S) - 1)] * random.uniform(0.75, 1.25)
            failures = 0 if time.time() - seen.t_unix_s < SETTLED_S else failures + 1
            live.update(view(seen, lines=console.height, columns=console.width, away=why), refresh=True)
            await asyncio.sleep(retry_s)


async def _show(url: str, seen: Seen, live: Live, console: Console) -> None:
    """One connection, to its end."""
    drawn_at = float("-inf")
    async with aclosing(frames(url)) as messages:
        async for kind, frame in messages:
            seen.take(kind, frame)
            if (now := time.monotonic()) - drawn_at >= 1 / DRAWN_PER_S:
                drawn_at = now
                live.update(view(seen, lines=console.height, columns=console.width), refresh=True)


def view(seen: Seen, *, lines: int, columns: int = PIPE_COLUMNS, away: str = "") -> RenderableType:
    """`lines` and `columns` of the terminal; `away`: why there is no connection."""
    status = seen.status
    waits = [*warnings_of(status), *_relay_troubles(seen.tables["relays"])][:WAITS_SHOWN]
    events = list(seen.events)[-EVENTS_SHOWN:]
    room = max(3, lines - FIXED_LINES - len(waits) - len(events) - len(PHASES))
    return Group(
        *_head(seen, status, away),
        *_phases(seen.tables["sessions"]),
        Text(""),
        _versions(status["engines"]),
        Text(""),
        *_engines(status["engines"], room, columns),
        Text(""),
        *_chain(seen.tables["relays"]),
        *_repack(status, seen.tables["receipts"]),
        *(line(f"! {wait}", "yellow") for wait in waits),
        *(_event(event) for event in events),
    )


def _head(seen: Seen, status: Mapping[str, Any], away: str) -> Iterator[Text]:
    sessions, buffer = status["sessions"], status["buffer"]
    clock = time.strftime("%H:%M:%S", time.localtime(seen.t_unix_s))
    restarts = f", restarted while watched: {seen.restarts}" if seen.restarts else ""
    yield Text("Laminar ", style="bold") + line(
        f"{status['model']}, mode {status['mode']}, version {status['newest_version']} (the trainer's "
        f"{status['trainer_version']}), {clock}{restarts}"
    )
    if away:
        yield line(f"no connection: {away}; this is of {clock}, trying again", "bold red")
    yield line(
        f"{status['tokens_per_s']:.0f} tokens/s; sessions {len(seen.tables['sessions'])}, turns on engines "
        f"{turns_on(status['engines'])}, waiting {sessions['queued']}; buffer {buffer['trajectories']}, leased "
        f"{buffer['leased']}{evicted(buffer)}; staleness of tokens {_mean(status['staleness']['generation'])}"
    )
    if points := sorted(seen.tables.get("rewards", {}).values()):
        (_, of, first), (_, newest_of, newest) = points[0], points[-1]
        yield line(f"reward {newest:.3f} on the mean of the last {newest_of} sessions, {first:.3f} of the first {of}")
    admission = status["admission"]
    if admission["bound"] is not None:
        counted = admission["running"] + admission["buffered"]
        yield line(f"admission {counted} of {admission['bound']}{', full' if admission['full'] else ''}")
    pool = status["prompt_pool"]
    if pool["tasks"] or pool["leased"]:
        yield line(f"prompt pool {pool['tasks']} tasks, {pool['leases']} samples leased, {pool['finished']} finished")


def _mean(histogram: Mapping[str, int]) -> str:
    total = sum(histogram.values())
    return f"{sum(int(behind) * n for behind, n in histogram.items()) / total:.2f}" if total else "none yet"


def _phases(sessions: Mapping[str, Sequence[Any]]) -> Iterator[Text]:
    counts = Counter(row[0] for row in sessions.values())
    for phase in PHASES:
        if counts[phase]:
            yield _bar(phase, counts[phase], len(sessions), f"{counts[phase]}", PHASE_STYLE.get(phase, "green"))


def _bar(name: str, part: int, whole: int, text: str, style: str) -> Text:
    filled = round(BAR * part / max(1, whole))
    return Text.assemble(f"{name:8.8} ", ("█" * filled, style), ("·" * (BAR - filled), "bright_black"), f" {text}")


def _versions(engines: Sequence[Mapping[str, Any]]) -> RenderableType:
    engines = [engine for engine in engines if engine["state"] != "dead"]
    if not engines:
        return line("no engine answers")
    by = Counter(engine["version"] for engine in engines)
    running = Counter[int]()
    for engine in engines:
        running[engine["version"]] += engine["running"]
    newest = max(by)
    return Group(
        *(
            _bar(
                f"v{v}",
                by[v],
                len(engines),
                f"{by[v]} engines, {running[v]} turns",
                "green" if v == newest else "bright_black",
            )
            for v in sorted(by, reverse=True)
        )
    )


def _engines(engines: Sequence[Mapping[str, Any]], room: int, columns: int) -> Iterator[RenderableType]:
    """Those that do not serve first."""
    order = sorted(engines, key=lambda engine: (engine["state"] == "serving", engine["name"]))
    if engines:
        yield engines_table(order[:room], columns)
    if len(order) > room:
        yield line(f"and {len(order) - room} engines more", "bright_black")


def _chain(relays: Mapping[str, Any]) -> Iterator[Text]:
    for address, relay in relays.items():
        if relay.get("error"):
            yield line(f"relay {address}: {relay['error']}", "red")
    known = [relay for relay in relays.values() if relay.get("model")]
    if not known:
        return
    best = next((relay for relay in known if relay["model"]["master"] == relay["relay"]), known[0])
    hops = [_hop(hop, best["model"]["master"]) for hop in best["model"]["hops"]]
    yield line("chain " + " → ".join(hops))


def _hop(hop: Mapping[str, Any], master: str) -> str:
    rate = f" {hop['rate_bytes_s'] / 2**20:.0f} MiB/s" if hop["rate_bytes_s"] else ""
    notes = ["master"] if hop["relay"] == master else []
    notes += [] if hop["alive"] else ["away"]
    notes += [f"slow: {hop['slow']}"] if hop["slow"] else []
    return str(hop["relay"]) + rate + (f" ({', '.join(notes)})" if notes else "")


def _relay_troubles(relays: Mapping[str, Any]) -> list[str]:
    return [f"relay {relay['relay']}: {relay['trouble']}" for relay in relays.values() if relay.get("trouble")]


def _repack(status: Mapping[str, Any], receipts: Mapping[str, Any]) -> Iterator[RenderableType]:
    for plan in status["repack"]["plans"]:
        freed = ", ".join(plan["freed"][:4]) or "no engine"
        yield line(f"repack of version {plan['version']}: frees {freed} by {plan['moves']} moves")
    newest = sorted(receipts.values(), key=lambda one: -one["number"])[:3]
    if newest:
        table = Table("emptied", "version", "moves", "price", "gain", box=None, pad_edge=False)
        for one in newest:
            row = [f"v{one['version']}", str(one["num_moves"]), _pair(one["price_s"]), _pair(one["gain_s"])]
            add_row(table, one["engine"], *row)
        yield table


def _pair(figures: Mapping[str, float | None]) -> str:
    measured = figures["measured"]
    return f"{figures['estimated']:.2f} s, measured {'…' if measured is None else f'{measured:.2f} s'}"


def _event(event: Mapping[str, Any]) -> Text:
    clock = time.strftime("%H:%M:%S", time.localtime(event["t_unix_s"]))
    rest = [
        f"{name} {round(value, 2) if isinstance(value, float) else value}"
        for name, value in event.items()
        if name not in HIDDEN_FIELDS
    ]
    words = ", ".join(
        str(word) for word in (event.get("state"), event.get("reason"), event.get("error"), *rest) if word
    )
    shown = line(f"{clock} {event['kind']} {event.get('engine', '')} {words}", "bright_black")
    shown.no_wrap, shown.overflow = True, "ellipsis"
    return shown


async def run(url: str, *, only_once: bool) -> None:
    if only_once:
        await once(url)
        return
    if not terminal.console().is_terminal:
        raise LaminarError("standard output is no terminal", hint="add --once")
    await follow(url)
