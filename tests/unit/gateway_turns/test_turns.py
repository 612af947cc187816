"""Turns over real engines' streams: cut in every way, moved, ended early, given up, held back; and what is counted."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from gateway.core.endings import Finish
from gateway.core.fleet.config import FleetConfig
from gateway.core.fleet.state import TurnLoad
from gateway.core.placing.scheduler import Demand
from gateway.core.sampling import segment_seed
from gateway.core.types import EngineName, SessionId, TurnId
from gateway.engines.base import RequestRefused
from gateway.engines.connections import EVENTS_AT_ONCE_MAX
from gateway.turns import audience, driver
from gateway.turns.audience import UNREAD_TOKENS_MAX
from gateway.turns.running import RunningTurn
from protos.errors import OutOfCapacity, Unavailable
from tests.support.fake_relay import relay
from tests.support.gateway_shell import (
    BUDGET,
    PROMPT,
    STALL_S,
    Shell,
    check_at_rest,
    check_whole,
    read,
    shell,
)
from tests.support.reading import heard, slowly
from tests.support.scripted_engine import Cut, CutKind, ScriptedEngine, pass_time, scripted, until

REASONS: dict[CutKind, str] = {
    "reset": "reset",
    "closed": "reset",
    "death": "reset",
    "eof": "early_end",
    "done": "early_end",
    "abort": "abort",
    "error_event": "server_error",
    "hang": "stalled",
    "malformed": "protocol",
    "no_logprobs": "protocol",
    "huge_id": "protocol",
    "repeat": "protocol",
    "shorten": "protocol",
}
BEFORE_THE_STREAM: dict[CutKind, str] = {"500": "server_error", "503": "no_room", "silent": "stalled"}
CUTS = [(k, r, 5) for k, r in REASONS.items()] + [(k, r, 0) for k, r in (REASONS | BEFORE_THE_STREAM).items()]
CUTS.remove(("repeat", "protocol", 0))  # there is nothing to repeat


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "CUT_BACKOFF_S", 0.01)


def cutting(name: str, *cuts: Cut, **how: Any) -> ScriptedEngine:
    return ScriptedEngine(name, cuts=deque(cuts), **how)


def asks(*engines: ScriptedEngine) -> list[tuple[int, int]]:
    """Of every request: how many generated ids its prompt held, and how many it asked for."""
    return sorted((len(a.prompt) - len(PROMPT), a.body["max_tokens"]) for e in engines for a in e.requests)


def spans(run: RunningTurn) -> list[tuple[str, int, int, str]]:
    return [(s.engine, s.start, s.end, s.cause) for s in run.segments]


def cut_counts(found: Shell) -> tuple[int, int, int, dict[str, int]]:
    c = found.sessions.counters
    return c.turns_cut, c.turns_resumed, c.turns_lost, c.cuts_by_reason


@pytest.mark.parametrize("how", [{"chunk": 1}, {"chunk": 5, "split": True}], ids=str)
async def test_an_uncut_turn(tmp_path: Path, how: dict[str, Any]) -> None:
    async with ScriptedEngine("e0", **how) as e0, shell(tmp_path, e0) as found:
        run = found.run(seed=7)
        check_whole(run, await read(run))
        assert spans(run) == [("e0", 0, BUDGET, "start")]
        assert await found.outcome(run) == (*scripted(PROMPT, BUDGET), [("e0", 0, BUDGET)])
        assert e0.requests[0].body["seed"] == run.segments[0].seed == segment_seed(7, 0, 0, 0)
        assert cut_counts(found) == (0, 0, 0, {})
        assert found.sessions.counters.tokens_generated == BUDGET
        check_at_rest(found)


@pytest.mark.parametrize(("kind", "reason", "after"), CUTS, ids=lambda value: str(value))
async def test_a_cut_turn_goes_on_elsewhere_as_if_uncut(tmp_path: Path, kind: CutKind, reason: str, after: int) -> None:
    async with cutting("e0", Cut(kind, after)) as e0, ScriptedEngine("e1") as e1, shell(tmp_path, e0, e1) as found:
        e0.before_cut = found.taken
        run = found.run(seed=7, min_tokens=8)
        reading = asyncio.create_task(read(run))
        if reason == "stalled":
            await until(lambda: e0.requests, "the request")
            await found.taken(len(PROMPT) + after)
            await found.fleet.handles[EngineName("e0")].adapter.limits()  # the answer's head comes before
            pass_time(STALL_S)
        check_whole(run, await reading)
        assert spans(run) == [("e0", 0, after, "start"), ("e1", after, BUDGET, "cut")]
        assert asks(e0) == [(0, BUDGET)]
        assert asks(e1) == [(after, BUDGET - after)]
        assert e1.requests[0].prompt == [*PROMPT, *scripted(PROMPT, after)[0]]
        assert e1.requests[0].body["min_tokens"] == 8 - after
        assert [s.sampled_with.min_tokens for s in run.segments if s.sampled_with] == [8, 8 - after]
        # A seed of the segment's own, or the rest would repeat the beginning's random stream; told as it was used.
        seeds = [segment_seed(7, 0, 0, 0), segment_seed(7, 0, 0, after)]
        assert [e.requests[0].body["seed"] for e in (e0, e1)] == [s.seed for s in run.segments] == seeds
        assert cut_counts(found) == (1, 1, 0, {reason: 1})
        assert found.sessions.counters.tokens_generated == BUDGET
        ids, logprobs, kept = await found.outcome(run)
        assert (ids, logprobs) == scripted(PROMPT, BUDGET)
        assert kept == [("e0", 0, after), ("e1", after, BUDGET)]
        assert [s.engine for s in run.session.newest.segments] == (["e0", "e1"] if after else ["e1"])
        check_at_rest(found)


async def test_engines_that_cut_in_turn(tmp_path: Path) -> None:
    e0, e1 = cutting("e0", Cut("reset", 3), Cut("done", 2)), cutting("e1", Cut("eof", 4), Cut("hang", 1))
    async with e0, e1, shell(tmp_path, e0, e1) as found:

        async def silence(length: int) -> None:
            await found.taken(length)
            if length == len(PROMPT) + 10:  # the one that hangs
                pass_time(STALL_S)

        e0.before_cut, e1.before_cut = found.taken, silence
        run = found.run()
        check_whole(run, await read(run))
        bounds = [0, 3, 7, 9, 10, 12]
        assert [(s.engine, s.start, s.end) for s in run.segments] == [
            (("e0", "e1")[i % 2], start, end) for i, (start, end) in enumerate(itertools.pairwise(bounds))
        ]
        assert asks(e0, e1) == [(start, BUDGET - start) for start in bounds[:-1]]
        assert cut_counts(found) == (4, 4, 0, {"reset": 1, "early_end": 2, "stalled": 1})
        check_at_rest(found)


async def test_many_turns_at_once_are_cut_and_none_is_mixed_up(tmp_path: Path) -> None:
    kinds: list[CutKind] = ["reset", "eof", "abort", "500", "closed", "malformed"]
    e0 = cutting("e0", *(Cut(kind, i % 4) for i, kind in enumerate(kinds * 2)))
    e1 = cutting("e1", *(Cut(kind, i % 5) for i, kind in enumerate(reversed(kinds))))
    async with e0, e1, shell(tmp_path, e0, e1) as found:
        runs = [found.run() for _ in range(20)]
        for run, deltas in zip(runs, await asyncio.gather(*map(read, runs)), strict=True):
            check_whole(run, deltas)
        assert cut_counts(found)[:3] == (18, 18, 0)
        assert found.sessions.counters.tokens_generated == 20 * BUDGET
        check_at_rest(found)


async def test_with_one_engine_left_the_turn_resumes_on_it(tmp_path: Path) -> None:
    async with cutting("e0", Cut("eof", 4)) as e0, shell(tmp_path, e0) as found:
        run = found.run()
        check_whole(run, await read(run))
        assert spans(run) == [("e0", 0, 4, "start"), ("e0", 4, BUDGET, "cut")]
        check_at_rest(found)


@pytest.mark.parametrize("kind", ["reset", "eof", "done", "abort"])
async def test_cut_after_the_last_token_of_the_budget_nothing_more_is_asked(tmp_path: Path, kind: CutKind) -> None:
    async with cutting("e0", Cut(kind, BUDGET)) as e0, ScriptedEngine("e1") as e1, shell(tmp_path, e0, e1) as found:
        e0.before_cut = found.taken
        run = found.run()
        check_whole(run, await read(run))
        assert asks(e0, e1) == [(0, BUDGET)]
        assert run.session.tree.newest.finish_reason == "length"


async def test_cut_after_the_last_token_leaves_no_booking(tmp_path: Path) -> None:
    async with cutting("e0", Cut("eof", BUDGET)) as e0, ScriptedEngine("e1") as e1, shell(tmp_path, e0, e1) as found:
        await read(found.run())
        check_at_rest(found)


async def test_cut_after_the_last_token_needs_no_other_engine(tmp_path: Path) -> None:
    async with cutting("e0", Cut("death", BUDGET)) as e0, shell(tmp_path, e0, placement_timeout_s=0.3) as found:
        e0.before_cut = found.taken
        run = found.run()
        check_whole(run, await read(run))


async def test_with_no_engine_left_the_turn_is_lost_and_the_client_told(tmp_path: Path) -> None:
    async with cutting("e0", Cut("death", 4)) as e0, shell(tmp_path, e0, placement_timeout_s=0.3) as found:
        e0.before_cut = found.taken
        session = found.session()
        run = found.run(session)
        with pytest.raises(Unavailable, match=rf"turn {run.request.turn_id} is lost: .*no engine.*0\.3 s") as error:
            await read(run)
        assert "send the request again" in error.value.hint
        assert (await found.outcome(run))[0] == scripted(PROMPT, 4)[0]
        cuts, resumed, lost, reasons = cut_counts(found)
        assert (lost, reasons["reset"]) == (1, 1)
        assert resumed == cuts - 1  # what was resumed met a refusal
        assert found.status(e0) == "dead"
        assert (session.token_ids, session.running) == ([], {})
        check_at_rest(found)


async def test_the_turn_waits_for_its_engine_to_return(tmp_path: Path) -> None:
    async with cutting("e0", Cut("death", 4)) as e0, shell(tmp_path, e0, poll_interval_s=0.02) as found:
        e0.before_cut = found.taken
        run = found.run()
        reading = asyncio.create_task(read(run))
        await until(lambda: found.status(e0) == "dead", "notice of the death")
        async with ScriptedEngine("e0", url=e0.url, started_unix_s=2.0):
            check_whole(run, await reading)
        assert [s.incarnation for s in run.segments if s.end > s.start] == ["1.0", "2.0"]
        assert found.sessions.counters.turns_lost == 0
        check_at_rest(found)


async def test_a_turn_that_is_always_cut_is_lost_at_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "CUT_BACKOFF_S", 0.0)
    async with ScriptedEngine("e0", always=Cut("eof")) as e0, shell(tmp_path, e0) as found:
        with pytest.raises(Unavailable, match=r"6 times in a row after 0 tokens, on e0; the last: .*without a finish"):
            await read(found.run())
        assert cut_counts(found) == (6, 5, 1, {"early_end": 6})
        e0.always = Cut("eof", 2)  # it gets on
        with pytest.raises(Unavailable, match=r"cut 20 times; the last: .*without a finish reason"):
            await read(found.run(budget=100))
        check_at_rest(found)


async def test_a_refused_request_is_the_clients_and_asks_nobody_else(tmp_path: Path) -> None:
    async with cutting("e0", Cut("400")) as e0, ScriptedEngine("e1") as e1, shell(tmp_path, e0, e1) as found:
        session = found.session()
        with pytest.raises(RequestRefused, match="scripted to answer 400"):
            await read(found.run(session))
        assert (e1.requests, found.sessions.counters.turns_cut, found.turns_on(e0)) == ([], 0, [])
        run = found.run(session)  # the session goes on
        check_whole(run, await read(run))


@pytest.mark.parametrize("queue_max", [0, 1])
async def test_full_queues_refuse_and_waiting_turns_are_served(tmp_path: Path, queue_max: int) -> None:
    config: dict[str, Any] = {"fleet": FleetConfig(max_running=1), "queue_max": queue_max}
    async with ScriptedEngine("e0", hold_at=2) as e0, shell(tmp_path, e0, **config) as found:
        runs = [found.run() for _ in range(1 + queue_max)]
        reading = [asyncio.create_task(read(run)) for run in runs]
        await until(lambda: e0.requests and found.fleet.statistics().queued == queue_max, "a full queue")
        session = found.session()
        with pytest.raises(OutOfCapacity, match=f"{queue_max} turns wait for an engine already") as refusal:
            await read(found.run(session))
        assert refusal.value.retry_after_s == 5.0  # nothing was measured yet
        assert (session.token_ids, session.running) == ([], {})
        e0.go.set()
        for run, task in zip(runs, reading, strict=True):
            check_whole(run, await task)
        assert len(e0.requests) == len(runs)
        assert found.pool.statistics().in_flight == 0
        assert found.turns_on(e0) == []


async def test_turns_that_were_cut_are_placed_before_new_ones(tmp_path: Path) -> None:
    config: dict[str, Any] = {"fleet": FleetConfig(max_running=1), "queue_max": 1}
    async with ScriptedEngine("e0") as e0, shell(tmp_path, e0, **config) as found:
        engine = EngineName("e0")
        found.fleet.places.enter(engine, TurnLoad(TurnId("first"), SessionId("other"), 3, 15))
        waiting = {}
        for name, resumed in (("new", False), ("cut", True)):  # a full queue does not hold for turns that were cut
            session = found.session(name)
            place = found.fleet.places.place(Demand(session, 3, turn_id=TurnId(name)), resumed=resumed, timeout_s=5.0)
            waiting[name] = asyncio.create_task(place)
            await until(lambda: found.fleet.statistics().queued == len(waiting), "a queued turn")
        found.fleet.places.leave(engine, TurnId("first"))
        assert (await waiting["cut"]).engine == "e0"
        assert not waiting["new"].done()
        found.fleet.places.leave(engine, TurnId("cut"))
        assert (await waiting["new"]).engine == "e0"


async def test_a_wait_that_is_too_long_is_refused_with_its_reason(tmp_path: Path) -> None:
    config: dict[str, Any] = {"fleet": FleetConfig(max_running=1), "queue_timeout_s": 0.05}
    async with ScriptedEngine("e0", hold_at=0) as e0, shell(tmp_path, e0, **config) as found:
        async with found.run():
            with pytest.raises(OutOfCapacity, match=r"within 0\.05 s: open intakes are full"):
                await read(found.run())
        assert found.fleet.statistics().queued == 0


async def test_a_client_that_leaves_aborts_upstream(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", hold_at=4) as e0, shell(tmp_path, e0) as found:
        session = found.session()
        run = found.run(session)
        async with run, contextlib.aclosing(slowly(run)) as reading:
            assert (await anext(reading)).token_ids
        await until(lambda: e0.requests[0].left, "the abort upstream")
        assert (session.token_ids, session.running, found.sessions.counters.turns_aborted) == ([], {}, 1)
        check_at_rest(found)
        e0.hold_at = None
        again = found.run(session)
        check_whole(again, await read(again))


async def test_a_client_that_leaves_the_queue_leaves_nothing(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", hold_at=2) as e0, shell(tmp_path, e0, fleet=FleetConfig(max_running=1)) as found:
        async with found.run() as first:
            waiting = asyncio.create_task(read(found.run()))
            await until(lambda: found.fleet.statistics().queued == 1, "a queued turn")
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert found.fleet.statistics().queued == 0
            e0.go.set()
            check_whole(first, await heard(first))
        assert found.sessions.counters.turns_aborted == len(e0.requests) == 1
        check_at_rest(found)


async def test_a_client_that_leaves_as_it_is_placed_leaves_no_booking(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, shell(tmp_path, e0, fleet=FleetConfig(max_running=1)) as found:
        found.fleet.places.enter(EngineName("e0"), TurnLoad(TurnId("first"), SessionId("other"), 3, 15))
        session = found.session()
        place = found.fleet.places.place(Demand(session, 3, turn_id=TurnId("waiting")), resumed=False, timeout_s=5.0)
        waiting = asyncio.create_task(place)
        await until(lambda: found.fleet.statistics().queued == 1, "a queued turn")
        found.fleet.places.leave(EngineName("e0"), TurnId("first"))
        found.fleet.reconcile()  # serves the queue
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert found.turns_on(e0) == []


async def test_an_engine_that_dies_between_placing_and_streaming_keeps_no_booking(tmp_path: Path) -> None:
    config: dict[str, Any] = {"fleet": FleetConfig(max_running=1)}
    async with ScriptedEngine("e0") as e0, ScriptedEngine("e1") as e1, shell(tmp_path, e0, e1, **config) as found:
        for engine in (e0, e1):
            found.fleet.places.enter(EngineName(engine.name), TurnLoad(TurnId("other"), SessionId("other"), 3, 15))
        run = found.run()
        reading = asyncio.create_task(read(run))
        await until(lambda: found.fleet.statistics().queued == 1, "a queued turn")
        found.fleet.places.leave(EngineName("e0"), TurnId("other"))
        found.fleet.reconcile()  # books the turn there
        found.fleet.state.engines[EngineName("e0")].to("dead")
        found.fleet.places.leave(EngineName("e1"), TurnId("other"))
        check_whole(run, await reading)
        assert spans(run) == [("e1", 0, BUDGET, "cut")]
        check_at_rest(found)


@pytest.mark.parametrize(  # each collects garbage in the whole heap: one case is enough for `make quick`
    "how", ["left", *(pytest.param(how, marks=pytest.mark.slow) for how in ("moved", "ended"))]
)
async def test_a_stream_that_fails_as_it_is_closed_leaves_no_booking(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the engine would look busier than it is for ever, and the least loaded be another one.

    What it failed with is logged there and then: a collector that comes later, or never, has nothing to report.
    """
    async with ScriptedEngine("e0", hold_at=4) as e0, ScriptedEngine("e1") as e1, shell(tmp_path, e0, e1) as found:
        adapter = found.fleet.handles[EngineName("e0")].adapter
        whole = adapter.generate

        @contextlib.asynccontextmanager
        async def failing(*asked: Any) -> AsyncIterator[Any]:
            async with whole(*asked) as chunks:
                try:
                    yield chunks
                finally:
                    raise OSError("the connection could not be closed")

        monkeypatch.setattr(adapter, "generate", failing)
        run = found.run()
        if how == "left":
            await asyncio.wait_for(leave_after(run, 4), 60)
        else:
            async with run:
                await until(lambda: len(run.record.token_ids) == 4, "four tokens")
                if how == "moved":
                    run.move(EngineName("e1"))
                e0.go.set()
                with pytest.raises(OSError, match="could not be closed"):
                    await heard(run)
        assert (found.turns_on(e0), found.turns_on(e1)) == ([], [])
        check_at_rest(found)
    gc.collect()
    errors = [record.name for record in caplog.records if record.levelname == "ERROR"]
    assert errors == ([] if how == "left" else ["gateway.runtime.supervisor"])


