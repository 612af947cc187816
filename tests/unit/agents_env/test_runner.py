"""The runner over a real server: groups, bounds, refusals, failures and whose they are, and stopping."""

from __future__ import annotations

import asyncio
import io
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import pytest

from agents_env.environment import Chat, Outcome
from agents_env.environments.tool_chain import ToolChain
from agents_env.failures import RunFailed
from agents_env.runner import Plan, Runner, Statistics
from agents_env.runner.phases import PhaseLimits
from agents_env.runner.progress import describe
from agents_env.server import Sampling, Server
from gateway.api.sessions import REASON_CHARS_MAX
from tests.unit.agents_env.scripted_server import Refusal, ScriptedServer, perfect, serving


@dataclass(frozen=True)
class Number:
    value: int

    @property
    def task_id(self) -> str:
        return str(self.value)


class Echo:
    """Each task is a number that the model has to repeat."""

    name = "echo"

    def __init__(self, *, broken: frozenset[int] = frozenset()) -> None:
        self.broken = broken

    def tasks(self, seed: int) -> Iterator[Number]:
        return (Number(seed + index) for index in count())

    async def rollout(self, task: Number, client: Chat) -> Outcome:
        reply = await client.reply([{"role": "user", "content": task.task_id}], max_tokens=5)
        if task.value in self.broken:
            raise LookupError(f"no answer for {task.value}")
        return Outcome(float(reply.text == task.task_id), metrics={"length": len(reply.text)})


def repeat(conversation: list[dict[str, str]]) -> str:
    return conversation[-1]["content"]


def plan(**changes: Any) -> Plan:
    return Plan(**{"run_id": "r", "groups": 2, "group_size": 3, "concurrency": 4, **changes})


async def roll_out(
    server: ScriptedServer,
    plan: Plan,
    environment: Any = None,
    *,
    stop: asyncio.Event | None = None,
    **options: Any,
) -> tuple[Statistics, list[dict[str, Any]]]:
    """The end of the run, and its lines."""
    out = io.StringIO()
    async with Server(server.url, Sampling("policy", temperature=0.5), **{"patience_s": 5.0, **options}) as client:
        runner = Runner(environment or Echo(), client, plan, out=out)
        statistics = await runner.run(stop or asyncio.Event())
    return statistics, [json.loads(line) for line in out.getvalue().splitlines()]


async def test_every_sample_of_every_group_is_rolled_out_once() -> None:
    async with serving(repeat) as server:
        statistics, lines = await roll_out(server, plan(groups=5, seed=10))
    assert (statistics.rollouts, statistics.groups_completed, statistics.reward_mean) == (15, 5, 1.0)
    assert Counter(line["group_id"] for line in lines) == {f"echo-r-{index}": 3 for index in range(5)}
    assert {(line["task_id"], line["sample_index"]) for line in lines} == {
        (str(10 + index), sample) for index in range(5) for sample in range(3)
    }
    assert server.most_at_once <= 4
    assert all(chat["temperature"] == 0.5 and chat["model"] == "policy" for chat in server.chats)


async def test_the_gateway_learns_each_sessions_place_and_reward() -> None:
    async with serving(lambda _: "11") as server:
        await roll_out(server, plan(seed=11, split="eval"))
    assert set(server.finished) == set(server.sessions)
    assert {body["reward"] for name, body in server.finished.items() if "-r-0-" in name} == {1.0}
    assert {body["reward"] for name, body in server.finished.items() if "-r-1-" in name} == {0.0}
    first = server.sessions["echo-r-0-2"]
    assert (first["group_id"], first["sample_index"], first["group_size"]) == ("echo-r-0", 2, 3)
    assert first["split"] == "eval"
    assert first["tags"] == {"environment": "echo", "task_id": "11", "run_id": "r"}
    assert server.finished["echo-r-0-2"] == {"reward": 1.0, "status": "completed", "metrics": {"length": 2}}
    assert sorted(server.keys) == sorted(f"Bearer key-{session}" for session in server.sessions)


async def test_a_session_of_somebody_else_is_left_alone() -> None:
    async with serving(repeat) as server:
        server.sessions["echo-r-0-0"] = {}
        statistics, _ = await roll_out(server, plan(groups=1, group_size=1))
    assert (statistics.rollouts, list(server.finished), server.abandoned) == (1, ["echo-r-0-0-retry1"], {})


class Wordy(Echo):
    async def rollout(self, task: Number, client: Chat) -> Outcome:
        raise LookupError("x" * 3000)


async def test_a_session_is_abandoned_with_a_reason_that_a_gateway_takes() -> None:
    async with serving(repeat) as server:
        await roll_out(server, plan(groups=1, group_size=1), Wordy())
    assert server.abandoned
    assert all(0 < len(reason) <= REASON_CHARS_MAX for reason in server.abandoned.values())


