"""Admission against what a trainer can take: groups that lost a member hold nobody up, and a look caps nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.app import Gateway
from gateway.core.admission import stranded
from gateway.core.types import SessionId
from gateway.runtime.clock import unix_s
from tests.support.fake_relay import relay
from tests.support.scripted_engine import MODEL, ScriptedEngine, until
from tests.unit.gateway_api.test_status import gateway, get
from tests.unit.gateway_sessions.test_rewards import post, turn

GROUPS = {"reader": "trainer", "trainer_version": 0, "groups": 1, "group_size": 2, "staleness_max": 0, "wait_s": 0.01}


async def member(http: aiohttp.ClientSession, group: str, index: int) -> str:
    """As an agent makes one by hand."""
    made = await post(http, "/sessions", {"group_id": group, "group_size": 2, "sample_index": index})
    return str(made["session_id"])


async def refused(http: aiohttp.ClientSession) -> Any:
    body = {"model": MODEL, "prompt": [5], "max_tokens": 2, "session_id": "new"}
    return (await post(http, "/v1/completions", body, 429))["error"]["message"]


async def test_groups_that_lost_a_member_do_not_fill_the_bound_for_ever(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0, queue_timeout_s=0.2) as (_, http):
        await post(http, "/experience/sample", GROUPS)  # it takes two at once, and none may be older
        lost = []
        for group in ("a", "b"):
            first, second = await member(http, group, 0), await member(http, group, 1)
            await turn(http, first, [5])
            await post(http, f"/sessions/{first}/finish", {"reward": 1.0})
            lost.append(second)
        assert "2 buffered" in await refused(http), "while their members live they are expected"
        told = (await get(http, "/status"))["admission"]
        assert (told["full"], told["reader"], told["bound"]) == (True, "trainer", 2)
        assert told["waiting_groups"][0] == f"group a: 1 of 2 are buffered; it waits for {lost[0]}"
        for name in lost:
            await post(http, f"/sessions/{name}/abandon")
        told = (await get(http, "/status"))["admission"]
        assert (told["full"], told["buffered"], told["stranded"]) == (False, 0, 2)
        for index in range(2):
            name = await member(http, "c", index)
            await turn(http, name, [5])
            await post(http, f"/sessions/{name}/finish", {"reward": 1.0})
        read = (await post(http, "/experience/sample", GROUPS))["trajectories"]
        assert [t["group_id"] for t in read] == ["c", "c"]
        again = await member(http, "a", 1)
        await turn(http, again, [5])
        await post(http, f"/sessions/{again}/finish", {"reward": 1.0})
        read = (await post(http, "/experience/sample", GROUPS))["trajectories"]
        assert [t["group_id"] for t in read] == ["a", "a"], "what was lost can still be made good"


async def test_a_member_of_a_group_that_has_begun_is_admitted_whatever_is_buffered(tmp_path: Path) -> None:
    """Its group's version is served no more, so it is placed like a new session."""
    async with ScriptedEngine("e0", version="3") as e0, gateway(tmp_path, e0, queue_timeout_s=0.2) as (found, http):
        await post(http, "/experience/sample", GROUPS)
        members = {group: [await member(http, group, i) for i in range(2)] for group in ("a", "b")}
        for first, _ in members.values():
            await turn(http, first, [5])
            await post(http, f"/sessions/{first}/finish", {"reward": 1.0})
        e0.version = "4"
        state = found.fleet.state.sorted_engines()[0]
        found.fleet.suspect(state.name)
        await until(lambda: state.version == 4, "the engine under another version")
        await turn(http, members["a"][1], [5])
        await post(http, f"/sessions/{members['a'][1]}/finish", {"reward": 1.0})
        assert len((await post(http, "/experience/sample", {**GROUPS, "staleness_max": 9}))["trajectories"]) == 2