async def leave_after(run: RunningTurn, num_tokens: int) -> None:
    async with run:
        await until(lambda: len(run.record.token_ids) == num_tokens, f"{num_tokens} tokens")


async def test_a_client_that_stops_reading_keeps_no_engines_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn goes on into its record, its place is another's, and the client may read the rest whenever it likes."""
    monkeypatch.setattr(audience, "PATIENCE_S", 0.05)
    budget = 2000
    async with ScriptedEngine("e0", chunk=1) as e0, shell(tmp_path, e0, fleet=FleetConfig(max_running=1)) as found:
        run = found.run(budget=budget)
        async with run:
            reading = slowly(run)
            deltas = [await anext(reading)]
            await until(lambda: run.record.finish_reason and not found.turns_on(e0), "its end, though nobody reads")
            other = found.run()
            check_whole(other, await read(other))
            deltas += [delta async for delta in reading]
        check_whole(run, deltas, budget)
        check_at_rest(found)


async def test_a_slow_client_holds_its_stream_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audience, "PATIENCE_S", 3600.0)
    budget, ahead_max = 2000, UNREAD_TOKENS_MAX + EVENTS_AT_ONCE_MAX
    async with ScriptedEngine("e0", chunk=1) as e0, shell(tmp_path, e0) as found:
        run, deltas = found.run(budget=budget), []
        async with run:
            appended = found.pool.statistics
            await until(lambda: e0.requests[0].written, "everything said")
            reading = slowly(run)
            deltas.append(await anext(reading))
            await until(lambda: appended().appended_tokens >= UNREAD_TOKENS_MAX, "a held stream")
            await found.fleet.handles[EngineName("e0")].adapter.limits()  # whatever would still be read comes before
            read_so_far = len(deltas[0].token_ids)
            assert appended().appended_tokens - read_so_far <= ahead_max
            async for delta in reading:
                deltas.append(delta)
                read_so_far += len(delta.token_ids)
                assert appended().appended_tokens - read_so_far <= ahead_max
        check_whole(run, deltas, budget)
        assert found.sessions.counters.turns_cut == 0
        check_at_rest(found)


