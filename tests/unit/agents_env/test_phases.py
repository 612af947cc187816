"""Each phase of a rollout has its own time, and a failure names the phase that it came from."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from agents_env.environment import Chat, Message, Reply, Tool
from agents_env.runner.phases import Phase, PhaseLimits, Phases, PhaseTimedOut, phase

SAY: list[Message] = [{"role": "user", "content": "?"}]
SHORT = 0.02


class Model:
    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.go.set()

    async def reply(self, messages: list[Message], *, max_tokens: int, tools: Sequence[Tool] = ()) -> Reply:
        await self.go.wait()
        return Reply("!")


async def forever() -> None:
    await asyncio.Event().wait()


async def in_reset(chat: Chat, model: Model) -> None:
    await forever()


async def in_model(chat: Chat, model: Model) -> None:
    await chat.reply(SAY, max_tokens=1)
    model.go.clear()
    await chat.reply(SAY, max_tokens=1)


async def in_tool(chat: Chat, model: Model) -> None:
    await chat.reply(SAY, max_tokens=1)
    await forever()


async def in_score(chat: Chat, model: Model) -> None:
    await chat.reply(SAY, max_tokens=1)
    with phase("score"):
        await forever()


@pytest.mark.parametrize(
    ("rollout", "name"), [(in_reset, "reset"), (in_model, "model"), (in_tool, "tool"), (in_score, "score")]
)
async def test_a_phase_ends_when_its_time_is_over_and_no_other_does(rollout: Any, name: Phase) -> None:
    long = {f"{other}_s": 600.0 for other in ("reset", "model", "tool", "score")}
    phases, model = Phases(PhaseLimits(**{**long, f"{name}_s": SHORT})), Model()
    with pytest.raises(PhaseTimedOut, match=f"{name} took longer than 0.02 s"):
        async with phases.limited():
            await rollout(phases.chat(model), model)
    assert phases.current == name


async def test_each_phase_begins_with_its_whole_time() -> None:
    phases, model = Phases(PhaseLimits(600, 600, 0.5, 600)), Model()
    async with phases.limited():
        chat = phases.chat(model)
        for _ in range(4):
            await chat.reply(SAY, max_tokens=1)
            await asyncio.sleep(0.2)  # together longer than one tool may take
        assert phases.current == "tool"


async def test_calls_beside_each_other_are_one_phase() -> None:
    phases, model = Phases(PhaseLimits()), Model()
    async with phases.limited():
        chat = phases.chat(model)
        model.go.clear()
        both = [asyncio.create_task(chat.reply(SAY, max_tokens=1)) for _ in range(2)]
        await asyncio.sleep(0)
        assert phases.current == "model"
        model.go.set()
        await asyncio.gather(*both)
        assert phases.current == "tool"
        with phase("score"):
            assert phases.current == "score"
        assert phases.current == "tool"


async def test_an_error_belongs_to_the_phase_that_it_came_from() -> None:
    phases = Phases(PhaseLimits())

    async def judge() -> None:
        with phase("score"):
            raise TimeoutError  # the environment's own

    with pytest.raises(TimeoutError):
        async with phases.limited():
            await judge()
    assert phases.current == "score"
    with phase("score"):
        pass  # outside of a runner it does nothing
