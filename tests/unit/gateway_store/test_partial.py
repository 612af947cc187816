"""The partial-response pool: order, durability within its bound, and what a killed process leaves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.types import SamplingParams, SessionId, TopLogprob, TurnId, TurnRequest
from gateway.experience import ExperienceBuffer
from gateway.store import Database, PartialResponsePool, partial_rows
from gateway.store import partial as partial_module
from gateway.store.sessions import SessionStore
from protos.decoding import decode_msgpack
from protos.errors import Corrupt, LaminarError, NotFound, Unavailable
from protos.trajectories import Segment
from tests.unit.gateway_store.disk import Disk, until


def request(turn: str, session: str = "s1", index: int = 0) -> TurnRequest:
    sampling = SamplingParams(max_tokens=8, stop=("\n",), seed=3)
    return TurnRequest(TurnId(turn), SessionId(session), index, (1, 2, 3), sampling)


def segment(start: int, engine: str = "e0", cause: str = "start") -> Segment:
    return Segment(
        turn=0,
        engine=engine,
        incarnation="i",
        version=4,
        start=start,
        end=start,
        cause=cause,  # type: ignore[arg-type]
        started_unix_s=1.0,
        ended_unix_s=1.0,
    )


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[PartialResponsePool]:
    async with Database(tmp_path / "gateway.sqlite") as database:
        pool = PartialResponsePool(database, flush_interval_s=0.01)
        await pool.open()
        yield pool
        await pool.close()


async def test_a_turn_is_read_back_as_it_was_appended(pool: PartialResponsePool) -> None:
    pool.begin(request("t1"))
    pool.open_segment(TurnId("t1"), segment(0))
    pool.append(TurnId("t1"), [10, 11], [-0.1, -0.2])
    await pool.flush()
    pool.append(TurnId("t1"), [12], [-0.3])
    pool.open_segment(TurnId("t1"), segment(3, "e1", "cut"))
    pool.append(TurnId("t1"), [13], [-0.123456789012345])
    [record] = await pool.in_flight()
    assert record.request == request("t1")
    assert record.token_ids == [10, 11, 12, 13]
    assert record.logprobs == [-0.1, -0.2, -0.3, -0.123456789012345]
    assert [(s.engine, s.start, s.end) for s in record.segments] == [("e0", 0, 3), ("e1", 3, 4)]
    assert record.finish_reason is None


async def test_appends_reach_the_disk_by_themselves(pool: PartialResponsePool) -> None:
    pool.begin(request("t1"))
    for token in range(50):
        pool.append(TurnId("t1"), [token], [0.0])
    assert pool.statistics().buffered_tokens == 50
    async with asyncio.timeout(60):
        while not pool.statistics().flushes:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    assert pool.statistics().buffered_tokens == 0
    assert pool.statistics().flushes == 1  # fifty appends, one transaction


async def test_an_ended_turn_is_not_in_flight_and_stays_until_its_session_goes(pool: PartialResponsePool) -> None:
    pool.begin(request("t1"))
    pool.append(TurnId("t1"), [10], [-1.0])
    await pool.end(TurnId("t1"), "stop")
    pool.begin(request("t2", index=1))
    pool.begin(request("other", session="s2"))
    assert [r.request.turn_id for r in await pool.in_flight()] == ["t2", "other"]
    [first, second] = await pool.kept_turns(SessionId("s1"))
    assert (first.record.token_ids, first.record.finish_reason, second.outcome) == ([10], "stop", None)
    await pool.forget_sessions([SessionId("s1")])
    assert await pool.kept_turns(SessionId("s1")) == []
    assert [r.request.turn_id for r in await pool.in_flight()] == ["other"]
    with pytest.raises(NotFound, match="t2"):
        pool.append(TurnId("t2"), [1], [0.0])


async def turns_of_a_session(pool: PartialResponsePool) -> list[TurnRequest]:
    """A root and its answer, a turn that goes on from them and ended, and one in flight that goes on from that."""
    root = request("root")
    child = dataclasses.replace(request("child", index=1), prompt_ids=(1, 2, 3, 10, 4), parent=root.turn_id)
    last = dataclasses.replace(request("last", index=2), prompt_ids=(*child.prompt_ids, 11, 12), parent=child.turn_id)
    for asked, num_inherited, said in ((root, 0, [10]), (child, 4, [11])):
        pool.begin(asked, num_inherited)
        pool.append(asked.turn_id, said, [0.0])
        await pool.end(asked.turn_id, "stop", 1)
    pool.begin(last, 6)
    await pool.flush()
    return [root, child, last]


async def test_a_prompt_is_whole_again_though_its_row_has_only_what_it_adds(pool: PartialResponsePool) -> None:
    asked = await turns_of_a_session(pool)
    assert [kept.record.request for kept in await pool.kept_turns(SessionId("s1"))] == asked
    assert [record.request for record in await pool.in_flight()] == asked[2:]
    [added] = await pool._database.run(
        lambda connection: connection.execute("SELECT request FROM turns WHERE turn_id='last'").fetchone()
    )
    assert decode_msgpack(added, TurnRequest).prompt_ids == (12,)


async def test_a_prompt_whose_parent_lacks_ids_is_not_taken_for_whole(pool: PartialResponsePool) -> None:
    await turns_of_a_session(pool)
    await pool.shorten(TurnId("child"), 0)
    with pytest.raises(Corrupt, match="turn last lacks 1 of the 6 ids that it shares with child"):
        await pool.kept_turns(SessionId("s1"))


async def open_sessions(database: Database) -> None:
    """Whose table turns' messages are in."""
    await ExperienceBuffer(database).open()
    await SessionStore(database).open()


