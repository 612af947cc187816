"""`gateway top`: a gateway in a terminal, once and as it goes on."""

from __future__ import annotations

import asyncio
import dataclasses
import io
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from gateway.app import start
from gateway.cli import cli
from gateway.operate import top
from gateway.operate.feed_reader import Seen, frames
from gateway.operate.status_view import engines_table
from protos.errors import LaminarError
from tests.support.keys import controlled, key_of
from tests.support.scripted_engine import ScriptedEngine, until
from tests.unit.gateway_api.test_status import complete, config, gateway


async def test_once_it_prints_the_gateway_as_it_is(tmp_path: Path) -> None:
    gone = ScriptedEngine("gone", url="http://127.0.0.1:9")
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0, gone) as (found, http):
        await complete(http)
        for name in ("s", "ended"):
            async with http.post("/sessions", json={"session_id": name}) as made:
                assert made.status == 200
        await complete(http, "/sessions/ended/v1/completions")
        async with http.post("/sessions/ended/finish", json={"reward": 0.5}) as ended:
            assert ended.status == 200
        told = await asyncio.to_thread(CliRunner().invoke, cli, ["top", "--url", found.url, "--once"])
    assert told.exit_code == 0, told.output
    lines = told.output.splitlines()
    assert lines[0].startswith("Laminar policy, mode repack, version 0 (the trainer's 0), ")
    assert "sessions 1, turns on engines 0, waiting 0" in told.output
    assert any(line.startswith("tool") and line.endswith(" 1") for line in lines)
    assert "reward 0.500 on the mean of the last 1 sessions, 0.500 of the first 1" in lines
    assert any(line.startswith("v0") and line.endswith("1 engines, 0 turns") for line in lines), "none that is gone"
    assert any(line.startswith("! gone") and "127.0.0.1:9" in line for line in lines)
    assert any("engine e0 serving" in line for line in lines), "its events"


async def test_a_session_that_nobody_uses_is_idle_and_lost_work_is_counted(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0, idle_after_s=0.0, experience_max=1) as (found, http):
        for name in ("a", "b", "left"):
            async with http.post("/sessions", json={"session_id": name}) as made:
                assert made.status == 200
            await complete(http, f"/sessions/{name}/v1/completions")
            if name != "left":
                async with http.post(f"/sessions/{name}/finish", json={"reward": 0.5}) as ended:
                    assert ended.status == 200
        told = await asyncio.to_thread(CliRunner().invoke, cli, ["top", "--url", found.url, "--once"])
    assert "buffer 1, leased 0; evicted unused: 1 for room" in told.output
    assert any(line.startswith("idle") and line.endswith(" 1") for line in told.output.splitlines())


async def test_without_a_terminal_or_a_gateway_it_says_so(tmp_path: Path) -> None:
    told = await asyncio.to_thread(CliRunner().invoke, cli, ["top"])
    assert told.exit_code == 1
    assert "add --once" in told.output
    nobody = await asyncio.to_thread(CliRunner().invoke, cli, ["top", "--once", "--url", "http://127.0.0.1:9"])
    assert nobody.exit_code == 1
    assert "no gateway answers at http://127.0.0.1:9: Connection refused (" in nobody.output
    wrong = await asyncio.to_thread(CliRunner().invoke, cli, ["top", "--once", "--url", "here"])
    assert "is no gateway's address" in wrong.output
    async with ScriptedEngine("e0") as e0:
        engine = await asyncio.to_thread(CliRunner().invoke, cli, ["top", "--once", "--url", e0.url])
    assert "has no feed: 404" in engine.output


async def test_it_needs_a_readers_key_where_the_gateway_has_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedEngine("e0") as e0, controlled(tmp_path, e0) as (found, _):
        for who, expected in (("", "LAMINAR_API_KEY"), ("alice", "role agent"), ("reader", "Laminar policy")):
            monkeypatch.setenv("LAMINAR_API_KEY", key_of(who) if who else "")
            told = await asyncio.to_thread(CliRunner().invoke, cli, ["top", "--once", "--url", found.url])
            assert expected in told.output
            assert (told.exit_code == 0) == (who == "reader")


async def test_it_goes_on_over_a_restart_of_the_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    monkeypatch.setattr(top, "RETRY_S", (0.0,))
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=140, height=50)
    async with ScriptedEngine("e0") as e0:
        settings = dataclasses.replace(config(tmp_path, e0), port=port)
        first = await start(settings)
        watching = asyncio.create_task(top.follow(first.url, console))
        await until(lambda: "Laminar" in screen.getvalue(), "the first picture")
        await first.close(drain_timeout_s=0.0)
        await until(lambda: "no connection" in screen.getvalue(), "notice of the end")
        second = await start(settings)
        await until(lambda: "restarted while watched: 1" in screen.getvalue(), "the next life")
        watching.cancel()
        await asyncio.wait([watching])
        await second.close(drain_timeout_s=0.0)


async def test_a_first_connection_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LaminarError, match="no gateway answers"):
        await top.follow("http://127.0.0.1:9", Console(file=io.StringIO(), force_terminal=True))


async def test_a_view_has_the_lines_of_the_terminal_and_no_more(tmp_path: Path) -> None:
    engines = [ScriptedEngine(f"e{n:02}", url=f"http://127.0.0.1:{n + 1}") for n in range(40)]
    async with gateway(tmp_path, *engines) as (found, _):
        seen = Seen()
        async for kind, frame in frames(found.url, limit=1):
            seen.take(kind, frame)
    console = Console(file=io.StringIO(), width=140, height=60, force_terminal=True)
    assert len(console.render_lines(top.view(seen, lines=60))) <= 60


def test_a_narrow_terminal_has_fewer_columns_of_engines_and_none_is_cut() -> None:
    engine = {"name": "e0", "kind": "embedded", "state": "serving", "version": 7, "available": 7, "intake": "open"}
    engine |= {"admitted": 1, "running": 2, "waiting": 0, "kv_usage": 0.5, "dtype": "float32"}
    for width, columns in ((200, 10), (70, 8), (41, 5), (33, 4)):
        table = engines_table([engine], width)
        console = Console(width=width, file=io.StringIO())
        text = "\n".join("".join(part.text for part in line) for line in console.render_lines(table))
        assert (len(table.columns), "…" in text) == (columns, False), text
        assert all(word in text for word in ("engine", "serving", "version", "running")), text