async def test_a_sample_by_hand_caps_nobody(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0, queue_timeout_s=0.2) as (_, http):
        look = {"reader": "by hand", "trainer_version": 0, "trajectories": 1, "staleness_max": 0}
        await post(http, "/experience/sample", look)
        for name in ("s0", "s1", "s2"):
            await turn(http, name, [5])
        await post(http, "/experience/sample", {**look, "reader": "trainer", "trajectories": 4, "wait_s": 0.01})
        await post(http, "/experience/sample", look)
        await turn(http, "s3", [5])
        assert "4 running and 0 buffered" in await refused(http)


@pytest.mark.parametrize("unclear", [{}, {"groups": 2}, {"trajectories": 1, "groups": 1}], ids=str)
async def test_a_refused_request_for_a_batch_holds_nobody_up(tmp_path: Path, unclear: dict[str, int]) -> None:
    """It says of no batch how large it is; a batch of none would let no session in, also after a restart."""
    body = {"model": MODEL, "prompt": [5], "max_tokens": 2}
    async with ScriptedEngine("e0") as e0:
        async with gateway(tmp_path, e0, queue_timeout_s=0.2) as (_, http):
            for _ in range(2):
                await post(
                    http, "/experience/sample", {"reader": "r", "trainer_version": 0, "wait_s": 1} | unclear, 400
                )
            assert (await get(http, "/status"))["admission"]["reader"] is None
            await post(http, "/v1/completions", {**body, "session_id": "new"})
        async with gateway(tmp_path, e0, queue_timeout_s=0.2) as (_, http):
            await post(http, "/v1/completions", {**body, "session_id": "newer"})


async def test_groups_are_looked_through_only_where_that_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With thousands of them a look takes milliseconds, and every turn's end changes what may be placed."""
    looks = list[int]()
    monkeypatch.setattr("gateway.sessions.trainer.stranded", lambda *args: looks.append(1) or stranded(*args))
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0, queue_timeout_s=0.2) as (found, http):
        await post(http, "/experience/sample", GROUPS)  # it takes two at once, and none may be older
        first = await member(http, "a", 0)
        await turn(http, first, [5])
        assert not looks, "there is room"
        await post(http, "/sessions", {"session_id": "b"})
        await turn(http, "b", [5])
        looks.clear()
        for _ in range(3):
            await turn(http, "b", [5])
        assert not looks, "a session that has begun waits for no trainer"
        found.fleet.reconcile()
        assert not looks, "nobody waits"
        await refused(http)
        assert looks


async def test_a_version_that_no_relay_announced_is_refused_by_name_and_makes_nothing_stale(tmp_path: Path) -> None:
    """As when a step is passed for a version, or the weights went to a model of another name."""
    asked = {"reader": "r", "trajectories": 1, "trainer_version": 3}
    async with relay() as (fake, address), ScriptedEngine("e0", version="3") as e0:
        fake.publish(3)
        fake.others = {"polciy": 24}
        async with gateway(tmp_path, e0, relay=address) as (found, http):
            await turn(http, "s", [5])
            await post(http, "/sessions/s/finish", {"reward": 1.0})
            refused = await post(http, "/experience/sample", {**asked, "trainer_version": 24}, 409)
            assert refused["error"]["code"] == "version_unknown"
            assert "version 24 of model 'policy': the newest is 3; relays have versions of polciy" in str(refused)
            status = await get(http, "/status")
            assert "version 24 of model 'policy'" in status["admission"]["notes"]["r"]
            assert status["admission"]["reader"] is None
            fake.coming = 4
            assert (await post(http, "/experience/sample", {**asked, "trainer_version": 4}))["trajectories"], (
                "on its way"
            )
            assert (await get(http, "/status"))["admission"]["notes"] == {}
            await fake.stop()
            await until(lambda: not found.fleet.relays.answering(), "no relay answers")
            told = await post(http, "/experience/sample", {**asked, "trainer_version": 24})
            assert told["why"] == "1 leased", "taken, since nothing can be said against it"
            assert "no relay that is believed answers" in (await get(http, "/status"))["admission"]["notes"]["r"]


