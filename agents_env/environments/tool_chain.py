"""Multi-turn use of a tool: the model calls a calculator once for each step, sees the result, and answers at the end.

    user       Start with 12. Add 7.
    assistant  calc(12 + 7)
    user       19. Multiply by 3.
    assistant  calc(19 * 3)
    user       57. Result?
    assistant  57

Chains have 1 to 8 calls, most of them 1 or 2 and few 7 or 8: a long tail, as rollouts have it.
A call is plain text rather than an OpenAI tool call, for small models whose template knows no tools.

Scoring: the share of turns that were right, in [0, 1]. A call is right when the reply is nothing but one call and its
value is the result of the step on the number last shown; the answer is right when it is nothing but the result of
the whole chain. A wrong turn does not end the chain: the length is a property of the task, not of the model.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from agents_env.environment import Chat, Message, Outcome, Reply
from agents_env.environments.calculator import BadExpression, calculate, format_number

LENGTHS_OF_TEN: tuple[tuple[int, ...], ...] = (*((1,),) * 4, *((2,),) * 3, (3,), (4, 5), (6, 7, 8))
"""Every ten tasks in a row have chains of these lengths, one drawn from each entry, in random order. With independent
lengths, the mean reward of a dozen tasks would depend more on their lengths than on the model."""
VALUE_MAX = 200
"""Values stay between 0 and this: the task is to call the tool, not to copy long numbers."""
CALL_TOKENS_MAX = 20
"""Longest right call, `calc(199 - 9)`, is 9 tokens of SmolLM2; the rest is room for being wrong."""
ANSWER_TOKENS_MAX = 12

WORKED_EXAMPLE: tuple[Message, ...] = (
    {"role": "system", "content": "Call the calculator once for each step."},
    {"role": "user", "content": "Start with 3. Add 4."},
    {"role": "assistant", "content": "calc(3 + 4)"},
    {"role": "user", "content": "7. Multiply by 2."},
    {"role": "assistant", "content": "calc(7 * 2)"},
    {"role": "user", "content": "14. Result?"},
    {"role": "assistant", "content": "14"},
)
"""The beginning of every conversation. With instructions only, or with the example inside the system message,
SmolLM2-135M makes hardly a right call (a reward of 0 to 0.03); with the example as turns it starts at 0.7."""

Operation = Literal["Add", "Subtract", "Multiply by"]
_SYMBOL: dict[Operation, str] = {"Add": "+", "Subtract": "-", "Multiply by": "*"}
_CALL = re.compile(r"calc\(([^\n]*)\)")
_NUMBER = re.compile(r"-?\d{1,12}")


@dataclass(frozen=True, slots=True)
class Step:
    operation: Operation
    operand: int

    def __str__(self) -> str:
        return f"{self.operation} {self.operand}."

    def apply(self, value: Fraction) -> Fraction:
        match self.operation:
            case "Add":
                return value + self.operand
            case "Subtract":
                return value - self.operand
            case "Multiply by":
                return value * self.operand


@dataclass(frozen=True, slots=True)
class Chain:
    """A start and 1 to 8 steps."""

    start: int
    steps: tuple[Step, ...]

    @property
    def task_id(self) -> str:
        return str(self.start) + "".join(f"{_SYMBOL[step.operation]}{step.operand}" for step in self.steps)

    @property
    def answer(self) -> Fraction:
        value = Fraction(self.start)
        for step in self.steps:
            value = step.apply(value)
        return value


class ToolChain:
    """The environment of this module. Stateless: one instance serves any number of rollouts."""

    name = "tool-chain"

    def tasks(self, seed: int) -> Iterator[Chain]:
        rng = random.Random(f"tool-chain {seed}")
        while True:
            lengths = [rng.choice(choices) for choices in LENGTHS_OF_TEN]
            rng.shuffle(lengths)
            for length in lengths:
                yield draw_chain(rng, length)

    def task_of(self, task_id: str, data: Mapping[str, Any]) -> Chain:
        """`data`: `{"start": 12, "steps": [["Add", 7], ["Multiply by", 3]]}`."""
        steps = tuple(Step(operation, int(operand)) for operation, operand in data["steps"])
        if not steps or any(step.operation not in _SYMBOL for step in steps):
            raise ValueError(f"`steps` are one or more of {', '.join(_SYMBOL)}, each with a number")
        return Chain(int(data["start"]), steps)

    def data_of(self, task: Chain) -> Mapping[str, Any]:
        return {"start": task.start, "steps": [[step.operation, step.operand] for step in task.steps]}

    async def rollout(self, task: Chain, client: Chat) -> Outcome:
        conversation = list(WORKED_EXAMPLE)
        shown, prompt, calls_right = Fraction(task.start), f"Start with {task.start}. {task.steps[0]}", 0
        for position, step in enumerate(task.steps):
            call = await _turn(conversation, client, prompt, CALL_TOKENS_MAX)
            value = call_value(call.text)
            calls_right += value is not None and value == step.apply(shown)
            result = "Error: not one call"
            if value is not None:
                shown = value
                result = format_number(value)
            following = str(task.steps[position + 1]) if position + 1 < len(task.steps) else "Result?"
            prompt = f"{result}. {following}"
        answer = await _turn(conversation, client, prompt, ANSWER_TOKENS_MAX)
        answer_right = answer_value(answer.text) == task.answer
        reward = (calls_right + answer_right) / (len(task.steps) + 1)
        metrics = {"calls": len(task.steps), "calls_right": calls_right, "answer_right": float(answer_right)}
        return Outcome(reward, "truncated" if answer.truncated else "completed", metrics)


def draw_chain(rng: random.Random, length: int) -> Chain:
    start = value = rng.randint(2, 50)
    steps: list[Step] = []
    for _ in range(length):
        step = _draw_step(rng, value)
        value = int(step.apply(Fraction(value)))
        steps.append(step)
    return Chain(start, tuple(steps))


def _draw_step(rng: random.Random, value: int) -> Step:
    while True:
        operation: Operation = rng.choice(("Add", "Subtract", "Multiply by"))
        step = Step(operation, rng.randint(2, 3 if operation == "Multiply by" else 9))
        if 0 <= step.apply(Fraction(value)) <= VALUE_MAX:
            return step


def call_value(reply: str) -> Fraction | None:
    """The value of a reply that is one call and nothing else; None for any other reply."""
    match = _CALL.fullmatch(reply.strip())
    if match is None:
        return None
    try:
        return calculate(match[1])
    except BadExpression:
        return None


def answer_value(reply: str) -> Fraction | None:
    """The number that a reply is; None when it is anything more or else."""
    text = reply.strip().removesuffix(".")
    return Fraction(int(text)) if _NUMBER.fullmatch(text) else None


async def _turn(conversation: list[Message], client: Chat, prompt: str, max_tokens: int) -> Reply:
    conversation.append({"role": "user", "content": prompt})
    reply = await client.reply(conversation, max_tokens=max_tokens)
    conversation.append({"role": "assistant", "content": reply.text})
    return reply