async def test_the_end_of_a_turn_and_what_its_reader_says_of_it_are_one_commit(
    pool: PartialResponsePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await open_sessions(pool._database)
    written: list[tuple[int, int]] = []
    write = partial_rows.write

    def writing(connection: sqlite3.Connection, taken: partial_rows.Unwritten) -> None:
        written.append((len(taken.ended), len(taken.messages)))
        write(connection, taken)

    monkeypatch.setattr(partial_rows, "write", writing)
    pool.begin(request("t1"))
    finish = asyncio.get_running_loop().create_future()

    async def read() -> None:
        await finish
        await pool.note_messages(SessionId("s1"), TurnId("t1"), {"role": "head"}, [{"role": "assistant"}])

    reading = asyncio.create_task(read())
    await asyncio.sleep(0)
    finish.set_result(None)
    await asyncio.gather(pool.end(TurnId("t1"), "stop", 0), reading)
    assert written == [(1, 1)]
    told = "SELECT count(*) FROM turn_messages"
    assert await pool._database.run(lambda connection: connection.execute(told).fetchone()) == (1,)


async def test_what_is_said_of_a_forgotten_turn_is_not_kept(pool: PartialResponsePool) -> None:
    await open_sessions(pool._database)
    pool.begin(request("t1"))
    await pool.end(TurnId("t1"), "stop", 0)
    await pool.forget_sessions([SessionId("s1")])
    await pool.note_messages(SessionId("s1"), TurnId("t1"), {}, [])
    told = "SELECT count(*) FROM turn_messages"
    assert await pool._database.run(lambda connection: connection.execute(told).fetchone()) == (0,)


async def test_one_who_waits_for_a_write_and_leaves_disturbs_nobody(pool: PartialResponsePool) -> None:
    pool.begin(request("t1"))
    pool.append(TurnId("t1"), [1], [0.0])
    leaving = asyncio.create_task(pool.flush())
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait_for(pool.flush(), 60)
    assert pool.statistics().buffered_tokens == 0
    assert [record.token_ids for record in await pool.in_flight()] == [[1]]


async def test_an_unknown_or_ended_turn_is_refused(pool: PartialResponsePool) -> None:
    with pytest.raises(NotFound, match="nobody"):
        pool.append(TurnId("nobody"), [1], [0.0])
    pool.begin(request("t1"))
    await pool.end(TurnId("t1"), "aborted")
    with pytest.raises(NotFound, match="t1"):
        await pool.end(TurnId("t1"), "stop")


async def test_drain_holds_the_appender_back_while_the_disk_lags(
    pool: PartialResponsePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_module, "BUFFERED_TOKENS_MAX", 10)
    pool.begin(request("t1"))
    pool.append(TurnId("t1"), list(range(10)), [0.0] * 10)
    await asyncio.wait_for(pool.drain(), 60)
    pool.append(TurnId("t1"), [10], [0.0])
    held = asyncio.create_task(pool.drain())
    await asyncio.sleep(0)
    assert not held.done()
    await asyncio.wait_for(held, 60)  # released by the regular flush
    assert pool.statistics().buffered_tokens == 0


async def test_alternatives_count_in_what_waits_for_the_disk(
    pool: PartialResponsePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_module, "BUFFERED_TOKENS_MAX", 100)
    pool.begin(request("t1"))
    pool.append(TurnId("t1"), [1], [0.0], [(TopLogprob(5, -1.0),) * 10])
    assert not pool.full
    pool.append(TurnId("t1"), [1], [0.0], [(TopLogprob(5, -1.0),)])
    assert (pool.full, pool.statistics().buffered_tokens) == (True, 2)
    await asyncio.wait_for(pool.drain(), 60)
    assert not pool.full


async def test_a_full_disk_lets_no_turn_begin_and_keeps_what_is_said_until_it_has_room(tmp_path: Path) -> None:
    async with Database(tmp_path / "gateway.sqlite") as database:
        pool = PartialResponsePool(database, flush_interval_s=0.01)
        await pool.open()
        disk = Disk()
        await disk.make(database)
        pool.begin(request("t1"))
        await pool.flush()
        disk.full = True
        owed = asyncio.create_task(database.owe(disk.write))
        await until(lambda: database.failure, "the failure")
        with pytest.raises(Unavailable, match="full"):
            pool.begin(request("t2"))
        pool.append(TurnId("t1"), list(range(100)), [0.0] * 100)
        ending = asyncio.create_task(pool.end(TurnId("t1"), "stop", 100))
        await asyncio.wait([ending], timeout=0.1)
        assert not ending.done(), "the end is not told before it is on disk"
        disk.full = False
        await asyncio.wait_for(asyncio.gather(owed, ending), 60)
        [kept] = await pool.kept_turns(SessionId("s1"))
        assert (kept.record.token_ids, kept.outcome) == (list(range(100)), "stop")
        pool.begin(request("t2"))
        await pool.end(TurnId("t2"), "aborted")
        await pool.close()


async def test_what_cannot_be_written_of_one_turn_costs_that_turn_alone(pool: PartialResponsePool) -> None:
    pool.begin(request("good"))
    pool.begin(request("bad"))
    await pool.flush()
    with pytest.raises(OverflowError):
        pool.append(TurnId("bad"), [2**63], [0.0])
    pool.append(TurnId("bad"), [1], [0.0], [(TopLogprob(2**70, -1.0),)])
    pool.append(TurnId("good"), [1], [0.0])
    await pool.flush()
    with pytest.raises(LaminarError, match="OverflowError"):
        pool.append(TurnId("bad"), [2], [0.0])
    pool.append(TurnId("good"), [2], [0.0])
    with pytest.raises(LaminarError, match="OverflowError"):
        await pool.end(TurnId("bad"), "lost")
    await pool.end(TurnId("good"), "stop", 2)
    [bad, good] = sorted(await pool.kept_turns(SessionId("s1")), key=lambda t: t.record.request.turn_id)
    assert (good.record.token_ids, good.outcome) == ([1, 2], "stop")
    assert (bad.record.token_ids, bad.outcome) == ([], "lost")


async def test_a_damaged_row_is_named(pool: PartialResponsePool) -> None:
    for turn in ("t1", "t2"):
        pool.begin(request(turn, session=f"of-{turn}"))
        pool.append(TurnId(turn), [1, 2], [0.0, 0.0])
        await pool.end(TurnId(turn), "stop", 2)
    await pool._database.run(
        lambda connection: connection.execute("UPDATE turns SET request=x'c1' WHERE turn_id='t1'") and None
    )
    with pytest.raises(Corrupt, match="row 't1' of table turns is damaged"):
        await pool.kept_turns(SessionId("of-t1"))
    [kept] = await pool.kept_turns(SessionId("of-t2"))
    assert kept.record.token_ids == [1, 2]


async def test_a_turn_that_lacks_tokens_is_not_taken_for_whole(
    pool: PartialResponsePool, caplog: pytest.LogCaptureFixture
) -> None:
    pool.begin(request("ended"))
    pool.begin(request("goes-on", session="s2"))
    for turn in ("ended", "goes-on"):
        pool.append(TurnId(turn), [1], [0.0])
    await pool.flush()
    for turn in ("ended", "goes-on"):
        pool.append(TurnId(turn), [2], [0.0])
    await pool.end(TurnId("ended"), "stop", 2)
    await pool._database.run(
        lambda connection: connection.execute("UPDATE turn_journal SET parts=x'c1' WHERE flush=2") and None
    )
    with pytest.raises(Corrupt, match="turn ended lacks 1 of its 2 tokens"):
        await pool.kept_turns(SessionId("s1"))
    assert "row 2 of table turn_journal is damaged" in caplog.text
    [kept] = await pool.kept_turns(SessionId("s2"))
    assert kept.record.token_ids == [1], "in flight it goes on from what is sure"


async def test_turns_come_back_in_the_order_in_which_they_ended_whatever_the_clock_said(
    pool: PartialResponsePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, now in enumerate((5000.0, 100.0, 7000.0)):
        monkeypatch.setattr("time.time", lambda now=now: now)
        pool.begin(request(f"t{number}"))
        await pool.end(TurnId(f"t{number}"), "stop", 0)
    kept = await pool.kept_turns(SessionId("s1"))
    assert [k.record.request.turn_id for k in kept] == ["t0", "t1", "t2"]


@given(
    said=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3), st.booleans()), max_size=25),
    folds_at=st.integers(0, 12),
)
async def test_tokens_of_many_turns_come_back_to_each_whenever_the_journal_is_folded(
    said: list[tuple[str, int, bool]], folds_at: int
) -> None:
    async with Database(None) as database:
        pool = PartialResponsePool(database)
        await pool.open()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(partial_rows, "JOURNAL_TOKENS_MAX", folds_at)
            appended: dict[str, list[int]] = {}
            for number, (turn, tokens, flushes) in enumerate(said):
                if turn not in appended:
                    pool.begin(request(turn))
                    appended[turn] = []
                ids = [number * 10 + i for i in range(tokens)]
                pool.append(TurnId(turn), ids, [-float(i) for i in ids], [(TopLogprob(i, -1.0),) for i in ids])
                appended[turn] += ids
                if flushes:
                    await pool.flush()
            kept = await pool.in_flight()
        assert {r.request.turn_id: r.token_ids for r in kept} == appended
        assert [r.logprobs for r in kept] == [[-float(i) for i in r.token_ids] for r in kept]
        assert all([top[0].token_id for top in r.top_logprobs] == r.token_ids for r in kept)
        await pool.forget_sessions([SessionId("s1")])
        pool.begin(request("later"))
        pool.append(TurnId("later"), [1], [0.0])
        assert [r.token_ids for r in await pool.in_flight()] == [[1]], "nothing of what was forgotten is left"
        await pool.close()


