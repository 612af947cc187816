"""The phases of a rollout, and the time that each may take.

A rollout begins in `reset`, until its first call of the model. Each call is `model`; what lies between two calls, and
after the last one, is `tool`. An environment that scores for long says so:

    with phase("score"):
        reward = await judge(answer)

Invariants:
- exactly one phase runs at any time; each begins with its whole time again;
- a phase whose time is over ends the rollout with `PhaseTimedOut`, which names it; code that blocks its thread is not
  interrupted before its next `await`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from agents_env.environment import Chat, Message, Reply, Tool
from protos.options import Flag

Phase = Literal["reset", "model", "tool", "score"]


@dataclass(frozen=True, slots=True)
class PhaseLimits:
    """Seconds. A model call's time includes its wait for a server that is full or away."""

    reset_s: Annotated[
        float,
        Meta(gt=0),
        Flag("--reset-timeout-s"),
        "Limit of a rollout's beginning, up to its first model call.",
    ] = 120.0
    model_s: Annotated[
        float, Meta(gt=0), Flag("--model-timeout-s"), "Limit of one model call, with its wait for a full server."
    ] = 900.0
    tool_s: Annotated[
        float,
        Meta(gt=0),
        Flag("--tool-timeout-s"),
        "Limit of what happens between two model calls, or after the last.",
    ] = 600.0
    score_s: Annotated[
        float, Meta(gt=0), Flag("--score-timeout-s"), "Limit of the scoring, in environments that mark it."
    ] = 300.0

    def of(self, phase: Phase) -> float:
        return {"reset": self.reset_s, "model": self.model_s, "tool": self.tool_s, "score": self.score_s}[phase]


class PhaseTimedOut(Exception):
    def __init__(self, phase: Phase, limit_s: float, waited_for: str) -> None:
        told = f"; last told to wait: {waited_for}" if waited_for and phase == "model" else ""
        super().__init__(f"{phase} took longer than {limit_s:g} s{told}")
        self.phase = phase


class Phases:
    """The phases of one rollout."""

    def __init__(self, limits: PhaseLimits) -> None:
        self.current: Phase = "reset"
        self._limits = limits
        self._timer: asyncio.Timeout | None = None
        self._calls = 0
        self._waited_for = ""

    def waits(self, reason: str) -> None:
        """A call of the model was told to wait."""
        self._waited_for = reason

    def enter(self, phase: Phase) -> None:
        self.current = phase
        if self._timer is not None and not self._timer.expired():
            self._timer.reschedule(asyncio.get_running_loop().time() + self._limits.of(phase))

    @contextlib.asynccontextmanager
    async def limited(self) -> AsyncIterator[None]:
        """Runs the rollout within its limits. Raises PhaseTimedOut."""
        running = _running.set(self)
        try:
            async with asyncio.timeout(None) as self._timer:
                self.enter("reset")
                yield
        except TimeoutError as error:
            if self._timer is None or not self._timer.expired():
                raise
            raise PhaseTimedOut(self.current, self._limits.of(self.current), self._waited_for) from error
        finally:
            _running.reset(running)

    def chat(self, chat: Chat) -> Chat:
        return _PhasedChat(chat, self)

    async def call(self, chat: Chat, messages: list[Message], max_tokens: int, tools: Sequence[Tool]) -> Reply:
        """A call of the model. A rollout may have several at once: the phase is `model` until the last one ends."""
        if not self._calls:
            self._waited_for = ""  # by the calls before
        self._calls += 1
        self.enter("model")
        try:
            reply = await chat.reply(messages, max_tokens=max_tokens, tools=tools)
        finally:
            self._calls -= 1
        if not self._calls:
            self.enter("tool")  # not after an error, which belongs to the model
        return reply


@dataclass(frozen=True, slots=True)
class _PhasedChat:
    chat: Chat
    phases: Phases

    async def reply(self, messages: list[Message], *, max_tokens: int, tools: Sequence[Tool] = ()) -> Reply:
        return await self.phases.call(self.chat, messages, max_tokens, tools)


_running: ContextVar[Phases | None] = ContextVar("phases", default=None)


@contextlib.contextmanager
def phase(name: Phase) -> Iterator[None]:
    """Marks a block of a rollout. Outside of a runner it does nothing."""
    phases = _running.get()
    if phases is None:
        yield
        return
    before = phases.current
    phases.enter(name)
    yield
    phases.enter(before)  # not after an error, which belongs to this phase
