"""The fault kit as its users have it: a command whose engines answer by seed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
from pathlib import Path
from typing import get_args

import httpx
import pytest
from click.testing import CliRunner

from gateway.cli import cli
from gateway.faultkit.script import CutKind, cuts_by_seed, scripted
from tests.support import processes
from tests.support.scripted_engine import ScriptedEngine


def test_engines_say_what_their_script_says_and_tell_how_often_they_cut(tmp_path: Path) -> None:
    flags = ["--engines=2", "--seed=7", "--cuts=1", "--kinds=eof", "--after-max=1", "--pause-s=0"]
    kit = processes.start("kit", ["gateway", "faultkit", *flags], tmp_path)
    asked = {"prompt": [5, 6], "max_tokens": 6, "stream": True}
    cut = httpx.post(f"{kit.ready['e1']}/v1/completions", json=asked)
    assert cut.text == ""
    assert kit.stop() == 0, kit.log()
    assert "1 requests; eof 1" in kit.log()


@pytest.mark.slow
def test_whole_answers_follow_from_the_ids_before_them(tmp_path: Path) -> None:
    kit = processes.start("kit", ["gateway", "faultkit", "--engines=1", "--cuts=0", "--vocab-size=50"], tmp_path)
    asked = {"prompt": [5, 6], "max_tokens": 6, "stream": True}
    lines = httpx.post(f"{kit.ready['e0']}/v1/completions", json=asked).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert [i for e in events for i in e["choices"][0]["token_ids"]] == scripted([5, 6], 6, 50)[0]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert events[-1]["usage"]["completion_tokens"] == 6
    assert kit.stop() == 0, kit.log()


@pytest.mark.parametrize(("kinds", "said_"), [("eof,none", "no none; there are reset"), ("", "no cut is named")])
def test_kinds_that_are_not_there_are_refused(kinds: str, said_: str) -> None:
    result = CliRunner().invoke(cli, ["faultkit", f"--kinds={kinds}"])
    assert result.exit_code == 2
    assert said_ in " ".join(result.output.split()).replace("│ ", "")


def test_ports_and_files_that_cannot_be_had_are_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["faultkit", "--engines=2", "--port=65535"])
    assert (result.exit_code, "2 engines from 65535 on end above 65535" in result.output) == (2, True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = CliRunner().invoke(cli, ["faultkit", "--engines=1", f"--port={port}"])
    assert said.exit_code == 1
    assert f"Error: cannot listen on 127.0.0.1:{port}: Address already in use (choose another --port" in said.output
    said = CliRunner().invoke(cli, ["faultkit", "--engines=1", f"--ready-file={tmp_path}/none/ready"])
    assert said.exit_code == 1
    assert "No such file or directory (choose another --ready-file)" in said.output


def test_a_seed_draws_the_same_cuts_again() -> None:
    draws = [[cuts_by_seed(seed, 0.5, 9)() for _ in range(1)] for seed in (1, 1)]
    assert draws[0] == draws[1]
    one, again, other = (cuts_by_seed(seed, 0.5, 9) for seed in (3, 3, 4))
    drawn = [one() for _ in range(200)]
    assert drawn == [again() for _ in range(200)] != [other() for _ in range(200)]
    assert 60 < sum(cut is not None for cut in drawn) < 140
    assert {cut.kind for cut in drawn if cut is not None} <= set(get_args(CutKind)) - {"400"}


async def test_what_was_accepted_as_an_engine_dies_is_reset_too() -> None:
    """Else the socket is left open, and whoever runs when it is collected fails with its warning."""
    for rounds in range(4):  # of the loop, between the connection and the death
        async with ScriptedEngine("e0") as e0:
            with socket.create_connection(("127.0.0.1", int(e0.url.rpartition(":")[2])), 60.0) as client:
                for _ in range(rounds):
                    await asyncio.sleep(0)
                await e0.die()
                with contextlib.suppress(ConnectionResetError):
                    assert await asyncio.to_thread(client.recv, 1) == b""
    gc.collect()
