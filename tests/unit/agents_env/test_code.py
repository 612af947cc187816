"""The code environment: what counts as right, and what code can and cannot do to its own score."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest

from agents_env import programs
from agents_env.environments.code import OWN_TASKS, Case, Code, FunctionTask, code_of, equal, function_task, num_right
from agents_env.environments.task_files import BadTaskFile, read_tasks
from agents_env.sandbox.client import Sandbox
from agents_env.sandbox.limits import Kind, Limits, Result
from tests.unit.agents_env.sandboxes import KINDS
from tests.unit.agents_env.scripted_chat import ScriptedChat

ADD = FunctionTask("add", "Write `add(a, b)`.", "add", (Case((1, 2), 3), Case((-1, 1), 0)))
LIMITS = Limits(time_s=60)
SIGNS = ("cases_raised", "timeout", "killed", "output_cut")


async def score(kind: Kind, reply: str, *, time_s: float = 60) -> tuple[float, float]:
    """The reward, and the number of right cases."""
    environment = Code([ADD], Sandbox(kind, Limits(time_s=time_s)), max_tokens=10_000)
    outcome = await environment.rollout(ADD, ScriptedChat(lambda _: reply))
    return outcome.reward, outcome.metrics["cases_right"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("reply", "scored"),
    [
        ("```python\ndef add(a, b):\n    return a + b\n```", (1.0, 2)),
        ("First\n```\nx\n```\nbetter:\n```py\nadd = lambda a, b: a + b\n```\ndone", (1.0, 2)),
        ("def add(a, b): return a + b", (1.0, 2)),
        (
            "def add(a, b):\n    import os\n    os.write(1, b'{\"value\": 3}\\n')\n    return a + b",
            (1.0, 2),
        ),
        ("def add(a, b): return 3", (0.0, 1)),
        ("def add(a, b): return a + b if a > 0 else 1 / 0", (0.0, 1)),
        ("def add(a, b): return a + b if a > 0 else exit()", (0.0, 1)),
        ("def add(a, b):\n    if a < 0: import os; os._exit(0)\n    return a + b", (0.0, 1)),
        ("def sum(a, b): return a + b", (0.0, 0)),
        ("I cannot do this.", (0.0, 0)),
        ("", (0.0, 0)),
        ("def add(a, b): return {a + b}", (0.0, 0)),
        ("def add(a, b): return '9' * 10 ** 9", (0.0, 0)),
        ("class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()", (0.0, 0)),
        ("import json\njson.dumps = lambda value: '{\"value\": true}'\ndef add(a, b): return 0", (0.0, 0)),
        ("def add(a, b):\n    x = []\n    for _ in range(9999): x = [x]\n    return x", (0.0, 0)),
    ],
)
@pytest.mark.slow
async def test_scores_what_the_function_returns(kind: Kind, reply: str, scored: tuple[float, float]) -> None:
    assert await score(kind, reply) == scored


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_a_loop_costs_its_own_cases_alone(kind: Kind) -> None:
    reply = "def add(a, b):\n    while a < 0: pass\n    return a + b"
    assert await score(kind, reply, time_s=2) == (0.0, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "reply", "reward", "said"),
    [
        (
            ADD,
            "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass Sum:\n"
            "    a: int\n    b: int\ndef add(a, b):\n    s = Sum(a, b)\n    return s.a + s.b",
            1.0,
            {},
        ),
        (FunctionTask("long", "", "f", (Case((), "x" * 200_000),)), "def f(): return 'x' * 200_000", 1.0, {}),
        (ADD, "def add(a, b): return 'x' * 200_000", 0.0, {"output_cut": 1.0}),
        (ADD, "import numpy\ndef add(a, b): return a + b", 0.0, {"cases_raised": 1.0}),
        (ADD, "def add(a, b): return a + b if a > 0 else 1 / 0", 0.0, {"cases_raised": 1.0}),
        (ADD, "import os\ndef add(a, b): os.kill(os.getpid(), 9)", 0.0, {"killed": 1.0}),
    ],
)
async def test_the_metrics_say_why_code_that_may_be_right_scores_nothing(
    task: FunctionTask, reply: str, reward: float, said: dict[str, float]
) -> None:
    outcome = await Code([task], Sandbox(limits=LIMITS)).rollout(task, ScriptedChat(lambda _: reply))
    assert outcome.reward == reward
    assert {name: value for name, value in outcome.metrics.items() if name in SIGNS and value} == said


class RecordingSandbox(Sandbox):
    sent = b""

    async def run(self, arguments: Sequence[str], stdin: bytes = b"", *, answer_bytes: int = 0) -> Result:
        self.sent += " ".join(arguments).encode() + stdin
        return await super().run(arguments, stdin, answer_bytes=answer_bytes)


@pytest.mark.slow
async def test_the_expected_values_do_not_enter_the_sandbox() -> None:
    sandbox = RecordingSandbox(limits=LIMITS)
    task = FunctionTask("echo", "", "echo", (Case(("given",), "given"), Case(("known",), "expected")))
    outcome = await Code([task], sandbox).rollout(task, ScriptedChat(lambda _: "def echo(x): return x"))
    assert outcome.metrics["cases_right"] == 1
    assert b"known" in sandbox.sent
    assert b"expected" not in sandbox.sent


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (3, 3, True),
        (3.0, 3, True),
        (3, 3.0, True),
        (True, 1, False),
        (1, True, False),
        (0.1 + 0.2, 0.3, True),
        (10**400, 1.0, False),
        (None, None, True),
        (0, None, False),
        ("a", "a", True),
        ([1, [2.0]], [1, [2]], True),
        ([1], [1, 2], False),
        ({"a": 1}, {"a": 1.0}, True),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        (float("nan"), 1.0, False),
    ],
)
def test_equality_of_values(value: object, expected: object, same: bool) -> None:
    assert equal(value, expected) is same


def test_output_that_is_cut_or_no_json_is_wrong() -> None:
    cases = (Case((), 1), Case((), 2), Case((), 3))
    assert num_right(cases, b'{"value": 1}\n[\n{"value": 3') == 1
    assert num_right(cases, b"[" * 60_000) == 0
    assert num_right(cases, b'{"value": ' + b"9" * 60_000 + b"}") == 0


def test_the_last_block_is_the_code() -> None:
    assert code_of("a\n```python\nx = 1\n```\n```python\nx = 2\n```\nb") == "x = 2\n"
    assert code_of("x = 3") == "x = 3"


def test_the_tasks_of_the_package_are_endless_and_the_same_for_a_seed() -> None:
    tasks = read_tasks(None, OWN_TASKS, function_task)
    environment = Code(tasks, Sandbox.__new__(Sandbox))
    first, again = (list(islice(environment.tasks(7), 40)) for _ in range(2))
    assert first == again != list(islice(environment.tasks(8), 40))
    assert {task.task_id for task in first} == {task.task_id for task in tasks}
    for task in tasks:
        assert environment.task_of(task.task_id, json.loads(json.dumps(environment.data_of(task)))) == task


def test_a_task_may_hold_what_python_takes_for_the_end_of_a_line(tmp_path: Path) -> None:
    text = "add\u2028two\x85numbers"
    line = json.dumps(
        {"prompt": text, "entry_point": "add", "cases": [{"args": [1, 2], "expected": 3}]}, ensure_ascii=False
    )
    (tmp_path / "tasks.jsonl").write_text(f"{line}\n{line}\n")
    tasks = read_tasks(tmp_path / "tasks.jsonl", OWN_TASKS, function_task)
    assert [task.prompt for task in tasks] == [text, text]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: "),
        ("[]", "line 2: not a JSON object"),
        ('{"prompt": "x", "entry_point": "f"}', "line 2: the field 'cases' lacks"),
        ('{"prompt": "x", "entry_point": "f", "cases": []}', "line 2: `cases` is empty"),
        ('{"prompt": "x", "entry_point": "f()", "cases": [{"args": [], "expected": 1}]}', "line 2: `entry_point` is"),
    ],
)
def test_a_bad_line_of_a_task_file_is_named(tmp_path: Path, line: str, said: str) -> None:
    good = '{"prompt": "x", "entry_point": "f", "cases": [{"args": [], "expected": 1}]}'
    (tmp_path / "tasks.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(BadTaskFile, match=said.replace("(", r"\(").replace(")", r"\)")):
        read_tasks(tmp_path / "tasks.jsonl", OWN_TASKS, function_task)


def test_a_task_file_of_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes('{"id": 1}\n{"id": "caf\u00e9"}\n'.encode("latin-1"))
    for read in (programs.read_tasks, lambda path: read_tasks(path, OWN_TASKS, function_task)):
        with pytest.raises(BadTaskFile, match=r"line 2: not UTF-8 .*iconv -f latin1 -t utf-8"):
            read(path)


def test_a_task_file_without_tasks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("\n")
    with pytest.raises(BadTaskFile, match="has no tasks"):
        read_tasks(tmp_path / "tasks.jsonl", OWN_TASKS, function_task)
