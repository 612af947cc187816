"""`agents-env verifiers`: how sessions end by their traces, against a real gateway."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from agents_env.failures import RunFailed
from agents_env.verifiers import Ending, Ends, VerifiersOptions, _end, endings, run
from tests.support.scripted_engine import ScriptedEngine
from tests.unit.gateway_api.test_status import gateway
from tests.unit.gateway_sessions.test_rewards import SAMPLE, post, turn


async def test_a_rollout_whose_calls_were_all_refused_has_no_session_to_abandon(tmp_path: Path) -> None:
    """Such as one that sends images. A reward without a session is still a failure: it would be lost."""
    ends = Ends("run")
    async with (
        ScriptedEngine("e0") as e0,
        gateway(tmp_path, e0) as (found, _),
        httpx.AsyncClient(base_url=found.url, timeout=60.0, trust_env=False) as http,
    ):
        await _end(http, Ending("never-began", None, "images are refused"), ends)
        assert (ends.abandoned, ends.failed) == (1, 0)
        await _end(http, Ending("never-began", 1.0), ends)
        assert (ends.finished, ends.failed) == (0, 1)


async def test_certificates_that_cannot_be_read_are_named_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    program = tmp_path / "vf-eval"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    program.chmod(0o755)
    options = VerifiersOptions("https://127.0.0.1:9", out=tmp_path / "out", program=str(program))
    with pytest.raises(RunFailed, match=r"SSL_CERT_FILE cannot be read: .*No such file.*it names a file"):
        await run(options, "env")
    assert not (tmp_path / "started").exists()


def trace(name: str, **fields: Any) -> dict[str, Any]:
    """As verifiers 0.4 writes it, which leaves out what is null."""
    return {
        "id": name,
        "task": {"type": "Task", "key": "gsm8k-7", "hash": "abc"},
        "agent": {"name": "solver", "trainable": True},
        "ok": True,
        "calls": [{"finish_reason": "stop"}],
        "rewards": {"right": {"score": 1.0, "weight": 2.0}, "brief": {"score": 0.5, "weight": 0.0}},
        "metrics": {"steps": 3.0},
        **fields,
    }


def episode(*traces: dict[str, Any]) -> str:
    return json.dumps({"id": "e", "ok": True, "traces": traces})


@pytest.mark.parametrize(
    ("fields", "truncated"),
    [
        ({}, False),
        ({"stop_condition": "agent_completed"}, False),
        ({"stop_condition": "max_turns"}, True),
        ({"calls": [{"finish_reason": "stop"}, {"finish_reason": "length"}]}, True),
        ({"calls": [{"finish_reason": "length"}, {"finish_reason": "stop"}]}, False),
    ],
)
def test_a_limit_that_ended_an_agent_is_said(fields: dict[str, Any], truncated: bool) -> None:
    [ending] = endings(episode(trace("s", **fields)))
    assert ending.truncated is truncated


@pytest.mark.parametrize("score", ["high", float("nan"), float("inf"), None])
def test_a_reward_that_is_no_number_ends_its_own_session_alone(score: Any) -> None:
    bad, good = endings(episode(trace("a", rewards={"r": {"score": score, "weight": 1.0}}), trace("b")))
    assert (bad.reward, good.reward) == (None, 2.0)
    assert "a reward is no finite number" in bad.why


def test_metrics_that_are_no_numbers_are_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    metrics = {"loss": float("nan"), "text": "x", "right": True, "steps": 2}
    [ending] = endings(episode(trace("s", rewards={"r": {"score": True, "weight": 1.0}}, metrics=metrics)))
    assert (ending.reward, ending.metrics) == (1.0, {"reward/r": 1.0, "right": 1.0, "steps": 2.0})
    assert "not taken as metrics: loss, text" in caplog.text


async def test_sessions_get_the_group_of_their_task_its_tags_and_each_reward(tmp_path: Path) -> None:
    """And an agent that is not trained hands nothing to a trainer."""
    ends = Ends("run")
    async with (
        ScriptedEngine("e0") as e0,
        gateway(tmp_path, e0) as (found, http),
        httpx.AsyncClient(base_url=found.url, timeout=60.0, trust_env=False) as client,
    ):
        judge = {"agent": {"name": "judge", "trainable": False}, "rewards": {}}
        for number in range(2):
            names = [f"{who}{number}" for who in ("solver", "again", "judge")]
            for name in names:
                await turn(http, name, [5])
            traces = [trace(names[0]), trace(names[1], stop_condition="max_turns"), trace(names[2], **judge)]
            for ending in endings(episode(*traces)):
                await _end(client, ending, ends)
        assert (ends.finished, ends.untrained, ends.abandoned, ends.failed) == (4, 2, 0, 0)
        sampled = await post(http, "/experience/sample", {**SAMPLE, "groups": 2, "group_size": 2, "trajectories": None})
        assert found.sessions.counters.sessions_abandoned == 2
    rows = {t["session_id"]: t for t in sampled["trajectories"]}
    groups = {name: row["group_id"] for name, row in rows.items()}
    assert groups["solver0"] == groups["solver1"] != groups["again0"] == groups["again1"]
    for name, row in rows.items():
        assert row["sample_index"] == int(name[-1])
        assert (row["reward"], row["tags"]) == (2.0, {"task": "gsm8k-7", "agent": "solver"})
        assert row["metrics"] == {"reward/right": 1.0, "reward/brief": 0.5, "steps": 3.0}
        assert row["status"] == ("truncated" if name.startswith("again") else "completed")
    assert list(ends.members.values()) == [2, 2]
