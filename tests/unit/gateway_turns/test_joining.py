"""Clients that leave and come back: the same turn goes on, is read again, or is taken up where it was given up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from gateway.api.calls.answer import AnswerHead, Choice, Form, PreparedRequest
from gateway.api.calls.history import Prompt
from gateway.api.calls.turn_view import Reader
from gateway.core.fleet.config import FleetConfig
from gateway.core.retries import Call, choice_id
from gateway.core.sessions import SessionState
from gateway.core.types import EngineName, SamplingParams, TurnId, TurnOrigin, TurnRequest
from gateway.store import PartialResponsePool
from gateway.turns.running import RunningTurn
from protos.errors import Conflict, OutOfCapacity
from tests.support.gateway_shell import BUDGET, PROMPT, Shell, check_at_rest, check_whole, read, shell
from tests.support.reading import heard
from tests.support.scripted_engine import ScriptedEngine, scripted, until


def begun(found: Shell, session: SessionState, name: str = "t0", **sampling: Any) -> RunningTurn:
    params = SamplingParams(max_tokens=BUDGET, **sampling)
    prompt = (*session.token_ids, *PROMPT)
    origin = TurnOrigin(digest="same")
    newest = session.tree.newest
    parent = None if newest is None else newest.turn_id
    request = TurnRequest(TurnId(name), session.session_id, session.turns, prompt, params, parent, origin=origin)
    return found.sessions.start(request)


def asked_of(run: RunningTurn, *, read: bool) -> PreparedRequest:
    """A request that the turn answers."""
    reader, head = cast(Reader, None), cast(AnswerHead, None)
    form = cast(Form, None)
    return PreparedRequest(form, head, {}, Prompt([], "first"), [Choice(run, reader, read=read)], "body", joined=False)


async def join(found: Shell, call: Call) -> RunningTurn | None:
    joined = await found.sessions.join(call, 1)
    return None if joined is None else joined[0]


async def leave(run: RunningTurn, after: int) -> None:
    """A client that goes once `after` tokens came."""
    async with run:
        await until(lambda: len(run.record.token_ids) == after, f"{after} tokens")


async def test_a_client_that_comes_back_reads_the_running_turn_from_its_beginning(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", hold_at=4) as e0, shell(tmp_path, e0, disconnect_grace_s=60.0) as found:
        session = found.session()
        run = begun(found, session)
        await leave(run, 4)
        assert list(session.running) == ["t0"]
        joined = await join(found, Call("same", session.session_id))
        assert joined is run
        async with joined:
            e0.go.set()
            check_whole(run, await heard(joined))
        assert len(e0.requests) == 1
        counters = found.sessions.counters
        assert (counters.turns_orphaned, counters.turns_joined, counters.turns_aborted) == (1, 1, 0)
        check_at_rest(found)


async def test_two_readers_get_the_same_and_the_turn_lives_while_one_stays(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", hold_at=4) as e0, shell(tmp_path, e0) as found:
        session = found.session()
        run = begun(found, session)
        async with run:
            joined = await join(found, Call("same", session.session_id, retried=True))
            assert joined is run
            await leave(run, 4)
            assert not e0.requests[0].left
            e0.go.set()
            check_whole(run, await heard(run))
        check_at_rest(found)


async def test_a_retry_in_the_middle_of_a_move_joins_the_turn_that_is_moved(tmp_path: Path) -> None:
    e0, e1 = ScriptedEngine("e0", hold_at=4), ScriptedEngine("e1", hold_at=0)
    async with e0, e1, shell(tmp_path, e0, e1, disconnect_grace_s=60.0) as found:
        session = found.session()
        run = begun(found, session)
        await leave(run, 4)
        run.move(EngineName("e1"))
        await until(lambda: e1.requests, "the rest asked for")  # and not a token of it came yet
        joined = await join(found, Call("same", session.session_id, retried=True))
        assert joined is run
        async with joined:
            e1.go.set()
            check_whole(run, await heard(joined))
        assert [len(e0.requests), len(e1.requests)] == [1, 1]
        assert [(s.engine, s.cause) for s in run.segments] == [("e0", "start"), ("e1", "move")]
        check_at_rest(found)


async def test_an_orphan_that_ends_in_its_grace_is_answered_to_the_retry(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", hold_at=4) as e0, shell(tmp_path, e0, disconnect_grace_s=60.0) as found:
        session = found.session()
        run = begun(found, session)
        await leave(run, 4)
        e0.go.set()
        await until(lambda: session.turns == 1, "the end")
        joined = await join(found, Call("same", session.session_id))
        assert joined is run
        check_whole(run, await read(run))
        run.delivered()
        assert await join(found, Call("same", session.session_id)) is None
        assert await join(found, Call("same", session.session_id, retried=True)) is run


async def test_an_orphan_is_aborted_after_its_grace_and_a_later_retry_gets_its_tokens(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", hold_at=4) as e0, shell(tmp_path, e0, disconnect_grace_s=0.02) as found:
        session = found.session()
        run = begun(found, session)
        await leave(run, 4)
        await until(lambda: e0.requests[0].left, "the abort upstream")
        await until(lambda: not session.running, "the end of the turn")
        assert "its client left" in session.last_dropped
        assert "4 tokens kept" in session.last_dropped
        assert session.token_ids == []
        e0.hold_at = None
        again = await join(found, Call("same", session.session_id))
        assert again is not None
        check_whole(again, await read(again))
        assert e0.requests[1].prompt == [*PROMPT, *scripted(PROMPT, 4)[0]], "no token is asked for twice"
        assert [(s.start, s.end, s.cause) for s in again.segments] == [(0, 4, "start"), (4, BUDGET, "cut")]
        assert await found.outcome(again) == (*scripted(PROMPT, BUDGET), [("e0", 0, 4), ("e0", 4, BUDGET)])
        check_at_rest(found)


async def test_a_given_up_turn_of_a_session_that_went_on_becomes_a_branch(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", hold_at=4) as e0, shell(tmp_path, e0) as found:
        session = found.session()
        await leave(begun(found, session), 4)
        e0.hold_at = None
        await read(found.run(session))
        again = await join(found, Call("same", session.session_id, retried=True))
        assert again is not None
        check_whole(again, await read(again))
        assert (session.turns, session.branches) == (2, 2)


async def test_a_lost_turn_keeps_its_tokens_for_the_retry(tmp_path: Path) -> None:
    e0 = ScriptedEngine("e0", hold_at=4)
    async with e0, shell(tmp_path, e0, placement_timeout_s=0.1, poll_interval_s=0.02) as found:
        session = found.session()
        run = begun(found, session)
        async with run:
            await until(lambda: len(run.record.token_ids) == 4, "four tokens")
            await e0.die()
            with pytest.raises(Exception, match="is lost"):
                await read(run)
        async with ScriptedEngine("e0", url=e0.url, started_unix_s=2.0) as returned:
            state = found.fleet.state.sorted_engines()[0]
            await until(lambda: (state.status, state.incarnation) == ("serving", "2.0"), "the engine's return")
            again = await join(found, Call("same", session.session_id))
            assert again is not None
            check_whole(again, await read(again))
            assert returned.requests[0].prompt == [*PROMPT, *scripted(PROMPT, 4)[0]]
        check_at_rest(found)


async def test_a_turn_that_was_refused_for_its_wait_waits_no_longer_when_it_is_asked_for_again(tmp_path: Path) -> None:
    full: dict[str, Any] = {"fleet": FleetConfig(max_running=1), "queue_timeout_s": 0.1, "placement_timeout_s": 60.0}
    async with ScriptedEngine("e0", hold_at=2) as e0, shell(tmp_path, e0, **full) as found, found.run() as first:
        session = found.session()
        with pytest.raises(OutOfCapacity, match=r"within 0\.1 s"):
            await read(begun(found, session))
        again = await join(found, Call("same", session.session_id, retried=True))
        async with asyncio.timeout(60):
            with pytest.raises(OutOfCapacity, match=r"within 0\.1 s"):
                await read(again or begun(found, session, "t1"))
        e0.go.set()
        check_whole(first, await heard(first))


async def test_a_client_that_left_the_queue_keeps_its_place(tmp_path: Path) -> None:
    config: dict[str, Any] = {"fleet": FleetConfig(max_running=1), "disconnect_grace_s": 60.0}
    async with ScriptedEngine("e0", hold_at=2) as e0, shell(tmp_path, e0, **config) as found, found.run():
        session = found.session()
        run = begun(found, session)
        waiting = asyncio.create_task(read(run))
        await until(lambda: found.fleet.statistics().queued == 1, "a queued turn")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert found.fleet.statistics().queued == 1
        joined = await join(found, Call("same", session.session_id))
        assert joined is run
        again = asyncio.create_task(read(joined))
        e0.go.set()
        check_whole(run, await again)


async def test_siblings_without_a_session_never_merge(tmp_path: Path) -> None:
    """Eight requests of one body, one client gone: the next of them joins that turn; with two gone, none does."""
    async with ScriptedEngine("e0", hold_at=2) as e0, shell(tmp_path, e0, disconnect_grace_s=60.0) as found:
        runs = [begun(found, found.session(ephemeral=True), f"t{i}") for i in range(8)]
        reading = [asyncio.create_task(read(run)) for run in runs]
        await until(lambda: len(e0.requests) == 8, "eight turns")
        assert await join(found, Call("same", None, retried=True)) is None
        reading[3].cancel()
        await until(lambda: found.sessions.counters.turns_orphaned == 1, "an orphan")
        joined = await join(found, Call("same", None))
        assert joined is runs[3]
        async with joined:
            assert await join(found, Call("same", None)) is None
        reading[5].cancel()
        await until(lambda: found.sessions.counters.turns_orphaned == 3, "two orphans")
        assert await join(found, Call("same", None)) is None
        e0.go.set()
        await asyncio.wait(reading)


async def test_a_turn_that_is_over_is_forgotten_after_its_window(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, shell(tmp_path, e0, idempotency_window_s=10.0) as found:
        session = found.session(ephemeral=True)
        run = begun(found, session)
        await read(run)
        over = next(iter(found.sessions.joinable._over.values()))[1]
        assert list(found.sessions.joinable.sweep(over - 0.01)) == []
        assert await join(found, Call("same", None)) is None, "its client is about to have the whole answer"
        run.left()
        assert await join(found, Call("same", None)) is run
        assert list(found.sessions.joinable.sweep(over + 0.01)) == [run]
        assert await join(found, Call("same", None)) is None
        assert not found.sessions.joinable._buckets


async def test_an_abandoned_sessions_turn_cannot_be_joined(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", hold_at=4) as e0, shell(tmp_path, e0) as found:
        session = found.session()
        run = begun(found, session)
        async with run:
            await until(lambda: len(run.record.token_ids) == 4, "four tokens")
            await found.endings.abandon(session.session_id, "no longer wanted")
            with pytest.raises(Conflict, match="abandoned"):
                await read(run)
        assert await join(found, Call("same", session.session_id, retried=True)) is None


async def test_a_turn_that_anybody_may_have_asked_for_stays_so_when_a_marked_retry_joins_it(tmp_path: Path) -> None:
    """A sibling takes up the unread turn, leaves, and comes back marked: it is still nobody's alone."""
    async with ScriptedEngine("e0", hold_at=4) as e0, shell(tmp_path, e0, disconnect_grace_s=60.0) as found:
        session = found.session()
        await leave(begun(found, session), 4)
        sibling = await join(found, Call("same", session.session_id))
        assert sibling is not None
        await leave(sibling, 4)
        again = await join(found, Call("same", session.session_id, retried=True, attempt=1))
        assert again is not None
        async with again:
            first = Call("same", session.session_id, retried=True, attempt=2)
            assert await join(found, first) is None, "nobody knows whose it is"
            e0.go.set()
            check_whole(again, await heard(again))


