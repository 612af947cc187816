"""Groups over HTTP: made whole, failed members replaced, short groups given out as they are, abandoned with all."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import aiohttp

from gateway.core.fleet.config import FleetConfig
from gateway.store.database import DATABASE_NAME
from tests.support.scripted_engine import MODEL, ScriptedEngine, until
from tests.unit.gateway_api.test_status import gateway, get
from tests.unit.gateway_sessions.test_rewards import post, turn

SAMPLE = {"reader": "t", "trainer_version": 0, "groups": 1, "group_size": 3}


async def rolled_out(http: aiohttp.ClientSession, member: Any) -> None:
    await turn(http, member["session_id"], [5])
    await post(http, f"/sessions/{member['session_id']}/finish", {"reward": 1.0})


async def sampled(http: aiohttp.ClientSession, wait_s: float = 0.0) -> list[tuple[str, int]]:
    told = await post(http, "/experience/sample", {**SAMPLE, "wait_s": wait_s})
    return [(t["group_id"], t["sample_index"]) for t in told["trajectories"]]


async def test_a_group_is_made_whole_and_read_whole(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):
        group = await post(http, "/groups", {"size": 3, "session": {"tags": {"environment": "x"}}})
        assert [m["sample_index"] for m in group["sessions"]] == [0, 1, 2]
        assert len({m["api_key"] for m in group["sessions"]}) == 3
        for number, member in enumerate(group["sessions"]):
            assert await sampled(http) == []
            await rolled_out(http, member)
            assert len((await get(http, f"/groups/{group['group_id']}"))["finished"]) == number + 1
        assert await sampled(http) == [(group["group_id"], i) for i in range(3)]
        assert (await get(http, f"/groups/{group['group_id']}"))["state"] == "closed"
        told = await post(http, "/groups", {"size": 1, "group_id": group["group_id"]}, 409)
        assert "(closed); trajectories carry its name" in told["error"]["message"]


async def test_a_group_is_made_of_no_name_that_other_sessions_have(tmp_path: Path) -> None:
    """Their trajectories would count as its members'."""
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):
        await post(http, "/sessions", {"session_id": "live", "group_id": "used"})
        told = await post(http, "/groups", {"size": 1, "group_id": "used"}, 409)
        assert "session live is in it" in told["error"]["message"]
        await rolled_out(http, {"session_id": "live"})
        await turn(http, "named", [5])
        await post(http, "/sessions/named/finish", {"reward": 1.0, "group_id": "named-late"})
        for group in ("used", "named-late"):
            told = (await post(http, "/groups", {"size": 1, "group_id": group}, 409))["error"]["message"]
            assert "1 finished session of it waits for a trainer" in told


async def test_an_empty_name_of_a_group_is_refused(tmp_path: Path) -> None:
    """It would be one group for all that name none by mistake."""
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):
        await turn(http, "s", [5])
        for path, body in (("/sessions", {}), ("/groups", {"size": 1}), ("/sessions/s/finish", {"reward": 1.0})):
            told = (await post(http, path, {**body, "group_id": ""}, 400))["error"]
            assert (told["param"], "length >= 1" in told["message"]) == ("group_id", True)


async def test_members_of_one_sample_index_are_kept_as_they_are(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):
        for name in ("a", "b", "c"):
            await post(http, "/sessions", {"session_id": name, "group_id": "g", "group_size": 3})
            await rolled_out(http, {"session_id": name})
        assert await sampled(http) == [("g", 0)] * 3


async def test_a_groups_size_has_one_word_and_the_older_one_is_taken_too(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):
        for asked in ({"group_size": 2}, {"size": 2}, {"size": 2, "group_size": 2}):
            group = await post(http, "/groups", asked)
            assert (group["group_size"], group["size"], len(group["sessions"])) == (2, 2, 2)
        for wrong, said in (({}, "`group_size` is missing"), ({"size": 2, "group_size": 3}, "`size` is 2")):
            told = await post(http, "/groups", wrong, 400)
            assert said in told["error"]["message"]
        told = await post(http, "/groups", {"group_size": 0}, 400)
        assert "group_size" in told["error"]["message"]


async def test_what_is_one_members_own_is_refused_for_all_of_them(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):
        for wrong in ({"session_id": "a"}, {"group_id": "g"}, {"group_size": 3}, {"sample_index": 1}):
            told = await post(http, "/groups", {"group_size": 2, "session": wrong}, 400)
            assert told["error"]["param"] == f"session.{next(iter(wrong))}"
        for wrong in ({"group_id": "g" * 257}, {"session": {"tags": {"k": "v" * 5000}}}):
            await post(http, "/groups", {"group_size": 2, **wrong}, 400)


