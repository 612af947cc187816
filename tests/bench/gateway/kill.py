"""kill -9 of the gateway at full speed: which share of the engines' tokens the next life goes on from.

48 turns run at 50 tokens/s each, begun beside as many others, when the gateway is killed; the engines never slow down.
It is started again on the same data, the clients ask again, and what the engines are then sent beside each prompt
was kept. The engines' tokens are those that they had computed when their connections broke, sent or not yet: what an
event still gathers is lost, too.

Until the kill another process's eye is on the journal: a token's lag is from the engine's writing its event to the
commit that has it, as a reader of the database sees it, every `LOOK_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sqlite3
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import uvloop

from gateway.core.types import TurnRequest
from tests.bench.figures import ROUNDS, Figure, median
from tests.bench.gateway import load
from tests.bench.gateway.client import Agent, AnswerFailed, close, connect, post
from tests.bench.gateway.contenders import Contender, mock_engines, start
from tests.bench.gateway.mock_engine import MODEL, NAMING, Turn

NUM_ENGINES = 4
TURNS, TOKENS_S, BUDGET = 48, 50.0, 400
KILL_AT = 0.6  # of all tokens that the turns may have
BAR = 0.95
LOOK_S = 0.002
RUN_TIMEOUT_S, RESUME_TIMEOUT_S = 60.0, 60.0

Name = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Killed:
    """One round. `generated`: the engines' tokens at the kill; `sent`: those of them that had left; `kept`: those that
    the next life goes on from."""

    generated: int
    sent: int
    kept: int
    cut: int
    resumed: int
    tokens_per_event: float
    lags_s: Sequence[float]

    @property
    def share(self) -> float:
        return self.kept / self.generated


def run() -> Iterator[Figure]:
    rounds = _rounds(streamed=True)
    what = f"share of the engines' tokens kept over kill -9 at full speed, {TURNS} streams of {TOKENS_S:g} tokens/s"
    shares = [one.share for one in rounds]
    yield median("kill_kept_share", what, shares, bar=BAR, better="more", details=_told(rounds))
    lags = [share_of(one.lags_s, 0.99) * 1e3 for one in rounds]
    what = "lag of the journal behind the engines until that kill, p99 over all tokens"
    yield median("kill_journal_lag_p99_ms", what, lags, better="reported", unit="ms", details=_lags_told(rounds))
    rounds = _rounds(streamed=False)
    what = f"the same of {TURNS} answers that are sent whole, whose events hold more tokens"
    shares = [one.share for one in rounds]
    yield median("kill_kept_share_whole", what, shares, better="reported", details=_told(rounds))


def _told(rounds: Sequence[Killed]) -> dict[str, object]:
    lost = [(one.generated - one.kept) / one.cut for one in rounds]
    return {
        "of_those_sent": round(statistics.median(one.kept / one.sent for one in rounds), 4),
        "tokens_lost_per_turn": round(statistics.median(lost), 1),
        "turns_cut": [one.cut for one in rounds],
        "turns_resumed": [one.resumed for one in rounds],
        "tokens_per_event": round(statistics.median(one.tokens_per_event for one in rounds), 1),
    }


def _lags_told(rounds: Sequence[Killed]) -> dict[str, object]:
    shares = (("p50_ms", 0.5), ("p99_ms", 0.99), ("max_ms", 1.0))
    return {name: [round(share_of(one.lags_s, share) * 1e3, 1) for one in rounds] for name, share in shares}


def share_of(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def _rounds(*, streamed: bool) -> list[Killed]:
    with mock_engines(NUM_ENGINES, rate=TOKENS_S) as engines:
        return [uvloop.run(_round(engines, number, streamed)) for number in range(ROUNDS)]


async def _round(engines: Sequence[str], number: int, streamed: bool) -> Killed:
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
        names = [(1 + number, 1 + at, 7) for at in range(TURNS)]
        async with contextlib.AsyncExitStack() as stack:
            gateway = await _started(engines, Path(folder), stack)
            async with _asking(gateway, names, streamed) as waiting, _watched(_database(Path(folder))) as journal:
                await _until_sent(engines, names)
                gateway.kill()
                await asyncio.wait(waiting, timeout=RUN_TIMEOUT_S)
            before = await _turns(engines, names)
            gateway = await _started(engines, Path(folder), stack)
            async with _asking(gateway, names, streamed, warm=False):
                after = await _resumed(engines, before)
        return outcome(before, after, journal.commits)


async def _started(engines: Sequence[str], folder: Path, stack: contextlib.AsyncExitStack) -> Contender:
    gateway = await asyncio.to_thread(start, "laminar", engines, folder, (), "round_robin")
    stack.callback(gateway.close)
    return gateway


@contextlib.asynccontextmanager
async def _asking(
    gateway: Contender, names: Sequence[Name], streamed: bool, *, warm: bool = True
) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Clients that ask for their turns; `warm`: after a first of one to two seconds each, so that all begin beside as
    many others and not together. A client's task ends with its answer, or with the connection."""
    agents = await connect(gateway.url, len(names))

    async def ask(agent: Agent, at: int) -> None:
        if warm:
            first = (names[at][0], names[at][1], 9)
            await agent.send(_turn(gateway.url, first, round(TOKENS_S) + at % round(TOKENS_S), streamed))
        with contextlib.suppress(AnswerFailed):  # the kill: the engines tell what was cut
            await agent.send(_turn(gateway.url, names[at], BUDGET, streamed))

    asking = [asyncio.create_task(ask(agent, at)) for at, agent in enumerate(agents)]
    try:
        yield asking
    finally:
        close(agents)
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)


