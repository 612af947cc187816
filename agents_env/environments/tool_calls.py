"""Real tool calls: the model gets a calculator by OpenAI's `tools`, in the format of its own chat template.

    user       What is (48 * 37) - 519?
    assistant  calls calculator {"expression": "48 * 37 - 519"}
    tool       1257
    assistant  1257

Scoring: half for a call whose result is the task's value, half for an answer whose last number is that value. A call
that is wrong in form gets an error as its result, and the model may try again, for `TURNS_MAX` turns in all.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from agents_env.environment import Chat, Message, Outcome, Tool, ToolCall
from agents_env.environments.calculator import BadExpression, calculate, format_number

SYSTEM = "Use the calculator for every computation. Then answer with the number alone."
TURNS_MAX = 5
MAX_TOKENS = 128
CALLS_MAX = 8
"""Calls of one turn that are computed; those after them get an error."""

CALCULATOR = Tool(
    "calculator",
    "Computes an arithmetic expression of whole numbers.",
    {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "with + - * / and parentheses"}},
        "required": ["expression"],
    },
)
_NUMBER = re.compile(r"-?\d{1,12}(?:,\d{3})*")


@dataclass(frozen=True, slots=True)
class Expression:
    """A task: its value is a whole number, too long to be computed at a glance."""

    text: str

    @property
    def task_id(self) -> str:
        return self.text.replace(" ", "")

    @property
    def value(self) -> Fraction:
        return calculate(self.text)


class ToolCalls:
    """The environment of this module. Stateless: one instance serves any number of rollouts."""

    name = "tool-calls"

    def __init__(self, *, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens

    def tasks(self, seed: int) -> Iterator[Expression]:
        rng = random.Random(f"tool-calls {seed}")
        while True:
            yield draw_expression(rng)

    def task_of(self, task_id: str, data: Mapping[str, Any]) -> Expression:
        """`data`: `{"expression": "(48 * 37) - 519"}`."""
        calculate(data["expression"])
        return Expression(data["expression"])

    def data_of(self, task: Expression) -> Mapping[str, Any]:
        return {"expression": task.text}

    async def rollout(self, task: Expression, client: Chat) -> Outcome:
        messages: list[Message] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"What is {task.text}?"},
        ]
        calls = bad_calls = 0
        computed = False
        for _ in range(TURNS_MAX):
            reply = await client.reply(messages, max_tokens=self._max_tokens, tools=[CALCULATOR])
            messages.append({"role": "assistant", "content": reply.text, "tool_calls": reply.tool_calls})
            for number, call in enumerate(reply.tool_calls):
                value, result = answer_call(call) if number < CALLS_MAX else (None, "error: too many calls at once")
                calls += 1
                bad_calls += value is None
                computed = computed or value == task.value
                messages.append({"role": "tool", "content": result, "tool_call_id": call.call_id})
            if not reply.tool_calls:
                break
        answered = not reply.tool_calls and last_number(reply.text) == task.value
        metrics = {"calls": calls, "bad_calls": bad_calls, "computed": float(computed), "answer_right": float(answered)}
        return Outcome((computed + answered) / 2, "truncated" if reply.truncated else "completed", metrics)


def draw_expression(rng: random.Random) -> Expression:
    first, second, third = rng.randint(12, 99), rng.randint(12, 99), rng.randint(100, 999)
    product = f"({first} * {second})"
    return Expression(rng.choice((f"{product} + {third}", f"{product} - {third}", f"{third} + {product}")))


def answer_call(call: ToolCall) -> tuple[Fraction | None, str]:
    """The value of a call, None where it has none, and the result that the model reads."""
    if call.name != CALCULATOR.name:
        return None, f"error: there is no tool {call.name[:40]!r}, only {CALCULATOR.name}"
    try:
        arguments = json.loads(call.arguments)
        value = calculate(arguments["expression"])
    except BadExpression as error:
        return None, f"error: {error}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None, 'error: the arguments are {"expression": "..."}'
    return value, format_number(value)


def last_number(text: str) -> Fraction | None:
    found = _NUMBER.findall(text)
    return Fraction(int(found[-1].replace(",", ""))) if found else None