async def test_a_group_of_several_versions_is_marked(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", version="3") as e0, gateway(tmp_path, e0) as (found, http):
        group = await post(http, "/groups", {"size": 2})
        path = f"/groups/{group['group_id']}"
        await rolled_out(http, group["sessions"][0])
        told = await get(http, path)
        assert (told["versions"], told["mixed"]) == ([3], False)
        e0.version = "4"
        state = found.fleet.state.sorted_engines()[0]
        found.fleet.suspect(state.name)
        await until(lambda: state.version == 4, "the engine under another version")
        await rolled_out(http, group["sessions"][1])
        told = await get(http, path)
        assert (told["versions"], told["mixed"], told["state"]) == ([3, 4], True, "closed")


async def test_a_failed_member_is_replaced_and_then_the_group_closes_short(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):
        group = await post(http, "/groups", {"size": 3, "group_min": 2, "resample_max": 1})
        first, second, third = group["sessions"]
        told = await post(http, f"/sessions/{first['session_id']}/abandon", {"reason": "its tool died"})
        again = told["replacement"]
        assert again["session_id"] != first["session_id"]
        live = (await get(http, f"/groups/{group['group_id']}"))["sessions"]
        assert (live[0]["session_id"], live[0]["sample_index"]) == (again["session_id"], 0)
        told = await post(http, f"/sessions/{again['session_id']}/abandon")
        assert "replacement" not in told
        waiting = asyncio.create_task(sampled(http, wait_s=20.0))
        for member in (second, third):
            await rolled_out(http, member)
        assert await waiting == [(group["group_id"], 1), (group["group_id"], 2)], "whole with two, and not after 20 s"


async def test_a_short_group_is_known_to_be_whole_after_a_restart(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0:
        async with gateway(tmp_path, e0) as (_, http):
            group = await post(http, "/groups", {"size": 3, "group_min": 1})
            await rolled_out(http, group["sessions"][1])
            for index in (0, 2):
                await post(http, f"/sessions/{group['sessions'][index]['session_id']}/abandon")
        async with gateway(tmp_path, e0) as (_, http):
            assert await sampled(http) == [(group["group_id"], 1)]


async def test_abandoning_a_group_aborts_its_members_and_takes_its_trajectories_out(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", hold_at=2) as e0, gateway(tmp_path, e0) as (found, http):
        group = await post(http, "/groups", {"size": 3})
        e0.hold_at = None
        await rolled_out(http, group["sessions"][0])
        e0.hold_at = 2
        body = {"model": MODEL, "prompt": [5], "max_tokens": 8}
        name = group["sessions"][1]["session_id"]
        running = asyncio.create_task(post(http, f"/s/{name}/v1/completions", body, 409))
        await until(lambda: found.sessions.running and len(e0.requests) == 2, "a running turn")
        told = await post(http, f"/groups/{group['group_id']}/abandon", {"reason": "not wanted"})
        assert (told["state"], told["sessions"]) == ("abandoned", [])
        assert "was abandoned" in (await running)["error"]["message"]
        await until(lambda: e0.requests[1].left, "the abort upstream")
        assert await sampled(http) == []
        assert len(found.sessions.live) == 0
        await post(http, f"/groups/{group['group_id']}/abandon", status=409)


async def test_a_group_that_cannot_reach_its_minimum_is_given_up(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (found, http):
        group = await post(http, "/groups", {"size": 2})
        await rolled_out(http, group["sessions"][0])
        await post(http, f"/sessions/{group['sessions'][1]['session_id']}/abandon")
        assert (await get(http, f"/groups/{group['group_id']}"))["state"] == "abandoned"
        assert found.stores.buffer.statistics().trajectories == 0


async def test_what_is_wrong_with_a_group_is_named(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):
        for body, param in (({"size": 0}, "size"), ({"size": 2, "group_min": 3}, "group_min"), ({}, "group_size")):
            assert (await post(http, "/groups", body, 400))["error"]["param"] == param
        await post(http, "/groups/nobody/abandon", status=404)


async def test_a_place_that_nobody_can_take_again_is_given_up_and_stops_no_start(tmp_path: Path) -> None:
    """Its row is lost, and the gateway comes back in a mode that makes no such session."""
    strict = {"on_version_loss": "strict"}
    async with ScriptedEngine("e0") as e0:
        async with gateway(tmp_path, e0) as (_, http):
            group = await post(http, "/groups", {"size": 3, "group_min": 1, "resample_max": 9, "session": strict})
            path, lost = f"/groups/{group['group_id']}", group["sessions"][1]["session_id"]
            await rolled_out(http, group["sessions"][0])
        with contextlib.closing(sqlite3.connect(tmp_path / DATABASE_NAME, isolation_level=None)) as kept:
            kept.execute("DELETE FROM sessions WHERE session_id=?", (lost,))
        async with gateway(tmp_path, e0, fleet=FleetConfig(mode="inflight")) as (_, http):
            told = await get(http, path)
            assert (told["state"], [m["sample_index"] for m in told["sessions"]]) == ("open", [2])
            await post(http, f"/sessions/{told['sessions'][0]['session_id']}/abandon")
            assert (await get(http, path))["state"] == "closed"
            assert await sampled(http) == [(group["group_id"], 0)], "whole with one"


async def test_a_member_that_ends_while_the_gateway_ends_is_sampled_again_by_the_next_one(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0:
        async with gateway(tmp_path, e0) as (found, http):
            group = await post(http, "/groups", {"size": 2, "resample_max": 1})
            path, first = f"/groups/{group['group_id']}", group["sessions"][0]["session_id"]
            found.sessions.live.draining = True
            assert (await post(http, f"/sessions/{first}/abandon"))["state"] == "abandoned"
        async with gateway(tmp_path, e0) as (_, http):
            told = await get(http, path)
            assert (told["state"], told["resampled"]) == ("open", 1)
            assert [m["sample_index"] for m in told["sessions"]] == [0, 1]
            assert first not in [m["session_id"] for m in told["sessions"]]
