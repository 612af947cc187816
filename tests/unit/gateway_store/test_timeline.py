"""The timeline: numbering over restarts, paging, bounds."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

from gateway.store import Database, Timeline


async def test_paging_misses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    async with Database(tmp_path / "db") as database:
        timeline = Timeline(database)
        await timeline.open()
        for index in range(25):
            timeline.add("engine", engine=f"e{index}", state="serving")
        seen, after = [], 0
        while (page := timeline.read(after, 10))[1]:
            after = page[0]
            seen += [event.fields["engine"] for event in page[1]]
        assert seen == [f"e{index}" for index in range(25)]
        assert timeline.read(after, 10) == (25, [])
        assert timeline.read(0, 1)[1][0].flat().keys() == {"seq", "t_unix_s", "kind", "engine", "state"}
        await timeline.close()


async def test_numbers_go_on_after_a_restart_and_old_events_go(tmp_path: Path) -> None:
    async with Database(tmp_path / "db") as database:
        timeline = Timeline(database, capacity=10, flush_interval_s=0.001)
        await timeline.open()
        for index in range(30):
            timeline.add("turn", index=index)
        await timeline.close()
    async with Database(tmp_path / "db") as database:
        timeline = Timeline(database, capacity=10)
        await timeline.open()
        assert timeline.add("turn", index=30) == 31
        assert [event.seq for event in timeline.read(0, 100)[1]] == list(range(22, 32))
        await timeline.close()


async def test_an_empty_timeline_answers(tmp_path: Path) -> None:
    async with Database(None) as database:
        timeline = Timeline(database)
        await timeline.open()
        assert timeline.read(7, 10) == (7, [])
        await timeline.close()


async def test_the_newest_events_come_in_order_and_no_more_than_wanted(tmp_path: Path) -> None:
    async with Database(tmp_path / "db") as database:
        timeline = Timeline(database)
        await timeline.open()
        assert timeline.newest(0, 10) == []
        for index in range(25):
            timeline.add("engine", index=index)
        assert [event.seq for event in timeline.newest(22, 10)] == [23, 24, 25]
        assert [event.seq for event in timeline.newest(0, 4)] == [22, 23, 24, 25]
        assert timeline.newest(25, 10) == []
        await timeline.close()


async def test_damaged_rows_cost_their_own_events_alone(tmp_path: Path) -> None:
    async with Database(tmp_path / "db") as database:
        timeline = Timeline(database)
        await timeline.open()
        for index in range(10):
            timeline.add("engine", index=index)
        await timeline.close()
        await database.run(lambda opened: opened.execute("DELETE FROM timeline WHERE seq IN (1, 4)"))
        await database.run(lambda opened: opened.execute("UPDATE timeline SET event = x'c1' WHERE seq IN (6, 7, 10)"))
    async with Database(tmp_path / "db") as database:
        timeline = Timeline(database)
        await timeline.open()
        assert timeline.add("engine", index=10) == 11
        await timeline.flush()
        whole = [2, 3, 5, 8, 9, 11]
        seen, after = [], 0
        while (page := timeline.read(after, 2))[1]:
            after = page[0]
            seen += [event.seq for event in page[1]]
        assert seen == [event.seq for event in timeline.newest(0, 100)] == whole
        assert [event.seq for event in timeline.newest(7, 100)] == [8, 9, 11]
        rows = await database.run(lambda opened: opened.execute("SELECT max(seq) FROM timeline").fetchone())
        assert rows == (11,), "the event after a damaged last row is written, too"
        await timeline.close()


async def test_events_are_small_in_memory() -> None:
    """The kind that each turn adds, with names as long as a trainer's."""
    async with Database(None) as database:
        timeline = Timeline(database)
        await timeline.open()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for index in range(2000):
                name = f"run-7/session-{index:08}"
                timeline.add("segment", session_id=name, group_id=name[:-2], turn=3, engine="engine-1", version=index)
            await timeline.flush()
            await database.run(lambda opened: None)  # its thread holds the rows of its last operation
            taken = (tracemalloc.get_traced_memory()[0] - before) / 2000
        finally:
            tracemalloc.stop()
        assert len(timeline.read(0, 2000)[1]) == 2000
        assert taken < 400, f"{taken:.0f} bytes for an event"
        await timeline.close()
