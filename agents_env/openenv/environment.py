"""OpenEnv as an environment: each rollout is an episode of its own on the server.

    user       the observation of reset
    assistant  an action: the reply, or calls of tools
    user|tool  the observation of step
    ...

until the environment is done, the model acts no more, or `turns_max` replies. The reward is what the environment gave:
the sum over its steps, or the last. It is passed on as it is, in whatever range the environment has.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agents_env.environment import Chat, Message, Outcome
from agents_env.openenv.actions import Act, Actions, actions, takes_calls, text_of
from agents_env.openenv.wire import BadAction, Episode, Step, action_schema, reset_when_free

TURNS_MAX = 32
MAX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Reset:
    """A task: the arguments of `reset`, such as a seed."""

    task_id: str
    arguments: Mapping[str, Any]


@dataclass(slots=True)
class _Played:
    """What the environment gave so far; the step of `reset` gives no reward, as no action was made."""

    done: bool
    rewards: list[float] = field(default_factory=list)
    steps: int = 0
    bad_actions: int = 0

    def add(self, step: Step) -> None:
        self.steps += 1
        self.done = step.done
        if step.reward is not None:
            self.rewards.append(step.reward)


class OpenEnv:
    """The environment that a server at `url` has. `reset`: arguments of every reset. `observe`: the fields of
    observations that the model reads; none: all of them."""

    name = "openenv"

    def __init__(
        self,
        url: str,
        *,
        reset: Mapping[str, Any] | None = None,
        observe: Sequence[str] = (),
        system: str | None = None,
        reward: Literal["sum", "last"] = "sum",
        turns_max: int = TURNS_MAX,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self._url = url.rstrip("/")
        self._reset, self._observe = dict(reset or {}), tuple(observe)
        self._opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._last_only = reward == "last"
        self._turns_max, self._max_tokens = turns_max, max_tokens

    def tasks(self, seed: int) -> Iterator[Reset]:
        rng = random.Random(f"openenv {seed}")
        while True:
            number = rng.getrandbits(31)
            yield Reset(f"seed-{number}", {"seed": number})

    def task_of(self, task_id: str, data: Mapping[str, Any]) -> Reset:
        """`data`: the arguments of `reset`, such as `{"seed": 7}`."""
        return Reset(task_id, data)

    def data_of(self, task: Reset) -> Mapping[str, Any]:
        return task.arguments

    async def rollout(self, task: Reset, client: Chat) -> Outcome:
        schema = await action_schema(self._url)
        async with contextlib.AsyncExitStack() as stack:
            episode, first = await reset_when_free(self._url, {**self._reset, **task.arguments}, stack)
            how = actions(schema, await episode.tools() if takes_calls(schema) else ())
            return await self._play(episode, first, how, client)

    async def _play(self, episode: Episode, first: Step, how: Actions, client: Chat) -> Outcome:
        messages: list[Message] = [
            *self._opening,
            {"role": "user", "content": text_of(first.observation, self._observe)},
        ]
        played, turns, ended, truncated = _Played(first.done), 0, False, False
        while not (played.done or ended) and turns < self._turns_max:
            reply = await client.reply(messages, max_tokens=self._max_tokens, tools=how.tools)
            turns, truncated = turns + 1, reply.truncated
            messages.append({"role": "assistant", "content": reply.text, "tool_calls": reply.tool_calls})
            found = how.of(reply)
            ended = not found
            messages.extend([act.result(await self._act(episode, act, played)) for act in found])
        metrics = {
            "steps": played.steps,
            "bad_actions": played.bad_actions,
            "rewards": len(played.rewards),
            "done": float(played.done),
        }
        cut = truncated or not (played.done or ended)
        return Outcome(self._reward(played.rewards), "truncated" if cut else "completed", metrics)

    async def _act(self, episode: Episode, act: Act, played: _Played) -> str:
        """Makes one action; returns what the model reads of it."""
        if played.done:
            return "error: the episode is over"
        if act.action is None:
            played.bad_actions += 1
            return act.error
        try:
            step = await episode.step(act.action)
        except BadAction as error:
            played.bad_actions += 1
            return f"error: {error}"
        played.add(step)
        return text_of(step.observation, self._observe)

    def _reward(self, rewards: Sequence[float]) -> float:
        """0 where no action was rewarded: a model that does not act has earned nothing."""
        return float(sum(rewards[-1:] if self._last_only else rewards))