async def test_a_plain_server_needs_no_sessions() -> None:
    async with serving(repeat) as server:
        statistics, _ = await roll_out(server, plan(), sessions=False)
        with_v1 = Server(f"{server.url}/v1/", Sampling("policy"), sessions=False)
        async with with_v1:
            await with_v1.check()
    assert statistics.rollouts == 6
    assert server.sessions == {}


async def test_a_full_server_is_asked_again_when_it_said() -> None:
    async with serving(repeat) as server:
        for kind in ("open", "chat", "finish"):
            server.refuse[kind].append(Refusal(429, {"Retry-After": "0.02"}))
            server.refuse[kind].append(Refusal(503))
        statistics, lines = await roll_out(server, plan())
    assert (statistics.rollouts, statistics.failed, statistics.retries) == (6, 0, 6)
    assert sum(line["retries"] for line in lines) == 6
    assert len(server.finished) == 6


async def test_the_progress_says_why_requests_wait() -> None:
    async with serving(repeat) as server, Server(server.url, Sampling("policy")) as client:
        server.refuse["chat"].append(
            Refusal(429, {"Retry-After": "50"}, '{"error": {"message": "no engine has room"}}')
        )
        runner, stop = Runner(Echo(), client, plan(groups=1, group_size=1, concurrency=1)), asyncio.Event()
        assert runner.statistics().waits_for == ""
        running = asyncio.create_task(runner.run(stop))
        async with asyncio.timeout(60):
            while not runner.statistics().waits_for:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert describe(runner.statistics()).endswith("0.0 tokens/s; told to wait: http 429: no engine has room")
        stop.set()
        assert (await running).waits_for == ""


async def test_a_finish_whose_answer_was_lost_is_sent_again_and_its_sample_counts_once() -> None:
    async with serving(repeat) as server:
        server.lost += [None, Refusal(502, body="a page of a proxy")]
        statistics, _ = await roll_out(server, plan(groups=1))
    assert (statistics.rollouts, statistics.failed, statistics.retries) == (3, 0, 2)
    assert (len(server.finished), server.abandoned) == (3, {})


async def test_a_turn_whose_answer_was_lost_is_asked_for_again_by_its_key() -> None:
    async with serving(repeat) as server:
        server.cut_chats = 2
        statistics, _ = await roll_out(server, plan(groups=1, concurrency=1))
    assert (statistics.rollouts, statistics.failed, statistics.retries) == (3, 0, 2)
    assert (len(server.sessions), server.abandoned) == (3, {})
    first, *again, second, third = server.turn_keys
    assert again == [first] * 2
    assert len({first, second, third}) == 3


async def test_without_sessions_a_turn_has_no_key_and_is_not_made_twice() -> None:
    async with serving(repeat) as server:
        server.cut_chats = 1
        statistics, _ = await roll_out(server, plan(groups=1, concurrency=1), sessions=False)
    assert (statistics.rollouts, statistics.failed, statistics.retries) == (3, 1, 0)
    assert set(server.turn_keys) == {None}


async def test_a_call_waits_for_a_full_server_longer_than_its_patience() -> None:
    async with serving(repeat) as server:
        server.refuse["chat"] += [Refusal(429, {"Retry-After": "0.02"})] * 5
        statistics, _ = await roll_out(server, plan(groups=1, group_size=1), patience_s=0.01)
    assert (statistics.rollouts, statistics.failed, statistics.retries) == (1, 0, 5)


async def test_a_wait_for_a_full_server_ends_with_the_limit_of_a_call() -> None:
    async with serving(repeat) as server:
        server.refuse["chat"].append(Refusal(429, {"Retry-After": "3600"}))
        limits = PhaseLimits(model_s=0.05)
        statistics, lines = await roll_out(server, plan(groups=1, group_size=1, attempts=1, limits=limits))
    assert (statistics.failed, lines[0]["error"]["kind"], lines[0]["error"]["phase"]) == (1, "timeout", "model")
    assert lines[0]["error"]["message"] == "model took longer than 0.05 s; last told to wait: http 429: scripted"


async def test_a_server_without_sessions_that_is_full_is_waited_for_with_patience() -> None:
    async with serving(repeat) as server:
        server.refuse["chat"].append(Refusal(429, {"Retry-After": "60"}, '{"error": {"message": "no quota is left"}}'))
        once = plan(groups=1, group_size=1, attempts=1)
        statistics, lines = await asyncio.wait_for(roll_out(server, once, sessions=False), 50)
    assert (statistics.failed, lines[0]["error"]["kind"]) == (1, "http 429")
    assert lines[0]["error"]["message"] == "no quota is left"


