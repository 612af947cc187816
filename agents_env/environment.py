"""The protocol of an environment: a stream of tasks, and a rollout that plays one against a model and scores it.

Invariants:
- `tasks(seed)` is endless, and yields the same tasks in the same order for the same seed;
- `rollout` keeps nothing between calls: any number run at once, and all samples of a group get the same task;
- a reward scores the model. What prevents a score (the model is away, a task is broken) is an exception.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, Protocol, TypedDict, TypeVar, runtime_checkable

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made; `arguments` is what it wrote, which should be a JSON object and may be anything."""

    call_id: str
    name: str
    arguments: str


class Message(TypedDict):
    """`tool_calls` belong to an assistant's message, `tool_call_id` to a tool's, which is a result."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: NotRequired[Sequence[ToolCall]]
    tool_call_id: NotRequired[str]


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn of the model. `truncated`: it reached `max_tokens` before its end."""

    text: str
    truncated: bool = False
    completion_tokens: int = 0
    tool_calls: tuple[ToolCall, ...] = ()


class Chat(Protocol):
    """One session with the model; the environment sends the whole conversation at every turn."""

    async def reply(self, messages: list[Message], *, max_tokens: int, tools: Sequence[Tool] = ()) -> Reply:
        """The model's next turn, in which it may call `tools`. Environments do not catch its errors."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one rollout. `metrics` are for people and for the gateway's record, never for training.

    A reward lies in [0, 1]. "truncated": the last reply was cut at its most tokens; the reward is of what there was.
    Whatever `float` takes is a number: bools, and scalars of numpy and torch. ValueError for one that is not finite.
    """

    reward: float
    status: Literal["completed", "truncated"] = "completed"
    metrics: Metrics = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", _finite("the reward", self.reward))
        metrics = {name: _finite(f"metric {name!r}", value) for name, value in self.metrics.items()}
        object.__setattr__(self, "metrics", metrics)


def outcome_of(value: object) -> Outcome:
    """What an environment returned, or gave to a seat. TypeError for anything but an Outcome."""
    if not isinstance(value, Outcome):
        raise TypeError(f"the environment gave {value!r:.80} where an Outcome is needed, such as Outcome(1.0)")
    return value


def _finite(what: str, value: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} is no number: {value!r:.80}") from error
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}: a trainer could do nothing with it")
    return number


class Task(Protocol):
    """One problem; its further content is defined by its environment."""

    @property
    def task_id(self) -> str:
        """Names the task within its environment: equal ids are equal tasks."""
        ...


TaskT = TypeVar("TaskT", bound=Task)


@dataclass(frozen=True, slots=True)
class Access:
    """Where a session's model calls go, for whoever makes them itself: `base_url` ends in /v1, as OpenAI's clients take
    it. `sample_index`: which sample of its group the session is."""

    base_url: str
    api_key: str
    model: str
    session_id: str
    sample_index: int


@runtime_checkable
class SelfCallingEnvironment(Protocol):
    """An environment whose model calls do not go through the runner's `Chat`: `play` instead of `rollout`."""

    async def play(self, task: Any, access: Access) -> Outcome: ...


class Seats(Protocol):
    """The seats of a game beside the rollout's own session, each of which is a session of its own."""

    async def take(self, name: str, *, version: int | None = None) -> Chat:
        """A new player's chat. With a `version`, the player is of that weight version and is not trained on."""
        ...

    async def leave(self, name: str, outcome: Outcome) -> None:
        """Ends a player's session with its own reward. A seat that was not left ends without one."""
        ...


@runtime_checkable
class MatchEnvironment(Protocol):
    """An environment of several players: `match` instead of `rollout`. The outcome is that of `client`."""

    async def match(self, task: Any, client: Chat, seats: Seats) -> Outcome: ...


@runtime_checkable
class PooledEnvironment(Protocol):
    """What an environment needs besides to roll out tasks of a prompt pool."""

    def task_of(self, task_id: str, data: Mapping[str, Any]) -> Any:
        """The task that `data`, a JSON object of whoever filled the pool, describes. ValueError or KeyError, with what
        is wrong, for data that describes none."""
        ...

    def data_of(self, task: Any) -> Mapping[str, Any]:
        """What `task_of` makes the same task of: the way from an environment's own tasks into a pool."""
        ...


class Environment(Protocol[TaskT]):
    """A name and two methods; `environments/` has examples."""

    @property
    def name(self) -> str: ...

    def tasks(self, seed: int) -> Iterator[TaskT]:
        """An endless stream of tasks."""
        ...

    async def rollout(self, task: TaskT, client: Chat) -> Outcome:
        """Plays one task to its end and scores it."""
        ...
