"""The math environment: math-verify's verdicts, and workers that hang or die."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from agents_env.environments.mathematics import OWN_TASKS, BadAnswer, Mathematics, MathTask, Scorer, math_task
from agents_env.environments.task_files import read_tasks
from tests.unit.agents_env.sandboxes import wait_until_gone, wait_until_there
from tests.unit.agents_env.scripted_chat import ScriptedChat

pytestmark = pytest.mark.slow  # each scorer starts processes that import sympy


@pytest.fixture
def scorer() -> Iterator[Scorer]:
    scorer = Scorer(1, judge_s=120)
    yield scorer
    scorer.close()


async def test_equal_answers_are_right_however_they_are_written(scorer: Scorer) -> None:
    task = MathTask("t", "What is 1/3 + 1/6?", "1/2")
    environment = Mathematics([task], scorer)
    replies = {
        "\\boxed{1/2}": 1.0,
        "It is $\\frac{3}{6}$.": 1.0,
        "The answer is 0.5": 1.0,
        "50%": 1.0,
        "\\boxed{1/3}": 0.0,
        "": 0.0,
        "\\boxed{" * 400: 0.0,
        "9^{9^{9^9}}": 0.0,
    }
    rewards = {}
    for reply in replies:
        rewards[reply] = (await environment.rollout(task, ScriptedChat(lambda _, said=reply: said))).reward  # type: ignore[misc]
    assert rewards == replies
    for task in read_tasks(None, OWN_TASKS, math_task):
        assert await scorer.verdict(task.answer, f"So it is \\boxed{{{task.answer}}}.") == "right", task
        assert await scorer.verdict(task.answer, "So it is \\boxed{77}.") == "wrong", task
    with pytest.raises(BadAnswer, match="reads no answer in"):
        await scorer.verdict("$\\text{}$", "\\boxed{1}")


def judge(answer: str, reply: str) -> bool:
    """Hangs, dies or runs out of memory where a reply says so, as a library in C could."""
    match reply:
        case "hang":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM, signal.SIGTERM, signal.SIGINT})
            time.sleep(600)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "grow":
            bytearray(1 << 40)
    return answer == reply


async def test_a_worker_that_hangs_or_dies_costs_one_score() -> None:
    scorer = Scorer(2, judge_s=6, judge=judge)
    try:
        assert await scorer.verdict("1", "1") == "right"
        replies = ["1", "hang", "die", "1", "grow", "1", "2"]
        verdicts = await asyncio.gather(*(scorer.verdict("1", reply) for reply in replies))
    finally:
        scorer.close()
    assert verdicts == ["right", "timeout", "died", "right", "died", "right", "wrong"]


CALLER = """
import asyncio, sys
from agents_env.environments.mathematics import Scorer
from tests.unit.agents_env.test_mathematics import judge
async def main():
    scorer = Scorer(2, judge_s=300, judge=judge)
    hanging = [asyncio.ensure_future(scorer.verdict("1", "hang")) for _ in range(2)]
    await asyncio.wait(hanging)
if __name__ == "__main__":
    asyncio.run(main())
"""


def test_workers_do_not_outlive_a_caller_that_is_killed() -> None:
    token = secrets.token_hex(8)
    with subprocess.Popen([sys.executable, "-c", CALLER], env=os.environ | {"LAMINAR_TEST_TOKEN": token}) as caller:
        wait_until_there(token, 3)
        caller.kill()
    wait_until_gone(token)