PHASES = {"chat": "model", "open": "session", "finish": "session"}


@pytest.mark.parametrize(("kind", "boundary"), [("chat", "model"), ("open", "session"), ("finish", "session")])
async def test_a_failed_sample_starts_anew_in_another_session(kind: str, boundary: str) -> None:
    async with serving(repeat) as server:
        server.refuse[kind].append(Refusal(500, body="the engine is gone"))
        statistics, lines = await roll_out(server, plan(groups=1, concurrency=1))
    assert (statistics.rollouts, statistics.failed, statistics.groups_completed) == (3, 1, 1)
    failed = lines[0]
    assert failed["error"] == {
        "boundary": boundary,
        "kind": "http 500",
        "message": "the engine is gone",
        "phase": PHASES[kind],
    }
    assert (failed["status"], failed["reward"], failed["attempt"]) == ("failed", None, 1)
    assert (lines[1]["session_id"], lines[1]["attempt"]) == ("echo-r-0-0-retry1", 2)
    assert set(server.abandoned) == ({"echo-r-0-0"} if kind != "open" else set())


async def test_an_error_of_the_environment_is_its_own_and_spares_the_others() -> None:
    async with serving(repeat) as server:
        statistics, lines = await roll_out(
            server, plan(groups=3, group_size=2, attempts=2), Echo(broken=frozenset({1}))
        )
    assert (statistics.rollouts, statistics.groups_completed) == (4, 2)
    assert (statistics.failed, statistics.given_up) == (4, 2)
    errors = [line["error"] for line in lines if line["error"] is not None]
    assert (
        errors
        == [{"boundary": "environment", "kind": "LookupError", "message": "no answer for 1", "phase": "tool"}] * 4
    )


@pytest.mark.slow
@pytest.mark.parametrize("reward", [True, np.float32(0.5), np.int64(1)])
async def test_whatever_is_a_number_is_a_reward(reward: Any) -> None:
    async with serving(repeat) as server:
        _, lines = await roll_out(server, plan(), Given(Outcome(reward, metrics={"m": reward})))
        assert {end["reward"] for end in server.finished.values()} == {float(reward)}
    assert [(line["reward"], line["metrics"]) for line in lines] == [(float(reward), {"m": float(reward)})] * 6


class Given(Echo):
    """Whose outcome is what `outcome` returns, or the outcome itself."""

    def __init__(self, outcome: Any) -> None:
        super().__init__()
        self.outcome = outcome

    async def rollout(self, task: Number, client: Chat) -> Outcome:
        await super().rollout(task, client)
        found: Outcome = self.outcome() if callable(self.outcome) else self.outcome
        return found


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (lambda: Outcome(float("nan")), "the reward is nan"),
        (lambda: Outcome(np.float32("inf")), "the reward is inf"),
        (lambda: Outcome(1.0, metrics={"loss": float("nan")}), "metric 'loss' is nan"),
        (lambda: Outcome("good"), "the reward is no number: 'good'"),  # type: ignore[arg-type]
        (lambda: 0.5, "gave 0.5 where an Outcome is needed"),
        (lambda: None, "gave None where an Outcome is needed"),
    ],
)
async def test_what_is_no_finite_number_fails_its_rollout_and_leaves_no_session(outcome: Any, said: str) -> None:
    async with serving(repeat) as server:
        statistics, lines = await roll_out(server, plan(groups=1, attempts=1), Given(outcome))
        assert (statistics.failed, server.finished) == (3, {})
        assert set(server.abandoned) == set(server.sessions)
    assert all(said in line["error"]["message"] for line in lines)


@pytest.mark.parametrize(("turns", "attempts"), [(0, 1), (1, 3)])
async def test_a_first_call_that_is_refused_is_not_made_again_and_told_of_once(
    turns: int, attempts: int, caplog: pytest.LogCaptureFixture
) -> None:
    class Talks(Echo):
        async def rollout(self, task: Number, client: Chat) -> Outcome:
            for _ in range(turns):
                await super().rollout(task, client)
            server.refuse["chat"].append(Refusal(400, body="max_tokens is no number"))
            return await super().rollout(task, client)

    async with serving(repeat) as server:
        statistics, lines = await roll_out(server, plan(groups=1, concurrency=1), Talks())
    assert [line["attempt"] for line in lines] == list(range(1, attempts + 1)) * 3
    assert (statistics.given_up, {line["error"]["kind"] for line in lines}) == (3, {"http 400"})
    failed = [record.message for record in caplog.records if "failed: " in record.message]
    assert failed == ["rollout echo-r-0-0 failed: model (http 400): max_tokens is no number"]


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (404, r"no sessions: it is no gateway .*--no-sessions is for other servers"),
        (403, r"refuses sessions to the key in LAMINAR_API_KEY: scripted"),
    ],
)
async def test_a_server_that_opens_no_session_is_named_at_once(status: int, said: str) -> None:
    async with serving(repeat) as server:
        server.refuse["open"].extend([Refusal(status)] * 4)
        with pytest.raises(RunFailed, match=said):
            await roll_out(server, plan())
    assert server.sessions == {}


