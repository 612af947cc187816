"""Writing a Python function: one question, one reply, and cases that run in the sandbox.

    user       Write `add(a, b)`, which returns the sum of two numbers.
    assistant  ```python
               def add(a, b):
                   return a + b
               ```

Scoring: 1 when the function returns what is expected in every case, else 0. `metrics` say how many cases are right, how
many raised an error, and which bound of the sandbox ended the run. The code is the last block of the reply that is
fenced by three backticks, or the whole reply without any.

Invariants:
- expected values never enter the sandbox: it returns what the function returned, and the comparison is here. So the
  code can win nothing by what it finds, prints or breaks there;
- what the function takes and returns are JSON values: a tuple returned counts as a list, and True is not 1.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agents_env.environment import Chat, Message, Outcome
from agents_env.environments.task_files import endless
from agents_env.runner.phases import phase
from agents_env.sandbox.client import Sandbox
from agents_env.sandbox.limits import Result

SYSTEM = "Write a Python function. Answer with its code alone, in one block fenced by ```python and ```."
OWN_TASKS = "code.jsonl"
MAX_TOKENS = 512
OF_RIGHT_MAX = 2
"""What the code may answer, over what is expected of it: other spaces, and digits of floats."""

_FENCED = re.compile(r"```[ \t]*(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")

_HARNESS = """
import json, os, sys, types
job = json.load(sys.stdin)
results = os.fdopen(os.dup(1), "w")
os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
module = sys.modules["solution"] = types.ModuleType("solution")
try:
    exec(compile(job["code"], "solution", "exec"), module.__dict__)
    function = module.__dict__[job["entry_point"]]
except BaseException as error:
    results.write(json.dumps({"error": repr(error)[:200]}) + chr(10))
    results.close()
    os._exit(1)
for arguments in job["calls"]:
    try:
        line = json.dumps({"value": function(*arguments)})
    except BaseException as error:
        line = json.dumps({"error": repr(error)[:200]})
    results.write(line + chr(10))
    results.flush()
os._exit(0)
"""
"""Runs in the sandbox. Whatever the code does to it, it can only change what it returns, which is the code's anyway."""


@dataclass(frozen=True, slots=True)
class Case:
    arguments: tuple[Any, ...]
    expected: Any


@dataclass(frozen=True, slots=True)
class FunctionTask:
    task_id: str
    prompt: str
    entry_point: str
    cases: tuple[Case, ...]


class Code:
    """The environment of this module."""

    name = "code"

    def __init__(self, tasks: Sequence[FunctionTask], sandbox: Sandbox, *, max_tokens: int = MAX_TOKENS) -> None:
        self._tasks = tasks
        self._sandbox = sandbox
        self._max_tokens = max_tokens

    def tasks(self, seed: int) -> Iterator[FunctionTask]:
        return endless(self._tasks, seed)

    def task_of(self, task_id: str, data: Mapping[str, Any]) -> FunctionTask:
        return function_task(task_id, data)

    def data_of(self, task: FunctionTask) -> Mapping[str, Any]:
        cases = [{"args": list(case.arguments), "expected": case.expected} for case in task.cases]
        return {"prompt": task.prompt, "entry_point": task.entry_point, "cases": cases}

    async def rollout(self, task: FunctionTask, client: Chat) -> Outcome:
        messages: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.prompt}]
        reply = await client.reply(messages, max_tokens=self._max_tokens)
        with phase("score"):
            result = await self._run(task, code_of(reply.text))
        right, raised = num_right(task.cases, result.stdout), num_raised(result.stdout)
        metrics = {
            "cases": len(task.cases),
            "cases_right": right,
            "cases_raised": raised,
            "ran_s": result.seconds,
            "timeout": result.ending == "timeout",
            "killed": result.ending == "killed",
            "output_cut": result.cut,
        }
        reward = float(right == len(task.cases))
        return Outcome(reward, "truncated" if reply.truncated else "completed", metrics)

    async def _run(self, task: FunctionTask, code: str) -> Result:
        calls = [list(case.arguments) for case in task.cases]
        job = {"code": code, "entry_point": task.entry_point, "calls": calls}
        right = sum(len(json.dumps(case.expected)) for case in task.cases)
        return await self._sandbox.run(
            ["-I", "-S", "-c", _HARNESS], json.dumps(job).encode(), answer_bytes=OF_RIGHT_MAX * right
        )


def function_task(task_id: str, data: Mapping[str, Any]) -> FunctionTask:
    """`data`: `{"prompt": ..., "entry_point": "add", "cases": [{"args": [1, 2], "expected": 3}]}`."""
    cases = tuple(Case(tuple(case["args"]), case["expected"]) for case in data["cases"])
    if not cases:
        raise ValueError("`cases` is empty: every reply would be right")
    if not _NAME.fullmatch(data["entry_point"]):
        raise ValueError(f"`entry_point` is the function's name, not {data['entry_point']!r}")
    return FunctionTask(task_id, str(data["prompt"]), data["entry_point"], cases)


def code_of(reply: str) -> str:
    blocks = _FENCED.findall(reply)
    return str(blocks[-1]) if blocks else reply


def num_right(cases: Sequence[Case], output: bytes) -> int:
    """How many lines of the harness's output are what the cases expect."""
    return sum(_is_right(case.expected, line) for case, line in zip(cases, output.splitlines(), strict=False))


def _is_right(expected: Any, line: bytes) -> bool:
    try:
        answer = json.loads(line)
        return isinstance(answer, dict) and "value" in answer and equal(answer["value"], expected)
    except (ValueError, RecursionError):  # cut, no JSON, a number of too many digits, or nested too deeply
        return False


def num_raised(output: bytes) -> int:
    """How many lines of the harness's output are errors. One alone, before any case, is that of the code as a whole."""
    return sum(line.startswith(b'{"error"') for line in output.splitlines())


def equal(value: Any, expected: Any) -> bool:
    """Equality of JSON values; floats to nine digits. RecursionError for values nested too deeply."""
    match expected:
        case bool() | None | str():
            return type(value) is type(expected) and bool(value == expected)
        case int():
            return isinstance(value, int | float) and not isinstance(value, bool) and value == expected
        case float():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return is_number and abs(value) < 1e300 and math.isclose(value, expected, rel_tol=1e-9, abs_tol=1e-12)
        case list():
            return isinstance(value, list) and len(value) == len(expected) and all(map(equal, value, expected))
        case dict():
            same_keys = isinstance(value, dict) and value.keys() == expected.keys()
            return same_keys and all(equal(value[key], expected[key]) for key in expected)
    return False