async def test_the_first_batch_after_a_restart_is_within_the_bound_whatever_its_reader_says(tmp_path: Path) -> None:
    async with relay() as (fake, address), ScriptedEngine("e0", version="3") as e0:
        fake.publish(3)
        async with gateway(tmp_path, e0, relay=address) as (_, http):
            await turn(http, "s", [5])
            await post(http, "/sessions/s/finish", {"reward": 1.0})
        fake.publish(9)
        async with gateway(tmp_path, e0, relay=address) as (_, http):
            told = await post(http, "/experience/sample", {"reader": "r", "trajectories": 1, "trainer_version": 0})
            assert told["trajectories"] == []
            status = await get(http, "/status")
            assert (status["buffer"]["evicted_stale"], status["trainer_version"]) == (1, 9)


def leave(found: Gateway, name: str) -> None:
    """The agent of the session was last heard of long ago."""
    state = found.sessions.live.find(SessionId(name))
    assert state is not None
    state.touched_unix_s -= 61
    found.sessions.live.presence.note(state)


async def test_sessions_whose_agents_left_hold_nobody_up_and_count_again_on_their_return(tmp_path: Path) -> None:
    batch = {"reader": "trainer", "trainer_version": 0, "trajectories": 2, "staleness_max": 0, "wait_s": 0.01}
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0, queue_timeout_s=0.2) as (found, http):
        await post(http, "/experience/sample", batch)
        for name in ("s0", "s1"):
            await turn(http, name, [5])
        assert "2 running and 0 buffered trajectories reach the bound of 2" in await refused(http)
        leave(found, "s0")
        await turn(http, "s2", [5])
        await turn(http, "s0", [5])
        told = (await get(http, "/status"))["admission"]
        assert (told["running"], told["idle"], told["excess"]) == (3, 0, 1)
        leave(found, "s0")
        said = await refused(http)
        assert "1 of 3 sessions had no request for 60 s: 1 do not count (`gateway sessions --idle-s 60 --aband" in said
        listed = (await get(http, "/admin/sessions?idle_s=60"))["sessions"]
        assert [(s["session_id"], s["kept_by"], s["idle_s"] > 60) for s in listed] == [("s0", None, True)]
        ended = await post(http, "/admin/sessions/abandon")
        assert ended == {"abandoned": ["s0"], "failed": {}, "left": 0}
        assert (await get(http, "/status"))["admission"]["idle"] == 0


async def test_a_runner_a_child_and_a_reward_to_come_keep_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.sessions.trainer.LEASES_LOOK_S", 0.01)
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (found, http):
        await post(http, "/tasks", {"tasks": [{"task_id": "t", "data": {}}]})
        [lease] = (await post(http, "/tasks/lease", {"runner": "r"}))["leases"]
        await post(http, "/sessions", {"session_id": "run", "group_id": lease["group_id"]})
        for name, spec in {
            "seat": {"parent_session_id": "run"},
            "parent": {},
            "child": {"parent_session_id": "parent", "blocks_parent": True},
            "late": {},
            "left": {},
        }.items():
            await post(http, "/sessions", {"session_id": name, **spec})
        for name in ("run", "seat", "parent", "child", "late", "left"):
            await turn(http, name, [5])
        await post(http, "/sessions/late/finish", {})
        for name in ("run", "seat", "parent", "late", "left"):
            leave(found, name)

        async def kept() -> dict[str, str | None]:
            listed = (await get(http, "/admin/sessions"))["sessions"]
            return {session["session_id"]: session["kept_by"] for session in listed}

        state = found.sessions.live.find(SessionId("run"))
        assert state is not None
        await until(lambda: found.parts.trainer.kept_by(state, unix_s()) == "runner", "a look at the leases")
        expected = {
            "run": "runner",
            "seat": "runner",
            "parent": "child",
            "child": "turn",
            "late": "reward",
            "left": None,
        }
        assert await kept() == expected
        told = (await get(http, "/status"))["admission"]
        assert (told["running"], told["silent"], told["idle"]) == (5, 4, 1)
        leave(found, "child")
        assert (await kept())["parent"] is None, "its child is idle, too"
        await post(http, "/tasks/finish", {"lease_id": lease["lease_id"], "reward": 1.0})
        await until(lambda: found.parts.trainer.kept_by(state, unix_s()) is None, "another look")