@pytest.mark.parametrize("status", [403, 404])
async def test_once_a_session_was_opened_such_an_answer_is_a_failed_try(status: int) -> None:
    async with serving(repeat) as server, Server(server.url, Sampling("policy")) as client:
        await Runner(Echo(), client, plan(groups=1, group_size=1)).run(asyncio.Event())
        server.refuse["open"].append(Refusal(status))
        runner = Runner(Echo(), client, plan(run_id="later", groups=1, group_size=1))
        statistics = await runner.run(asyncio.Event())
    assert (statistics.rollouts, statistics.failed) == (1, 1)


async def test_failures_without_end_stop_the_run_and_name_the_last() -> None:
    async with serving(repeat) as server:
        server.refuse["chat"].extend([Refusal(500, body="out of disk")] * 100)
        with pytest.raises(RunFailed, match=r"4 rollouts in a row failed: model \(http 500\): out of disk"):
            await roll_out(server, plan(groups=0, concurrency=1, failures_max=4))


async def test_stopping_abandons_what_is_open_and_keeps_what_is_done() -> None:
    async with serving(repeat) as server:
        stop, server.hold = asyncio.Event(), asyncio.Event()
        running = asyncio.create_task(roll_out(server, plan(groups=0), stop=stop))
        async with asyncio.timeout(60):
            await server.chats_reach(4)
        stop.set()
        statistics, lines = await running
    assert (statistics.rollouts, statistics.abandoned, statistics.running) == (0, 4, 0)
    assert set(server.abandoned) == set(server.sessions)
    assert set(server.abandoned.values()) == {"the run was stopped"}
    assert [line["status"] for line in lines] == ["abandoned"] * 4


async def test_stopping_does_not_wait_for_a_server_that_is_gone() -> None:
    async with serving(repeat) as server:
        stop, server.hold = asyncio.Event(), asyncio.Event()
        running = asyncio.create_task(roll_out(server, plan(groups=0), stop=stop))
        async with asyncio.timeout(60):
            await server.chats_reach(4)  # all have connected: none is accepted in the moment in which the server ends
    stop.set()
    statistics, _ = await asyncio.wait_for(running, 60)
    assert statistics.running == 0


async def test_a_run_ends_after_its_time() -> None:
    async with serving(repeat) as server:
        begun = asyncio.get_running_loop().time()
        statistics, _ = await asyncio.wait_for(roll_out(server, plan(groups=0, duration_s=0.3)), 60)
        assert asyncio.get_running_loop().time() - begun >= 0.3
    # a reward that was on its way at the end may have arrived: its session counts as abandoned here
    assert statistics.rollouts <= len(server.finished) <= statistics.rollouts + statistics.abandoned


@pytest.mark.slow
async def test_an_answer_that_is_no_session_or_no_completion_is_attributed() -> None:
    async with serving(repeat) as server:
        server.refuse["open"].append(Refusal(200, body="[]"))
        server.refuse["open"].append(Refusal(200, body="{}"))
        server.refuse["chat"].append(Refusal(200, body='{"id": "x", "choices": []}'))
        _, lines = await roll_out(server, plan(groups=1, group_size=1, attempts=4))
    assert [(line["error"] or {}).get("boundary") for line in lines] == ["session", "session", "model", None]


async def test_a_tool_chain_runs_turn_by_turn_through_one_session_each() -> None:
    async with serving(perfect) as server:
        statistics, lines = await roll_out(server, plan(groups=6, group_size=2), ToolChain())
    assert statistics.reward_mean == 1.0
    assert all(line["turns"] == line["metrics"]["calls"] + 1 for line in lines)
    assert statistics.turns == len(server.chats)


async def test_check_names_the_models_there_are() -> None:
    async with serving(repeat, model="other") as server, Server(server.url, Sampling("policy")) as client:
        with pytest.raises(RunFailed, match="has no model 'policy'; --model may be other"):
            await client.check()


async def test_check_says_what_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(repeat) as server:
        pass  # its port is closed now
    async with Server(server.url, Sampling("policy"), patience_s=0.5) as client:
        with caplog.at_level("INFO"), pytest.raises(RunFailed, match=r"cannot be reached: .*connection"):
            await client.check()
    assert [r.message for r in caplog.records if "waiting for" in r.message] == [caplog.records[0].message]