# -- moves


@pytest.mark.parametrize("at", [0, 4, BUDGET], ids=["first", "middle", "after the last token"])
async def test_a_moved_turn_shows_no_difference(tmp_path: Path, at: int) -> None:
    e0 = cutting("e0", *([Cut("hang", BUDGET)] if at == BUDGET else []), hold_at=at)
    async with e0, ScriptedEngine("e1") as e1, shell(tmp_path, e0, e1) as found:
        run = found.run()
        async with run:
            await until(lambda: len(run.record.token_ids) == at and e0.requests, f"{at} tokens")
            assert run.engine == "e0"
            assert run.move(EngineName("e1"))
            assert not run.move(EngineName("e1"))  # it is on its way
            deltas = await heard(run)
        assert not run.move(EngineName("e0"))  # it has ended
        await until(lambda: e0.requests[0].left, "the abort upstream")
        assert [t for d in deltas for t in d.token_ids] == run.record.token_ids == scripted(PROMPT, BUDGET)[0]
        assert deltas[-1].finish_reason == "length"
        moved = [] if at == BUDGET else [("e1", at, BUDGET, "move")]
        assert spans(run) == [("e0", 0, at, "start"), *moved]
        assert asks(e1) == [(at, BUDGET - at) for _ in moved]
        assert (run.session.moves, run.session.engine, found.sessions.counters.moves) == (1, "e1", 1)
        assert cut_counts(found) == (0, 0, 0, {})
        check_at_rest(found)


