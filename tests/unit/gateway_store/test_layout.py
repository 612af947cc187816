"""The layout of the gateway's file: counted, brought up to date, or refused with what to do."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
from pathlib import Path

import msgspec
import pytest

from gateway.core.sessions import SessionSpec
from gateway.core.types import GroupId, SamplingParams, SessionId, TurnId, TurnRequest
from gateway.experience import ExperienceBuffer
from gateway.store import Database, PartialResponsePool
from gateway.store.layout import LAYOUT, claim
from gateway.store.sessions import SessionStore
from protos.errors import Conflict, Unavailable
from tests.unit.gateway_store.test_experience import trajectory

UNCOUNTED = """
CREATE TABLE sessions(
    session_id TEXT PRIMARY KEY, spec BLOB NOT NULL, api_key TEXT NOT NULL, created_unix_s REAL NOT NULL);
CREATE TABLE trajectories(
    seq INTEGER PRIMARY KEY, session_id TEXT NOT NULL UNIQUE, group_id TEXT NOT NULL,
    oldest_version INTEGER NOT NULL, body BLOB NOT NULL, lease_id TEXT);
CREATE TRIGGER finished AFTER INSERT ON trajectories BEGIN
    DELETE FROM sessions WHERE session_id = NEW.session_id;
END;
"""


def layout(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])


async def test_a_new_file_is_counted_and_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sqlite"
    for _ in range(2):
        async with Database(path):
            pass
        assert layout(path) == LAYOUT


async def test_a_file_from_before_layouts_were_counted_is_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as old, old:
        old.executescript(UNCOUNTED)
    async with Database(path) as database:
        buffer, store = ExperienceBuffer(database), SessionStore(database)
        await buffer.open()
        await store.open()
        store.add(SessionSpec(SessionId("s"), GroupId("g")), "key", 1.0)
        assert [kept.api_key for _, kept in await store.load() if kept is not None] == ["key"]
        await buffer.add(trajectory("s"))
        assert await store.load() == []
        assert [name for name, _ in await store.ended()] == ["s"], "the new trigger stands in the old one's place"
    assert layout(path) == LAYOUT


TURNS_4 = """
CREATE TABLE turns(
    turn_id TEXT PRIMARY KEY, session_id TEXT NOT NULL, request BLOB NOT NULL, begun_unix_s REAL NOT NULL,
    outcome TEXT, num_tokens INTEGER, ended_unix_s REAL, end_number INTEGER);
PRAGMA user_version = 4;
"""


async def test_whole_prompts_of_layout_4_are_read_beside_those_that_inherit(tmp_path: Path) -> None:
    path, session_id = tmp_path / "gateway.sqlite", SessionId("s")
    old = TurnRequest(TurnId("old"), session_id, 0, (1, 2), SamplingParams(max_tokens=8))
    new = dataclasses.replace(old, turn_id=TurnId("new"), prompt_ids=(1, 2, 3), parent=old.turn_id)
    with contextlib.closing(sqlite3.connect(path)) as before, before:
        before.executescript(TURNS_4)
        row = ("old", "s", msgspec.msgpack.encode(old), 1.0, "stop", 0, 2.0, 1)
        before.execute("INSERT INTO turns VALUES (?,?,?,?,?,?,?,?)", row)
    async with Database(path) as database:
        pool = PartialResponsePool(database)
        await pool.open()
        pool.begin(new, 2)
        await pool.flush()
        assert [kept.record.request for kept in await pool.kept_turns(session_id)] == [old, new]
        await pool.close()
    assert layout(path) == LAYOUT


LAYOUT_5 = """
CREATE TABLE trajectories(
    seq INTEGER PRIMARY KEY, session_id TEXT NOT NULL UNIQUE, group_id TEXT NOT NULL,
    oldest_version INTEGER NOT NULL, body BLOB NOT NULL, lease_id TEXT);
CREATE TABLE closed_groups(group_id TEXT PRIMARY KEY, members INTEGER NOT NULL);
CREATE TABLE leases(lease_id TEXT PRIMARY KEY, reader TEXT NOT NULL, until_unix_s REAL NOT NULL);
CREATE TABLE ended(number INTEGER PRIMARY KEY, session_id TEXT NOT NULL UNIQUE, body BLOB);
CREATE TRIGGER finished AFTER INSERT ON trajectories BEGIN
    INSERT OR REPLACE INTO ended(session_id) VALUES (NEW.session_id);