async def test_a_flush_writes_one_row_of_tokens_however_many_turns_it_has(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sqlite"
    async with Database(path) as database:
        pool = PartialResponsePool(database, flush_interval_s=60.0)
        await pool.open()
        for turn in range(50):
            pool.begin(request(f"t{turn}"))
            pool.append(TurnId(f"t{turn}"), [turn], [0.0])
        await pool.flush()
        count = "SELECT (SELECT count(*) FROM turn_journal), (SELECT count(*) FROM turn_parts)"
        assert await database.run(lambda connection: connection.execute(count).fetchone()) == (1, 0)
        assert len(await pool.in_flight()) == 50
        assert await database.run(lambda connection: connection.execute(count).fetchone()) == (0, 50)
        await pool.close()


CHILD = textwrap.dedent(
    """
    import asyncio, sys
    from pathlib import Path
    from gateway.core.types import SamplingParams, SessionId, TurnId, TurnRequest
    from gateway.store import Database, PartialResponsePool

    async def main() -> None:
        database = Database(Path(sys.argv[1]))
        await database.open()
        pool = PartialResponsePool(database, flush_interval_s=0.005)
        await pool.open()
        pool.begin(TurnRequest(TurnId("t"), SessionId("s"), 0, (1,), SamplingParams(max_tokens=8)))
        for token in range(10**9):
            pool.append(TurnId("t"), [token], [float(token)])
            if token % 100 == 0:
                await pool.flush()
                print(token, flush=True)
            await asyncio.sleep(0)

    asyncio.run(main())
    """
)


def test_what_was_flushed_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sqlite"
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    promised = max(int(child.stdout.readline()) for _ in range(20))
    os.kill(child.pid, signal.SIGKILL)
    promised = max([promised, *(int(line) for line in child.stdout.read().splitlines() if line.endswith("00"))])
    child.stdout.close()
    assert child.wait() == -signal.SIGKILL
    asyncio.run(_check_what_is_left(path, promised))
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


async def _check_what_is_left(path: Path, promised: int) -> None:
    async with Database(path) as database:
        pool = PartialResponsePool(database)
        await pool.open()
        [record] = await pool.in_flight()
        assert len(record.token_ids) > promised
        assert record.token_ids == list(range(len(record.token_ids)))  # each once, in order, none torn
        assert record.logprobs == [float(token) for token in record.token_ids]
        pool.append(TurnId("t"), [7], [7.0])  # and the turn goes on where it was
        await pool.end(TurnId("t"), "length")
        await pool.close()