def _turn(url: str, name: Name, tokens: int, streamed: bool) -> bytes:
    body = {"model": MODEL, "prompt": list(name), "max_tokens": tokens, "stream": streamed}
    return post(url, "/v1/completions", body, {"Idempotency-Key": "-".join(map(str, name))})


async def _until_sent(engines: Sequence[str], names: Sequence[Name]) -> None:
    wanted = KILL_AT * len(names) * BUDGET
    async with asyncio.timeout(RUN_TIMEOUT_S):
        while True:
            if sum(turn.sent for turn in await _turns(engines, names)) >= wanted:
                return
            await asyncio.sleep(0.02)


async def _turns(engines: Sequence[str], names: Collection[Name]) -> list[Turn]:
    """Of those names, in the order in which each engine was asked."""
    wanted = set(names)
    pages = await load.engines_tell(engines, "turns")
    found = [Turn(**{**turn, "name": tuple(turn["name"])}) for turn in itertools.chain(*pages)]
    return [turn for turn in found if turn.name in wanted]


async def _resumed(engines: Sequence[str], before: Sequence[Turn]) -> list[Turn]:
    """What the engines were asked since, once each turn goes on."""
    names, last = {turn.name for turn in before}, max(turn.begun_at for turn in before)
    async with asyncio.timeout(RESUME_TIMEOUT_S):
        while True:
            found = [turn for turn in await _turns(engines, names) if turn.begun_at > last]
            if {turn.name for turn in found} == names:
                return found
            await asyncio.sleep(0.05)


@dataclass(slots=True)
class Journal:
    """What commits brought: when one was seen, and the tokens of each turn that it added."""

    commits: list[tuple[float, dict[Name, int]]] = field(default_factory=list)


@contextlib.asynccontextmanager
async def _watched(database: Path) -> AsyncIterator[Journal]:
    """The journal as it grows, read beside the gateway. It is not folded before it has many times these tokens."""
    journal = Journal()
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        watching = asyncio.create_task(_watch(connection, journal))
        try:
            yield journal
        finally:
            watching.cancel()
            await asyncio.wait([watching])
            if not watching.cancelled():
                watching.result()


def _database(folder: Path) -> Path:
    [path] = folder.glob("*.data/*.sqlite")
    return path


async def _watch(connection: sqlite3.Connection, journal: Journal) -> None:
    last, names = 0, dict[str, Name]()
    while True:
        rows = connection.execute("SELECT flush, parts FROM turn_journal WHERE flush > ?", (last,)).fetchall()
        now = time.monotonic()
        for flush, blob in rows:
            last, added = flush, dict[Name, int]()
            for turn_id, ids, *_ in msgspec.msgpack.decode(blob):
                added[_name(connection, turn_id, names)] = len(ids) // 8
            journal.commits.append((now, added))
        await asyncio.sleep(LOOK_S)


def _name(connection: sqlite3.Connection, turn_id: str, names: dict[str, Name]) -> Name:
    if turn_id not in names:
        [[blob]] = connection.execute("SELECT request FROM turns WHERE turn_id=?", (turn_id,)).fetchall()
        names[turn_id] = msgspec.msgpack.decode(blob, type=TurnRequest).prompt_ids[:NAMING]
    return names[turn_id]


def outcome(
    before: Sequence[Turn], after: Sequence[Turn], commits: Sequence[tuple[float, Mapping[Name, int]]]
) -> Killed:
    """From what engines were asked before the kill and after it, and what the journal had when."""
    kept: dict[Name, int] = {}
    for turn in after:  # asked more than once: the first time tells what was on disk
        kept.setdefault(turn.name, turn.prompt_tokens - NAMING)
    sizes = [turn.interval for turn in before]
    return Killed(
        generated=sum(map(generated, before)),
        sent=sum(turn.sent for turn in before),
        kept=sum(kept.values()),
        cut=len(before),
        resumed=len(kept),
        tokens_per_event=statistics.mean(sizes),
        lags_s=lags({turn.name: turn for turn in before}, commits),
    )


def generated(turn: Turn) -> int:
    """Tokens that the engine had computed when its connection broke: the first at once, the others at its pace."""
    assert turn.ended_at is not None, f"turn {turn.name} was not cut"
    return min(turn.tokens, max(turn.sent, 1 + int((turn.ended_at - turn.begun_at) * TOKENS_S)))


def lags(turns: Mapping[Name, Turn], commits: Sequence[tuple[float, Mapping[Name, int]]]) -> list[float]:
    """Of every token that was committed, from its event's due time."""
    found: list[float] = []
    had: defaultdict[Name, int] = defaultdict(int)
    for at, added in commits:
        for name, count in added.items():
            if name not in turns:
                continue
            found += [at - sent_at(turns[name], had[name] + n) for n in range(1, count + 1)]
            had[name] += count
    return found


def sent_at(turn: Turn, token: int) -> float:
    """When the event that has the turn's n-th token (from 1) is due: the first has one, the others `interval`."""
    events = -(-(token - 1) // turn.interval)
    return turn.begun_at + (min(turn.tokens, 1 + events * turn.interval) - 1) / TOKENS_S
