"""`gateway doctor`: what it finds before a start, with real sockets, a real data directory and a scripted engine."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gateway.cli import cli
from gateway.config import EngineSpec, GatewayConfig
from gateway.fleet.watcher import PROBE_TEXT
from gateway.operate import doctor
from gateway.store import Database
from gateway.store.database import DATABASE_NAME
from gateway.store.layout import LAYOUT, claim
from gateway.tokens import Codec
from protos import findings
from protos.findings import Finding
from tests.support.scripted_engine import MODEL, ScriptedEngine
from tests.support.tiny_model import tiny_tokenizer

OURS = Codec.load(tiny_tokenizer()).encode(PROBE_TEXT)


async def examine(*engines: ScriptedEngine, relay: str | None = None, **options: Any) -> dict[str, Finding]:
    specs = tuple(EngineSpec(e.name, "vllm", e.url, relay) for e in engines)
    config = GatewayConfig(**{"model": MODEL, "tokenizer": tiny_tokenizer(), "engines": specs, **options})
    found: dict[str, Finding] = {}
    for finding in await doctor.examine(config):
        if finding.right or finding.what not in found:
            found[finding.what] = finding
    return found


def wrong(found: dict[str, Finding]) -> list[str]:
    return [what for what, finding in found.items() if not finding.right and not finding.advice]


async def test_a_host_where_all_is_right(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0:
        found = await examine(e0, data=tmp_path / "new" / "data", port=0)
    assert wrong(found) == []
    assert found["engine e0"].right
    assert "version 0" in found["engine e0"].found
    assert "GiB free" in found["data directory"].found
    assert not os.listdir(tmp_path), "nothing is changed"


async def test_engines_that_are_away_serve_another_model_or_have_another_tokenizer() -> None:
    gone = ScriptedEngine("gone", url="http://127.0.0.1:9")
    noise = json.dumps({"count": 1, "max_model_len": 9, "tokens": [0] * len(OURS)})
    async with ScriptedEngine("other", answers={"/tokenize": noise}) as other:
        found = await examine(gone, other, port=0)
        assert wrong(found) == ["engine gone", "engine other"]
        assert "127.0.0.1:9" in found["engine gone"].found
        assert "its tokenizer is not the gateway's" in found["engine other"].found
        renamed = GatewayConfig(
            model="elsewhere", tokenizer=tiny_tokenizer(), engines=(EngineSpec("e", "vllm", other.url, None),)
        )
        [answer] = [finding for finding in await doctor.examine(renamed) if finding.what == "engine e"]
    assert not answer.right
    assert "elsewhere" in answer.found


async def test_an_address_in_use_and_one_that_is_not_of_this_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = (await examine(port=taken.getsockname()[1]))["address to listen on"]
    assert not found.right
    assert "--port" in found.remedy
    found = (await examine(host="192.0.2.1", port=0))["address to listen on"]
    assert not found.right
    assert "--host" in found.remedy


async def test_what_keeps_a_gateway_from_going_on_with_its_data(tmp_path: Path) -> None:
    path = tmp_path / DATABASE_NAME
    async with Database(path) as database:
        await database.run(lambda opened: claim(opened, str(path), "elsewhere", "v"))
        found = (await examine(data=tmp_path, port=0))["earlier sessions"]
        assert not found.right
        assert "in use by another gateway" in found.found
    found = (await examine(data=tmp_path, port=0))["earlier sessions"]
    assert (found.right, found.remedy) == (False, "serve --model elsewhere, or give another --data")
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE kept_for SET model = ?", (MODEL,))
    assert (await examine(data=tmp_path, port=0))["earlier sessions"].right
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA user_version = {LAYOUT + 1}")
    assert "newer gateway" in (await examine(data=tmp_path, port=0))["earlier sessions"].found
    path.write_bytes(b"no database" * 1000)
    assert "cannot be read" in (await examine(data=tmp_path, port=0))["earlier sessions"].found
    found = (await examine(data=path, port=0))["data directory"]
    assert not found.right
    assert "no directory" in found.found


async def test_relays_and_etcd_that_are_away() -> None:
    async with ScriptedEngine("e0") as e0:
        found = await examine(e0, relay="127.0.0.1:1", etcd="127.0.0.1:2", port=0)
    assert wrong(found) == ["etcd", "relay 127.0.0.1:1"]


def test_the_command_prints_remedies_and_its_status_says_whether_anything_is_wrong(tmp_path: Path) -> None:
    line = ["doctor", "--model", "policy", "--tokenizer", str(tiny_tokenizer()), "--port", "0", "--data", str(tmp_path)]
    fine = CliRunner().invoke(cli, line)
    assert fine.exit_code == 0, fine.output
    assert "advice  engines: none is named" in fine.output
    bad = CliRunner().invoke(cli, [*line, "--engine", "e0=vllm=http://127.0.0.1:9"])
    assert bad.exit_code == 1
    assert "wrong   engine e0: " in bad.output


@pytest.mark.parametrize("broken", ["{", "[]"])
async def test_a_tokenizer_that_cannot_be_read_is_a_finding_and_not_a_crash(tmp_path: Path, broken: str) -> None:
    (tmp_path / "tokenizer.json").write_text(broken)
    async with ScriptedEngine("e0") as e0:
        found = await examine(e0, tokenizer=tmp_path, port=0)
    assert wrong(found) == ["tokenizer"]


async def test_what_the_chat_template_drops_is_a_finding() -> None:
    found = (await examine(port=0))["chat template"]
    assert found.right
    assert found.found.startswith("leaves out the reasoning of earlier answers before the last question")


async def admin_listener(tmp_path: Path, where: str, **options: Any) -> Finding:
    return (await examine(port=0, admin_listen=where, **options))["admin listener"]


async def test_a_place_where_the_admin_listener_cannot_be(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = await admin_listener(tmp_path, f"127.0.0.1:{taken.getsockname()[1]}")
    assert (found.right, "give another port in --admin-listen" in found.remedy) == (False, True)
    (tmp_path / "file").write_text("")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "used"))
        other.listen()
        for where, said in {
            f"unix:{tmp_path}/none/admin.sock": "is no directory",
            f"unix:{tmp_path}/file": "is there, and no socket",
            f"unix:{tmp_path}/used": "another process listens on",
            f"unix:{tmp_path}/{'x' * 120}": "too long for a unix socket",
            "10.0.0.1:8081": "would serve whoever reaches it, without credentials",
        }.items():
            found = await admin_listener(tmp_path, where)
            assert (found.right, said in found.found) == (False, True), found
        found = await admin_listener(tmp_path, f"unix:{tmp_path}/new", admin_group="no-such-group")
        assert (found.right, "no group 'no-such-group'" in found.found) == (False, True)
    found = (await examine(port=9, admin_listen="127.0.0.1:9"))["admin listener"]
    assert (found.right, "the port of the clients' listener" in found.found) == (False, True)


async def test_a_place_where_the_admin_listener_can_be_is_left_as_it_is(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "left"))  # nobody listens: of a gateway that was killed
    for name in ("left", "new"):
        found = await admin_listener(tmp_path, f"unix:{tmp_path}/{name}")
        assert found.right, found
    assert os.listdir(tmp_path) == ["left"]
    assert "admin listener" not in await examine(port=0), "one port answers everything"


async def test_it_looks_again_until_nothing_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[list[Finding]] = []
    real = doctor.examine

    async def look(config: GatewayConfig) -> list[Finding]:
        looks.append(await real(config))
        await asyncio.to_thread((tmp_path / "run").mkdir, exist_ok=True)
        return looks[-1]

    monkeypatch.setattr(doctor, "examine", look)
    config = GatewayConfig(
        model=MODEL, tokenizer=tiny_tokenizer(), port=0, admin_listen=f"unix:{tmp_path}/run/admin.sock"
    )
    assert await doctor.examine_patiently(config, 0.0) is looks[0]
    os.rmdir(tmp_path / "run")
    found = await doctor.examine_patiently(config, 60.0)
    assert [[one.what for one in findings.wrong(look)] for look in looks] == [
        ["admin listener"],
        ["admin listener"],
        [],
    ]
    assert found is looks[-1]
