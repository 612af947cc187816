"""A made-up fleet that lives as a real one does, for pictures of the dashboard: turns, tools, versions, repacks, a held
engine, a slow relay. Only its figures are made up: the page, its routes and the feed are the gateway's own.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from gateway.api.ui.feed import TICK_S, Event
from gateway.core.feed import Tables
from gateway.core.phases import Phase, SessionRow
from gateway.core.reward_curve import RewardCurve
from gateway.runtime.clock import unix_s
from tests.ui.synthetic import STATUS, serve

LASTS_S: dict[Phase, float] = {
    "queue": 0.5,
    "prefill": 1.4,
    "decode": 16.0,
    "move": 0.9,
    "tool": 7.0,
    "idle": 60.0,
    "reward": 3.0,
}
PUBLISH_S, REPACK_S, LOAD_S = 45.0, 2.2, 6.0
MIB, GIB = 1 << 20, 1 << 30
WORDS = (
    *("The", " test", " fails", " in", " the", " parser", ",", " where", " an", " empty", " line", " ends", " it", "."),
    *(" I", " read", " the", " loop", " again", ":", " the", " key", " is", " computed", " twice", ".", "\n"),
)


class Picture:
    """Implements `gateway.api.ui.feed.Source`."""

    def __init__(self, sessions: int, engines: int, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._began = unix_s()
        self._newest, self._numbers = 12, itertools.count(1)
        names = [f"e{number:02}" for number in range(engines)]
        self._engines = {name: (12 if at % 5 < 3 else 11) for at, name in enumerate(names)}
        self._loading: dict[str, float] = {}
        self._rows: dict[str, SessionRow] = {}
        self._due: list[tuple[float, str]] = []
        self._until: dict[str, float] = {}
        self._rewards = RewardCurve()
        self._receipts: list[dict[str, Any]] = []
        self._log: list[dict[str, Any]] = []
        self._publish_at, self._repack_at = self._began + PUBLISH_S, self._began + REPACK_S
        for second in range(2400):
            self._finish(self._began - 2400 + second)
        for _ in range(sessions):
            self._start(self._began, self._random.choice(["decode", "decode", "decode", "tool", "prefill"]))

    # -- how it goes on

    def _start(self, now: float, phase: Phase = "queue") -> None:
        engine = self._random.choice([name for name in self._engines if name not in self._loading])
        name = f"repair-{next(self._numbers):05}"
        self._set(now, name, SessionRow(phase, engine, self._engines[engine], now, 0, int(phase != "tool"), 0))

    def _finish(self, now: float) -> None:
        """With a reward that grows as a policy learns."""
        learnt = 1 - 1 / (1 + (now - self._began + 2400) / 900)
        self._rewards.add(now, float(self._random.random() < 0.15 + 0.7 * learnt))

    def _set(self, now: float, name: str, row: SessionRow) -> None:
        self._rows[name] = row
        self._until[name] = now + self._random.gammavariate(2.0, LASTS_S[row.phase] / 2)
        heapq.heappush(self._due, (self._until[name], name))

    def _next(self, now: float, name: str, row: SessionRow) -> None:
        follows: dict[Phase, Phase] = {"queue": "prefill", "prefill": "decode", "move": "prefill"}
        follows |= {"tool": "queue", "idle": "queue"}
        if row.phase == "decode":
            turns = row.turns + 1
            over = turns >= 2 + self._random.expovariate(0.5)
            self._set(
                now, name, SessionRow("reward" if over else "tool", row.engine, row.version, now, turns, 0, row.moves)
            )
        elif row.phase == "reward":
            del self._rows[name], self._until[name]
            self._finish(now)
            self._start(now)
        elif row.phase == "tool" and self._random.random() < 0.004:
            self._set(now, name, SessionRow("idle", row.engine, row.version, now, row.turns, 0, row.moves))
        else:
            phase = follows[row.phase]
            self._set(now, name, SessionRow(phase, row.engine, row.version, now, row.turns, 1, row.moves))

    def _advance(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            at, name = heapq.heappop(self._due)
            if self._until.get(name) == at:  # not moved meanwhile
                self._next(at, name, self._rows[name])
        for engine, until in list(self._loading.items()):
            if until <= now:
                del self._loading[engine]
                self._engines[engine] = self._newest
                self._note("refresh", engine=engine, to_version=self._newest, seconds=LOAD_S, reason="it is empty")
        if now >= self._publish_at:
            self._publish_at, self._newest = now + PUBLISH_S, self._newest + 1
            self._note("version", version=self._newest, relay="trainer-0:7070")
        if now >= self._repack_at:
            self._repack_at = now + REPACK_S
            self._repack(now)

    def _repack(self, now: float) -> None:
        """Empties an engine that is behind, onto those of its version."""
        for oldest in sorted(set(self._engines.values()) - {self._newest}):
            group = [name for name, v in self._engines.items() if v == oldest and name not in self._loading]
            if len(group) > 1:
                break
        else:
            return
        source, *others = self._random.sample(group, len(group))
        moved = 0
        for name, row in list(self._rows.items()):
            if row.engine != source:
                continue
            moved += 1
            there = self._random.choice(others)
            phase: Phase = "move" if row.phase == "decode" else row.phase
            self._set(now, name, SessionRow(phase, there, row.version, now, row.turns, row.running, row.moves + 1))
        self._loading[source] = now + LOAD_S
        price, gain = moved * 0.05, 4 + 12 * self._random.random()
        reason = f"{source} goes to {len(others)} engines: {moved} turns"
        self._note("repack", version=oldest, moves=moved, freed=[source], reason=reason)
        self._receipts = [*self._receipts[-29:], self._receipt(now, source, oldest, moved, price, gain, reason)]

    def _receipt(self, now: float, source: str, version: int, moved: int, price: float, gain: float, why: str) -> Any:
        measured = self._random.uniform(0.8, 1.3)
        return {
            "number": next(self._numbers),
            "planned_unix_s": now,
            "version": version,
            "engine": source,
            "reason": why,
            "emptied_after_s": 0.4 * measured,
            "price_s": {"estimated": price, "measured": price * measured},
            "gain_s": {"estimated": gain, "measured": gain * measured},
            "num_moves": moved,
            "outcomes": {"moved": moved},
            "moves": [],
        }

    def _note(self, kind: str, **fields: Any) -> None:
        self._log = [*self._log[-199:], {"seq": next(self._numbers), "t_unix_s": unix_s(), "kind": kind, **fields}]

    # -- what is read

    async def read(self) -> Tables:
        self._advance(unix_s())
        running: dict[str, int] = dict.fromkeys(self._engines, 0)
        waiting = 0
        for row in self._rows.values():
            running[row.engine] += row.phase in ("decode", "prefill")
            waiting += row.phase == "queue"
        return {
            "gateway": self._status(sum(running.values()), waiting),
            "engines": {name: self._engine(name, running[name]) for name in self._engines} | {"e99": self._dead()},
            "rewards": self._rewards.points(),
            "receipts": {str(one["number"]): one for one in self._receipts},
            "relays": self._relays(),
            "sessions": dict(self._rows),
        }

    def events(self, after: int) -> tuple[int, Sequence[Event]]:
        found = [event for event in self._log if event["seq"] > after]
        return (found[-1]["seq"] if found else after), found

    async def follow(self) -> None:
        await asyncio.Event().wait()

    def _status(self, running: int, waiting: int) -> dict[str, Any]:
        passed = unix_s() - self._began
        behind = [name for name, version in self._engines.items() if version < self._newest][:3]
        reasons = [f"{name} stays: it is past its peak, and its turns end before a move would pay" for name in behind]
        finished = 24_000 + int(passed * 58)
        return {
            **STATUS,
            "newest_version": self._newest,
            "trainer_version": self._newest,
            "tokens_per_s": running * 24.6 + 400 * self._random.random(),
            "sessions": {
                "live": len(self._rows),
                "running_turns": running,
                "queued": waiting,
                "waiting_for": {"no engine on version 11 has room": waiting} if waiting else {},
            },
            "counters": {"tokens_generated": 96_000_000, "turns_cut": 41, "turns_resumed": 41, "turns_lost": 0},
            "buffer": {
                **STATUS["buffer"],
                "trajectories": 1800 + int(passed * 9) % 1200,
                "leased": 512,
                "capacity": 65_536,
                "added": finished,
                "acked": finished - 2400,
                "evicted_stale": 37,
                "num_bytes": 61 * MIB,
            },
            "sampled": {
                "reward": {"count": 4096, "mean": 0.613},
                "waited_s": {"p50": 21.0, "p99": 74.0},
                "sampled_tokens": {"mean": 1480.0, "p99": 5210.0},
            },
            "staleness": {
                "generation": {"0": 5200, "1": 3900, "2": 700, "3": 40},
                "finish": {"0": 2100, "1": 2600, "2": 900, "3": 120},
                "use": {"0": 900, "1": 2500, "2": 1500, "3": 310, "4": 20},
            },
            "prompt_pool": {
                **STATUS["prompt_pool"],
                "tasks": 40_000,
                "leases": 5000,
                "finished": finished,
                "failed": 52,
            },
            "repack": {"plans": [{"version": self._newest - 1, "moves": 61, "freed": behind[:1], "reasons": reasons}]},
            "admission": {
                **STATUS["admission"],
                "reader": "trainer-0",
                "batch": 2048,
                "bound": 10_240,
                "running": len(self._rows),
                "buffered": 2300,
            },
        }

    def _engine(self, name: str, running: int) -> dict[str, Any]:
        version = self._engines[name]
        state = "refreshing" if name in self._loading else "draining" if version < self._newest else "serving"
        held = [{"session_id": "repair-00007", "on_version_loss": "strict", "idle_s": 41.0}] if name == "e07" else []
        return {
            "name": name,
            "state": state,
            "version": version,
            "available": self._newest,
            "running": running,
            "intake": "open" if state == "serving" else "closed",
            "admitted": 40,
            "waiting": 0,
            "kv_usage": min(0.97, running / 70),
            "last_error": "",
            "held_by": held,
            "reason": "" if state == "serving" else f"version {self._newest} is at its relay",
        }

    def _dead(self) -> dict[str, Any]:
        engine = self._engine(next(iter(self._engines)), 0)
        why = "no response within 5 s"
        return engine | {"name": "e99", "state": "dead", "intake": "closed", "admitted": 0, "last_error": why}

    def _relays(self) -> dict[str, Any]:
        names = ("trainer-0", "engines-0", "engines-1", "engines-2", "engines-3")
        slow = "its hop ran at 31% of the others for 2 versions"
        hops = [
            {
                "relay": name,
                "upstream": names[at - 1] if at else "",
                "transport": "tcp" if at else "",
                "rate_bytes_s": 0.0 if not at else 2.61e9 - at * 7e7 if at < 4 else 8.1e8,
                "alive": True,
                "versions": [self._newest - 1, self._newest],
                "slow": slow if at == 4 else "",
            }
            for at, name in enumerate(names)
        ]
        model = {"master": names[0], "plan": 4, "plan_reason": "at the tail: engines-3", "newest_sealed": self._newest}
        model |= {"chain": list(names), "hops": hops, "refused_loads": []}
        relay = {"error": "", "trouble": "", "draining": False, "cut_off": [], "transfers": [], "model": model}
        relay |= {"pool_bytes": 64 * GIB, "used_bytes": 31 * GIB, "pins": [{"version": self._newest, "holder": "e"}]}
        return {f"{name}:7070": {**relay, "relay": name} for name in names}


def add_session_routes(app: web.Application) -> None:
    """A recorded session, whichever is asked for."""

    async def session(request: web.Request) -> web.Response:
        name = request.match_info["sid"]
        state = {"state": "live", "engine": "e12", "version": 12, "turns": 3, "running": 1, "tokens": 412}
        state |= {"sampled_tokens": 240, "moves": 1, "group_id": "g-118", "sample_index": 3, "children": []}
        return web.json_response({**state, "session_id": name, "parent_session_id": None, "last_dropped": ""})

    async def record(request: web.Request) -> web.Response:
        return web.json_response({"session_id": "s", "state": "live", "trajectories": [_recorded(random.Random(3))]})

    app.router.add_get("/sessions/{sid}", session)
    app.router.add_get("/sessions/{sid}/trajectories", record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=5000)
    parser.add_argument("--engines", type=int, default=80)
    parser.add_argument("--ready-file", type=Path, required=True)
    given = parser.parse_args()
    asyncio.run(serve(Picture(given.sessions, given.engines), TICK_S, given.ready_file, add_session_routes))


def _recorded(draw: random.Random) -> dict[str, Any]:
    texts, versions, logprobs, spans, segments = [], [], [], [], []
    for turn, (given, sampled) in enumerate(((18, 81), (12, 54), (9, 68))):
        for is_sampled, length in ((False, given), (True, sampled)):
            start = len(texts)
            words = list(itertools.islice(itertools.cycle(WORDS), turn * 3, turn * 3 + length))
            texts += words
            moved = start + length // 2 if turn == 2 else start + length
            versions += [-1 if not is_sampled else 11 if at < moved else 12 for at in range(start, start + length)]
            logprobs += [-draw.expovariate(1.5) if is_sampled else 0.0 for _ in range(length)]
            spans.append(
                {"turn": turn, "sampled": is_sampled, "start": start, "end": start + length, "text": "".join(words)}
            )
            segments.append(
                {"engine": "e12", "start": start, "end": start + length, "started_unix_s": 0, "ended_unix_s": 9}
            )
    trajectory = {"token_ids": [300 + len(text) for text in texts], "versions": versions, "logprobs": logprobs}
    trajectory |= {"loss_mask": [int(version >= 0) for version in versions], "segments": segments[1::2], "turns": 3}
    return {"trajectory": trajectory, "spans": spans, "tokens": texts}


if __name__ == "__main__":
    main()
