"""What syncing finishes costs the journal of tokens: its lag, with and without the syncs, round by round in one run.

64 turns say 50 tokens/s each, and 100 sessions are finished each second: their trajectories go into the buffer, and
their ends are acknowledged. The lag is from a token's arrival to the commit that has it; it includes the 100 ms that
the pool gathers. The disk is the machine's own, and the same with 5 ms more for each sync.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from unittest import mock

from gateway.core.endings import Ended
from gateway.core.types import GroupId, SamplingParams, SessionId, TurnId, TurnRequest
from gateway.experience import ExperienceBuffer
from gateway.store import Database, PartialResponsePool
from gateway.store.sessions import SessionStore
from gateway.store.sync import Syncer
from protos.trajectories import Trajectory
from tests.bench.figures import ROUNDS, Figure, median

TURNS, TOKENS_S, FINISHES_S = 64, 50, 100
TOKENS = 500  # of a trajectory
ROUND_S = 6.0
SLOW_SYNC_S = 0.005
BAR = 1.1
"""For the ratio of the p99s: no worse, within what rounds of the same kind differ by."""


def run() -> Iterable[Figure]:
    for key, slow_s in (("journal_lag_p99", 0.0), ("journal_lag_p99_slow_disk", SLOW_SYNC_S)):
        rounds = [(_lag(slow_s, syncs=False), _lag(slow_s, syncs=True)) for _ in range(ROUNDS)]
        p99s = [[_p99(lags) for lags in pair] for pair in rounds]
        details = {
            "without_syncs_p99_ms": round(statistics.median(before for before, _ in p99s) * 1e3, 1),
            "with_syncs_p99_ms": round(statistics.median(after for _, after in p99s) * 1e3, 1),
            "finishes_per_s": FINISHES_S,
        }
        what = f"lag of the journal (p99) with syncs over without{', 5 ms a sync more' if slow_s else ''}"
        yield median(key, what, [after / before for before, after in p99s], bar=BAR, details=details)


def _p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def _lag(slow_s: float, *, syncs: bool) -> list[float]:
    sync = os.fdatasync

    def slowly(fd: int) -> None:
        sync(fd)
        time.sleep(slow_s)

    with tempfile.TemporaryDirectory() as folder, mock.patch("os.fdatasync", slowly):
        if syncs:
            return asyncio.run(_measure(Path(folder)))
        with mock.patch.object(Syncer, "ask", _at_once):
            return asyncio.run(_measure(Path(folder)))


def _at_once(syncer: Syncer) -> Future[None]:
    done: Future[None] = Future()
    done.set_result(None)
    return done


async def _measure(folder: Path) -> list[float]:
    lags: list[float] = []
    async with Database(folder / "gateway.sqlite") as database, asyncio.TaskGroup() as group:
        pool, buffer, store = PartialResponsePool(database), ExperienceBuffer(database), SessionStore(database)
        await pool.open()
        await buffer.open()
        await store.open()
        until = time.monotonic() + ROUND_S
        turns = [TurnId(f"t{i}") for i in range(TURNS)]
        for turn in turns:
            pool.begin(TurnRequest(turn, SessionId(turn), 0, (1, 2, 3), SamplingParams(max_tokens=8)))
        saying = group.create_task(_every(1 / TOKENS_S, until, lambda: _say(pool, turns)))
        group.create_task(_finish(buffer, store, until))
        lags = await _watch(pool, until)
        await saying
        await pool.close()
    return lags


def _say(pool: PartialResponsePool, turns: list[TurnId]) -> None:
    for turn in turns:
        pool.append(turn, (7,), (-1.0,))


async def _every(interval_s: float, until: float, act: Callable[[], None]) -> None:
    due = time.monotonic()
    while due < until:
        act()
        due += interval_s
        await asyncio.sleep(due - time.monotonic())


async def _watch(pool: PartialResponsePool, until: float) -> list[float]:
    """A token's lag each 20 ms: until all that was said by then is on disk."""
    lags: list[float] = []
    waiting: list[tuple[float, int]] = []
    while time.monotonic() < until:
        told = pool.statistics()
        waiting.append((time.monotonic(), told.appended_tokens))
        for said_at, _ in [w for w in waiting if w[1] <= pool.committed_tokens]:
            lags.append(time.monotonic() - said_at)
        waiting = [w for w in waiting if w[1] > pool.committed_tokens]
        await asyncio.sleep(0.002)
    return lags


async def _finish(buffer: ExperienceBuffer, store: SessionStore, until: float) -> None:
    number, under_way = 0, set[asyncio.Task[None]]()

    def begin() -> None:
        nonlocal number
        number += 1
        task = asyncio.create_task(_finish_one(buffer, store, SessionId(f"s{number}")))
        under_way.add(task)
        task.add_done_callback(under_way.discard)

    await _every(1 / FINISHES_S, until, begin)
    if under_way:
        await asyncio.wait(under_way)
    await buffer.close()


async def _finish_one(buffer: ExperienceBuffer, store: SessionStore, name: SessionId) -> None:
    await buffer.add(
        Trajectory(
            session_id=name,
            group_id=GroupId(name),
            sample_index=0,
            reward=1.0,
            status="completed",
            mixed=False,
            split="train",
            token_ids=[7] * TOKENS,
            logprobs=[-1.0] * TOKENS,
            loss_mask=[1] * TOKENS,
            versions=[1] * TOKENS,
            turns=1,
            segments=[],
            started_unix_s=0.0,
            finished_unix_s=1.0,
        )
    )
    await store.end(name, Ended("finished"))
    await store.synced()
