"""Problems of mathematics: one question, one reply, scored by the `math-verify` library.

    user       What is 1/3 + 1/6?
    assistant  Both are sixths: 2/6 + 1/6 = 3/6. \\boxed{1/2}

Scoring: 1 when the library finds an answer in the reply that equals the task's, else 0. Fractions, sets, intervals,
percentages, roots and polynomials are equal when they are so mathematically, however they are written.

Invariants:
- an answer is judged in a process of a pool, with a hard limit of time and of memory. The library's own limit is a
  signal, which does not interrupt `9^(9^(9^9))`. A worker that hangs or dies costs its one score, which is 0;
- a worker does not outlive this process.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, Literal

from agents_env.environment import Chat, Message, Outcome
from agents_env.environments.task_files import endless
from agents_env.runner.phases import phase

SYSTEM = "Solve the problem. End with the answer in \\boxed{...}."
OWN_TASKS = "math.jsonl"
MAX_TOKENS = 512
JUDGE_S = 10.0
"""For one answer: the library takes 3 to 435 ms for honest ones, and gives up after 5 s where its signal arrives."""
MEMORY_BYTES = 2 << 30
"""Address space of a worker; sympy takes a quarter of it."""
REPLY_MAX = 4000
"""Characters of a reply, from its end, in which the answer is looked for."""
_PR_SET_PDEATHSIG = 1

Verdict = Literal["right", "wrong", "timeout", "died"]


class BadAnswer(ValueError):
    """The task's own answer is nothing that the library reads."""


@dataclass(frozen=True, slots=True)
class MathTask:
    task_id: str
    problem: str
    answer: str


class Scorer:
    """Judges replies in `num_workers` processes, which start with the first one."""

    def __init__(
        self, num_workers: int = 2, *, judge_s: float = JUDGE_S, judge: Callable[[str, str], bool] | None = None
    ) -> None:
        self._num_workers = num_workers
        self._judge_s = judge_s
        self._judge = judge or is_right
        self._pool: Any = None

    async def verdict(self, answer: str, reply: str) -> Verdict:
        """Raises BadAnswer."""
        from pebble import ProcessExpired

        future = self._started().schedule(self._judge, args=(answer, reply[-REPLY_MAX:]), timeout=self._judge_s)
        try:
            return "right" if await asyncio.wrap_future(future) else "wrong"
        except (TimeoutError, FutureTimeoutError):
            return "timeout"
        except (ProcessExpired, MemoryError):
            return "died"

    def close(self) -> None:
        """Ends the workers, whatever they do."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def _started(self) -> Any:
        if self._pool is None:
            from pebble import ProcessPool

            self._pool = ProcessPool(
                max_workers=self._num_workers,
                initializer=_prepare_worker,
                initargs=(os.getpid(),),
                context=multiprocessing.get_context("spawn"),  # a fork would share this process's sockets
            )
        return self._pool


class Mathematics:
    """The environment of this module."""

    name = "math"

    def __init__(self, tasks: Sequence[MathTask], scorer: Scorer, *, max_tokens: int = MAX_TOKENS) -> None:
        self._tasks = tasks
        self._scorer = scorer
        self._max_tokens = max_tokens

    def tasks(self, seed: int) -> Iterator[MathTask]:
        return endless(self._tasks, seed)

    def task_of(self, task_id: str, data: Mapping[str, Any]) -> MathTask:
        return math_task(task_id, data)

    def data_of(self, task: MathTask) -> Mapping[str, Any]:
        return {"problem": task.problem, "answer": task.answer}

    async def rollout(self, task: MathTask, client: Chat) -> Outcome:
        messages: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.problem}]
        reply = await client.reply(messages, max_tokens=self._max_tokens)
        with phase("score"):
            verdict = await self._scorer.verdict(task.answer, reply.text)
        metrics = {"unjudged": float(verdict in ("timeout", "died")), "completion_tokens": reply.completion_tokens}
        return Outcome(float(verdict == "right"), "truncated" if reply.truncated else "completed", metrics)


def math_task(task_id: str, data: Mapping[str, Any]) -> MathTask:
    """`data`: `{"problem": "What is 1/3 + 1/6?", "answer": "1/2"}`; the answer in LaTeX, with or without dollars."""
    if not str(data["answer"]).strip():
        raise ValueError("`answer` is empty")
    return MathTask(task_id, str(data["problem"]), str(data["answer"]))


def is_right(answer: str, reply: str) -> bool:
    """Whether the reply's answer equals `answer`. In a worker: the library's limit needs a process's main thread."""
    from math_verify import parse, verify

    expected = parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$")
    if not expected:
        raise BadAnswer(f"math-verify reads no answer in {answer!r}")
    return bool(verify(expected, parse(reply)))


def _prepare_worker(parent: int) -> None:
    """Bounds a worker, ties its life to its parent's, and loads what takes a second, which no answer's time pays."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it died before the line above
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    import math_verify  # noqa: F401