async def test_a_move_to_an_engine_that_is_gone_is_a_cut_and_goes_on(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", hold_at=4) as e0, shell(tmp_path, e0) as found:
        async with found.run() as run:
            await until(lambda: len(run.record.token_ids) == 4, "four tokens")
            assert run.move(EngineName("e9"))
            e0.go.set()
            check_whole(run, await heard(run))
        assert spans(run) == [("e0", 0, 4, "start"), ("e0", 4, BUDGET, "cut")]
        assert cut_counts(found) == (1, 1, 0, {"refused": 1})
        check_at_rest(found)


async def test_an_engine_taken_out_gives_its_turns_to_others(tmp_path: Path) -> None:
    async with (
        ScriptedEngine("e0", hold_at=4) as e0,
        ScriptedEngine("e1") as e1,
        shell(tmp_path, e0, e1, stall_timeout_s=3600.0) as found,
    ):
        async with found.run() as run:
            await until(lambda: len(run.record.token_ids) == 4, "four tokens")
            await found.fleet.remove(EngineName("e0"))
            async with asyncio.timeout(60):  # no silence is long enough to be what cuts it
                check_whole(run, await heard(run))
        assert spans(run)[1] == ("e1", 4, BUDGET, "cut")
        assert cut_counts(found)[:3] == (1, 1, 0)
        check_at_rest(found)


async def test_a_version_that_arrives_packs_the_tail_and_refreshes_the_freed_engine(tmp_path: Path) -> None:
    budget = 400  # long enough for the planner to find a move worth its price
    async with relay() as (found_relay, address), AsyncExitStack() as stack:
        e0, e1 = [await stack.enter_async_context(ScriptedEngine(f"e{i}", hold_at=6)) for i in range(2)]
        found = await stack.enter_async_context(shell(tmp_path, e0, e1, relay=address))
        repacking = asyncio.create_task(found.repacker.run())
        runs = [found.run(budget=budget) for _ in range(2)]
        reading = [asyncio.create_task(read(run)) for run in runs]
        await until(lambda: all(len(r.record.token_ids) == 6 for r in runs), "both held")
        assert {r.engine for r in runs} == {"e0", "e1"}
        found_relay.publish(1)
        await until(lambda: [e.version for e in found.fleet.state.sorted_engines() if e.version], "a refresh")
        [stayed, moved] = sorted(runs, key=lambda r: r.session.moves)
        freed, packed = (e0, e1) if stayed.engine == "e1" else (e1, e0)
        assert found.status(freed) == "serving"
        for engine in (e0, e1):
            engine.hold_at = None
            engine.go.set()
        for run, task in zip(runs, reading, strict=True):
            check_whole(run, await task, budget)
        assert [(s.engine, s.cause) for s in moved.segments] == [(freed.name, "start"), (packed.name, "move")]
        assert {s.version for r in runs for s in r.segments} == {0}
        assert (found.sessions.counters.repacks, found.sessions.counters.moves) == (1, 1)
        await found.endings.finish_rewarded(stayed.request.session_id, Finish(reward=1.0))
        await found.endings.finish_rewarded(moved.request.session_id, Finish(reward=1.0))
        await until(lambda: packed.version == "1", "the packed engine's refresh")
        await until(lambda: not found_relay.leases, "released pins")
        repacking.cancel()
        check_at_rest(found)


# -- ended early, abandoned, mislabelled


@pytest.mark.parametrize("wanted", [0, 1, 3])
@pytest.mark.parametrize("ended", [False, True], ids=["running", "ended"])
async def test_a_turn_finished_early_has_the_tokens_before_the_stop(tmp_path: Path, wanted: int, ended: bool) -> None:
    async with ScriptedEngine("e0", hold_at=None if ended else 6) as e0, shell(tmp_path, e0) as found:
        session = found.session()
        async with found.run(session) as run:
            await until(lambda: len(run.record.token_ids) == (BUDGET if ended else 6), "what comes before")
            if ended:
                assert run.task is not None
                await asyncio.wait({run.task})
            await run.finish_early(wanted)
        ids, logprobs = scripted(PROMPT, wanted)
        assert session.token_ids == [*PROMPT, *ids]
        assert session.newest.logprobs == [0.0] * len(PROMPT) + logprobs
        assert session.newest.loss_mask == [0] * len(PROMPT) + [1] * wanted
        assert session.newest.versions == [-1] * len(PROMPT) + [0] * wanted
        assert [(s.start, s.end) for s in session.newest.segments] == [(3, 3 + wanted)] * bool(wanted)
        assert [(s.start, s.end) for s in run.segments] == [(0, wanted)] * bool(wanted)
        assert (session.turns, session.tree.newest.finish_reason) == (1, "stop")
        assert (found.sessions.counters.turns_completed, found.sessions.counters.turns_aborted) == (1, 0)
        await until(lambda: e0.requests[0].left or ended, "the abort upstream")
        check_at_rest(found)


async def test_a_stop_that_matches_just_as_the_engine_ends_closes_the_turn_in_the_pool(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, shell(tmp_path, e0) as found:
        session = found.session()
        async with found.run(session) as run:
            await until(lambda: session.turns == 1, "the end")
            assert run.task is not None
            assert not run.task.done()
            await run.finish_early(3)
        assert session.token_ids == [*PROMPT, *scripted(PROMPT, 3)[0]]
        check_at_rest(found)


async def test_a_turn_finished_early_between_two_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "CUT_BACKOFF_S", 60.0)
    monkeypatch.setattr(driver, "CUT_BACKOFF_MAX_S", 60.0)
    async with cutting("e0", Cut("eof", 6)) as e0, shell(tmp_path, e0) as found:
        async with found.run() as run:
            await until(lambda: found.sessions.counters.turns_cut == 1, "the cut")
            await run.finish_early(5)
        assert run.session.token_ids == [*PROMPT, *scripted(PROMPT, 5)[0]]
        check_at_rest(found)


async def test_an_abandoned_sessions_turn_is_aborted(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", hold_at=4) as e0, shell(tmp_path, e0, stall_timeout_s=3600.0) as found:
        session = found.session()
        async with found.run(session) as run:
            await until(lambda: len(run.record.token_ids) == 4, "four tokens")
            await found.endings.abandon(session.session_id, "no longer wanted")
            await until(lambda: e0.requests[0].left, "the abort upstream")


async def test_an_engine_that_tells_another_version_is_believed_and_counted(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", version="3", version_told="4") as e0, shell(tmp_path, e0) as found:
        run = found.run()
        check_whole(run, await read(run))
        assert found.sessions.counters.version_mismatches == 1
        assert run.session.newest.versions[len(PROMPT) :] == [4] * BUDGET
        e0.version_told = None
        await read(found.run())
        assert found.sessions.counters.version_mismatches == 1


async def test_a_session_goes_on_under_another_version_when_its_own_is_gone(tmp_path: Path) -> None:
    e0, e1 = cutting("e0", Cut("death", 4), version="5"), ScriptedEngine("e1", version="6", hold_at=BUDGET)
    async with e0, e1, shell(tmp_path, e0, e1) as found:
        e0.before_cut = found.taken
        session = found.session()
        session.version = found.fleet.state.engines[EngineName("e0")].version
        found.fleet.state.note_session(session.session_id, session.version, "segment")
        run = found.run(session)
        check_whole(run, await read(run))
        assert session.newest.versions[len(PROMPT) :] == [5] * 4 + [6] * 8
        assert (session.sampled_versions, session.version) == ((5, 6), 6)
        assert found.sessions.counters.turns_mixed_version == 1
        check_at_rest(found)


async def test_closing_tells_those_who_wait(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, shell(tmp_path, e0, fleet=FleetConfig(max_running=0)) as found:
        waiting = asyncio.create_task(read(found.run()))
        await until(lambda: found.fleet.statistics().queued == 1, "a queued turn")
        await found.fleet.close()
        with pytest.raises(Unavailable, match="shutting down"):
            await waiting


@pytest.mark.parametrize("how", ["eos", "stop_token_ids"])
async def test_cut_after_the_token_that_ends_it_nothing_more_is_asked(tmp_path: Path, how: str) -> None:
    """Said, but its finish got lost: to go on after it would be to say what was never meant."""
    last = scripted(PROMPT, 4)[0][-1]
    async with cutting("e0", Cut("eof", 4)) as e0, shell(tmp_path, e0) as found:
        found.sessions.eos_ids = frozenset({last} if how == "eos" else ())
        run = found.run(stop_token_ids=() if how == "eos" else (last,))
        deltas = await read(run)
        assert [t for d in deltas for t in d.token_ids] == scripted(PROMPT, 4)[0]
        assert (deltas[-1].finish_reason, len(e0.requests)) == ("stop", 1)
        check_at_rest(found)


@pytest.mark.parametrize("alien", [1000, 2**62, -1])
async def test_ids_of_another_vocabulary_are_a_cut(tmp_path: Path, alien: int) -> None:
    """Neither recorded, nor shown, nor handed to the database; what came before stands."""
    first = scripted(PROMPT, 3)[0]
    odd = ScriptedEngine("e0", chunk=1, generate=lambda prompt: [*first, alien, 5])
    async with odd, ScriptedEngine("e1") as e1, shell(tmp_path, odd, e1) as found:
        found.sessions.vocab_size = 1000
        run = found.run(seed=7)
        check_whole(run, await read(run))
        assert [(s.engine, s.cause) for s in run.segments] == [("e0", "start"), ("e1", "cut")]
        assert cut_counts(found) == (1, 1, 0, {"protocol": 1})
        check_at_rest(found)