END;
INSERT INTO leases VALUES ('held', 'trainer', 4e9);
PRAGMA user_version = 5;
"""


async def test_trajectories_of_layout_5_are_packed_with_their_leases_and_a_damaged_one_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "gateway.sqlite"
    leaves = [[trajectory("a", version=3)], [trajectory("b"), trajectory("b", version=7)]]
    with contextlib.closing(sqlite3.connect(path)) as before, before:
        before.executescript(LAYOUT_5)
        for seq, (found, lease) in enumerate(zip(leaves, (None, "held"), strict=True), 1):
            row = (seq, found[0].session_id, "g", 1, msgspec.msgpack.encode(found), lease)
            before.execute("INSERT INTO trajectories VALUES (?,?,?,?,?,?)", row)
        before.execute("INSERT INTO trajectories VALUES (3, 'c', 'g', 1, x'c1', NULL)")
        before.execute("DELETE FROM ended")
    async with Database(path) as database:
        buffer, store = ExperienceBuffer(database), SessionStore(database)
        await buffer.open()
        await store.open()
        assert await store.ended() == [], "moving them ended no session"
        assert (buffer.statistics().trajectories, buffer.statistics().leased) == (1, 1)
        assert (await buffer.sample("t", trainer_version=7, trajectories=9)).trajectories() == leaves[0]
        await buffer.release("held")
        sampled = await buffer.sample("t", trainer_version=7, trajectories=9)
        assert sampled.trajectories() == leaves[1]
        assert sampled.entries[0].facts.versions == {1: 1, 2: 1, 7: 1, 8: 1}
        await buffer.add(trajectory("d"))
        [(body,)] = await database.run(lambda c: c.execute("SELECT body FROM trajectory_bodies WHERE seq=3").fetchall())
        assert body == b"\xc1", "a repaired file, or a newer gateway, may still read it"
        assert [name for name, _ in await store.ended()] == ["d"], "the trigger stands again"
    assert "row 3 of table trajectories is damaged" in caplog.text
    assert layout(path) == LAYOUT


async def test_a_newer_file_is_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as newer, newer:
        newer.execute(f"PRAGMA user_version = {LAYOUT + 1}")
    with pytest.raises(Conflict, match=rf"its layout is {LAYOUT + 1}, and this one knows {LAYOUT}.*--data"):
        await Database(path).open()
    assert layout(path) == LAYOUT + 1


async def test_an_older_file_that_cannot_be_read_is_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as old, old:
        old.execute("CREATE TABLE trajectories(seq INTEGER, body BLOB)")
    with pytest.raises(Conflict, match=r"too old to read: its table trajectories has body, seq.*--data"):
        await Database(path).open()
    assert layout(path) == 0


async def test_a_file_is_of_one_model_and_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sqlite"
    for _ in range(2):  # made, and opened again
        async with Database(path) as database:
            await database.run(lambda opened: claim(opened, "data", "policy", "words"))
    async with Database(path) as database:
        with pytest.raises(Conflict, match=r"data keeps the turns of model 'policy', not of 'other' .serve --model"):
            await database.run(lambda opened: claim(opened, "data", "other", "words"))
        with pytest.raises(Conflict, match=r"data keeps token ids of another vocabulary \(give the --tokenizer that"):
            await database.run(lambda opened: claim(opened, "data", "policy", "other words"))
        await database.run(lambda opened: claim(opened, "data", "policy", "words"))


async def test_a_file_has_one_gateway(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sqlite"
    async with Database(path) as first:
        with pytest.raises(Conflict, match=r"gateway\.sqlite is in use by another gateway \(stop that one, or give"):
            await Database(path).open()
        assert await first.run(lambda opened: opened.execute("SELECT 1").fetchone()) == (1,)
    async with Database(path):
        pass


async def test_a_file_that_could_not_be_opened_is_free_again(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sqlite"
    path.write_text("no database at all")
    with pytest.raises(Unavailable, match=r"file is not a database \(give a --data directory that can be written"):
        await Database(path).open()
    path.unlink()
    async with Database(path):
        pass
