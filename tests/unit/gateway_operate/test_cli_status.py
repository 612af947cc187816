"""`gateway status`: what people read of a running gateway."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from click.testing import CliRunner, Result

from gateway.cli import cli
from gateway.core.tasks import NewTask
from gateway.core.types import EngineName
from tests.support.scripted_engine import ScriptedEngine, until
from tests.unit.gateway_api.test_status import complete, gateway


async def status(url: str, *flags: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, cli, ["status", "--url", url, *flags])


async def test_engines_turns_and_what_is_wrong(tmp_path: Path) -> None:
    gone = ScriptedEngine("gone", url="http://127.0.0.1:9")
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0, gone) as (found, http):
        await complete(http)
        told = await status(found.url)
        assert told.exit_code == 0, told.output
        lines = told.output.splitlines()
        assert lines[0] == "model policy, mode repack: newest version 0, the trainer's 0"
        assert "turns ended 1, cut 0, resumed 0, lost 0" in told.output
        assert next(line for line in lines if line.startswith("e0")).split()[:5] == [
            "e0",
            "vllm",
            "serving",
            "0",
            "open",
        ]
        assert any(line.startswith("gone, last error: ") and "127.0.0.1:9" in line for line in lines), "its last error"
        assert "no engine serves" not in told.output
        assert json.loads((await status(found.url, "--json")).output)["model"] == "policy"
        await e0.die()
        await until(lambda: found.fleet.state.engines[EngineName("e0")].status == "dead", "notice of the death", 60)
        assert "no engine serves: new turns wait, then get 429" in (await status(found.url)).output


async def test_the_prompt_pool_is_shown_once_it_has_tasks(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (found, _):
        assert "prompt pool" not in (await status(found.url)).output
        await found.stores.tasks.add("default", [NewTask(name, b"{}") for name in "abc"])
        leased = await found.stores.tasks.lease("default", "runner", count=2)
        await found.stores.tasks.finish(leased.leases[0].lease_id, 1.0)
        told = (await status(found.url)).output
    assert "prompt pool 3 tasks, 1 samples leased; since the start 1 finished, 0 failed, 0 leases expired" in told


async def test_what_was_evicted_and_who_got_nothing_is_shown(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (found, http):
        assert "evicted" not in (await status(found.url)).output
        for name in ("a", "b"):
            assert (await complete(http, f"/s/{name}/v1/completions"))[0] == 200
            async with http.post(f"/sessions/{name}/finish", json={"reward": 1.0}) as answer:
                assert answer.status == 200
        async with http.post("/experience/evict", json={"session_ids": ["a"]}) as answer:
            assert answer.status == 200
        wanted = {"reader": "t", "trainer_version": 9, "trajectories": 1}
        async with http.post("/experience/sample", json=wanted) as answer:
            assert (await answer.json())["why"] == "1 too stale, the newest is 0 and you say 9"
        told = (await status(found.url)).output
    assert "buffer 1 trajectories, leased 0; evicted unused: 1 by readers" in told
    assert "reader t: it says version 9, which no relay announced (this gateway has no relay)" in told


async def test_engines_that_compute_in_different_dtypes_are_named(tmp_path: Path) -> None:
    e0, e1 = ScriptedEngine("e0", dtype="bfloat16"), ScriptedEngine("e1", dtype="float32")
    async with e0, e1, gateway(tmp_path, e0, e1) as (found, _):
        await until(lambda: all(e.dtype for e in found.fleet.state.sorted_engines()), "what they compute in")
        told = (await status(found.url)).output
    assert [line.split()[-1] for line in told.splitlines() if line.startswith(("e0 ", "e1 "))] == [
        "bfloat16",
        "float32",
    ]
    assert "engines compute in bfloat16 and float32 (e0 in bfloat16, e1 in float32): greedy turns" in told


async def test_one_dtype_is_no_warning_and_an_untold_one_a_question_mark(tmp_path: Path) -> None:
    e0, e1 = ScriptedEngine("e0", dtype="float32"), ScriptedEngine("e1")
    async with e0, e1, gateway(tmp_path, e0, e1) as (found, _):
        await until(lambda: found.fleet.state.engines[EngineName("e0")].dtype, "what it computes in")
        told = (await status(found.url)).output
    assert [line.split()[-1] for line in told.splitlines() if line.startswith(("e0 ", "e1 "))] == ["float32", "?"]
    assert "engines compute in" not in told


def test_who_does_not_answer_is_named() -> None:
    result = CliRunner().invoke(cli, ["status", "--url", "http://127.0.0.1:1"])
    assert result.exit_code == 1
    assert "no gateway answers at http://127.0.0.1:1" in result.output


async def test_it_waits_for_an_engine_that_serves(tmp_path: Path) -> None:
    gone = ScriptedEngine("gone", url="http://127.0.0.1:9")
    async with gateway(tmp_path, gone) as (found, _):
        result = await status(found.url, "--wait-s", "0.1")
        assert result.exit_code == 1
        assert f"no engine of {found.url} serves after 0.1 s: gone is " in result.output
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (found, _):
        assert (await status(found.url, "--wait-s", "60")).exit_code == 0
        result = await status(found.url, "--wait-s", "0.1", "--engines", "2")
        assert result.exit_code == 1
        assert f"fewer than 2 engines of {found.url} serve after 0.1 s: e0 is serving" in result.output