async def test_two_retries_while_an_orphan_is_given_up_have_one_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the given-up turn takes its time to the disk; both retries wait for it."""
    gate, entered, end = asyncio.Event(), asyncio.Event(), PartialResponsePool.end

    async def held(self: PartialResponsePool, turn_id: TurnId, outcome: Any, num_tokens: int | None = None) -> None:
        entered.set()
        await gate.wait()
        await end(self, turn_id, outcome, num_tokens)

    monkeypatch.setattr(PartialResponsePool, "end", held)
    async with ScriptedEngine("e0", hold_at=4) as e0, shell(tmp_path, e0) as found:
        session = found.session()
        leaving = asyncio.create_task(leave(begun(found, session), 4))
        await entered.wait()  # it is being given up
        e0.hold_at = None
        retries = [
            asyncio.create_task(join(found, Call("same", session.session_id, retried=True, attempt=1)))
            for _ in range(2)
        ]
        await asyncio.sleep(0)
        gate.set()
        first, second = await asyncio.gather(*retries)
        assert first is not None
        assert second is None, "it is another request's, and gets a turn of its own"
        check_whole(first, await read(first))
        await leaving
        assert len(e0.requests) == 2
        assert await found.outcome(first) == (*scripted(PROMPT, BUDGET), [("e0", 0, 4), ("e0", 4, BUDGET)])


async def test_a_retry_of_a_sibling_that_was_refused_gets_a_turn_of_its_own(tmp_path: Path) -> None:
    """Four equal requests of a session at once, and one place: each gets its own answer in the end."""
    config: dict[str, Any] = {"fleet": FleetConfig(max_running=1), "queue_max": 0}
    async with ScriptedEngine("e0", hold_at=2) as e0, shell(tmp_path, e0, **config) as found:
        session = found.session()
        first = begun(found, session)
        async with first:
            await until(lambda: e0.requests, "the one that runs")
            for number in range(1, 4):
                with pytest.raises(OutOfCapacity):
                    await read(begun(found, session, f"t{number}"))
            e0.go.set()
            check_whole(first, await heard(first))
        first.delivered()
        answers = []
        for _ in range(3):
            again = await join(found, Call("same", session.session_id, retried=True, attempt=1))
            assert again is not None
            answers.append(again)
            check_whole(again, await read(again))
            again.delivered()
        assert len({run.request.turn_id for run in (first, *answers)}) == 4
        assert session.turns == 4


async def test_a_retry_of_what_was_refused_before_it_had_a_turn_joins_no_sibling(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", hold_at=2) as e0, shell(tmp_path, e0) as found:
        session = found.session()
        async with begun(found, session):
            found.sessions.refused(Call("same", session.session_id))
            retry = Call("same", session.session_id, retried=True, attempt=1)
            assert await join(found, retry) is None
            assert await join(found, retry) is not None, "the next may be the first one's own"
            assert await join(found, retry) is None, "which has been here"
            assert await join(found, Call("same", session.session_id, retried=True, attempt=2)) is not None


async def test_the_first_choice_of_a_call_without_a_session_stays_while_the_second_runs(tmp_path: Path) -> None:
    config: dict[str, Any] = {"idempotency_window_s": 10.0, "disconnect_grace_s": 60.0}
    async with ScriptedEngine("e0", hold_at=4) as e0, shell(tmp_path, e0, **config) as found:
        session = found.session(ephemeral=True)
        origin = TurnOrigin("same", unnamed=True)
        first, second = (
            found.sessions.start(
                TurnRequest(
                    choice_id(TurnId("t"), choice),
                    session.session_id,
                    0,
                    PROMPT,
                    SamplingParams(max_tokens=budget),
                    choice=choice,
                    origin=origin,
                )
            )
            for choice, budget in ((0, 2), (1, BUDGET))
        )
        async with second:
            await read(first)
            over = next(iter(found.sessions.joinable._over.values()))[1]
            assert list(found.sessions.joinable.sweep(over + 1.0)) == []
            await found.sessions.sweep()
            e0.go.set()
            check_whole(second, await heard(second))
        for run in (first, second):
            run.left()
        assert await found.sessions.join(Call("same", None), 2) == [first, second]
        last = max(until for _, until in found.sessions.joinable._over.values())
        assert list(found.sessions.joinable.sweep(last + 0.01)) == [first, second]
        assert not found.sessions.joinable._buckets


async def test_who_leaves_unread_makes_no_turn_unread_that_another_is_about_to_have(tmp_path: Path) -> None:
    """Its first connection is given up late, while its retry has read all and its answer is on the way."""
    async with ScriptedEngine("e0", hold_at=4) as e0, shell(tmp_path, e0, disconnect_grace_s=60.0) as found:
        session = found.session()
        run = begun(found, session)
        async with run:
            joined = await join(found, Call("same", session.session_id, retried=True, attempt=1))
            assert joined is run
            async with run:
                e0.go.set()
                await heard(run)  # by the one of the two that reads
        first, retry = (asked_of(run, read=read) for read in (False, True))
        first.left()
        assert await join(found, Call("same", session.session_id)) is None, "a sibling: the retry is about to have it"
        retry.left()
        assert await join(found, Call("same", session.session_id)) is run
