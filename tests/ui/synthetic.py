"""A dashboard over a made-up fleet: the real page, routes and feed, and a source that needs no processor time.

`python -m tests.ui.synthetic --sessions 5000 --per-s 100 --ready-file FILE` serves it until it is ended. Each update
changes what `--changes` sessions do, so that 5,000 of them have turns of some seconds and tools of some seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from gateway.api.ui.feed import Event, Feed, Source
from gateway.api.ui.routes import add_ui_routes
from gateway.core.feed import Tables
from gateway.core.phases import Phase, SessionRow
from gateway.runtime.clock import unix_s
from protos.process import write_ready_file

NEXT: dict[Phase, Sequence[Phase]] = {
    "queue": ("prefill",),
    "prefill": ("decode",),
    "decode": ("tool", "tool", "tool", "move"),
    "move": ("prefill",),
    "tool": ("queue",),
    "reward": ("tool",),
    "idle": ("queue",),
}
STATUS: dict[str, Any] = {
    "model": "policy",
    "mode": "repack",
    "newest_version": 7,
    "trainer_version": 7,
    "tokens_per_s": 0.0,
    "sessions": {"live": 0, "running_turns": 0, "queued": 0, "waiting_for": {}},
    "counters": {"tokens_generated": 0, "turns_cut": 0, "turns_resumed": 0, "turns_lost": 0},
    "buffer": {
        **dict.fromkeys(("trajectories", "leased", "added", "acked", "num_bytes"), 0),
        **dict.fromkeys(("evicted_stale", "evicted_for_room", "evicted_equal", "evicted_by_readers"), 0),
        "capacity": 1000,
    },
    "sampled": {"reward": {"count": 0}},
    "staleness": {"generation": {"0": 5, "1": 3}, "finish": {}, "use": {}},
    "prompt_pool": dict.fromkeys(("tasks", "leases", "finished", "failed", "expired", "given_up"), 0),
    "repack": {"plans": []},
    "admission": {
        "reader": None,
        "batch": None,
        "bound": None,
        "running": 0,
        "buffered": 0,
        "stranded": 0,
        "full": False,
        "waiting_groups": [],
        "silent": 0,
        "idle": 0,
        "excess": 0,
        "notes": {},
    },
    "store_failure": "",
    "unreachable_relays": [],
    "refused_relays": {},
    "engines_elsewhere": {},
    "unclaimed": "",
    "shared_experience": None,
}


class MadeUp:
    """Implements `gateway.api.ui.feed.Source`."""

    def __init__(self, sessions: int, engines: int, changes: int, seed: int = 0) -> None:
        self._random, self._changes = random.Random(seed), changes
        self._engines = [f"e{number}" for number in range(engines)]
        self._rows = {f"s{number}": self._fresh() for number in range(sessions)}
        self._order = deque(self._random.sample(sorted(self._rows), sessions))
        self._ticks = itertools.count()

    def _fresh(self) -> SessionRow:
        phase = self._random.choice(list(NEXT))
        return SessionRow(phase, self._random.choice(self._engines), 7, unix_s(), 0, 1, 0)

    async def read(self) -> Tables:
        for _ in range(self._changes):
            name = self._order[0]
            self._order.rotate(-1)
            self._rows[name] = self._changed(self._rows[name])
        tick = next(self._ticks)
        live = {**STATUS["sessions"], "live": len(self._rows)}
        status = {**STATUS, "sessions": live, "tokens_per_s": 50_000.0 + tick % 100}
        return {
            "gateway": status,
            "engines": {name: self._engine(name, tick // 50 + at) for at, name in enumerate(self._engines)},
            "receipts": {},
            "rewards": {},
            "relays": {},
            "sessions": dict(self._rows),
        }

    def _changed(self, row: SessionRow) -> SessionRow:
        phase = self._random.choice(NEXT[row.phase])
        engine = self._random.choice(self._engines) if row.phase == "move" else row.engine
        turns = row.turns + (phase == "tool")
        return SessionRow(phase, engine, 7, unix_s(), turns, int(phase != "tool"), row.moves + (row.phase == "move"))

    def _engine(self, name: str, number: int) -> dict[str, Any]:
        load = number % 20
        engine = {"name": name, "state": "serving", "intake": "open", "version": 7, "available": 7, "admitted": 40}
        engine |= {"running": 40 + load, "waiting": 0, "kv_usage": 0.5 + load / 50}
        return engine | {"last_error": "", "reason": "", "held_by": []}

    def events(self, after: int) -> tuple[int, Sequence[Event]]:
        return after, []

    async def follow(self) -> None:
        await asyncio.Event().wait()


async def serve(source: Source, tick_s: float, ready_file: Path, add_routes: Callable[[web.Application], None]) -> None:
    """`add_routes`: what the page asks for beside the feed."""
    app = web.Application()
    add_ui_routes(app, Feed(source, tick_s=tick_s))
    add_routes(app)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    write_ready_file(ready_file, {"url": f"http://127.0.0.1:{runner.addresses[0][1]}"})
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=5000)
    parser.add_argument("--engines", type=int, default=80)
    parser.add_argument("--per-s", type=float, default=100.0, help="updates of the feed in a second")
    parser.add_argument("--changes", type=int, default=20, help="sessions that change in an update")
    parser.add_argument("--ready-file", type=Path, required=True)
    given = parser.parse_args()
    source = MadeUp(given.sessions, given.engines, given.changes)
    asyncio.run(serve(source, 1 / given.per_s, given.ready_file, lambda app: None))


if __name__ == "__main__":
    main()
