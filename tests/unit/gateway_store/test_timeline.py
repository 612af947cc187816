"""The timeline: numbering over restarts, paging, bounds."""

from __future__ import annotations

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
