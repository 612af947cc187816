"""What an environment is: a stream of tasks, and a way to roll one out against a model and score it.

Invariants:
- `tasks(seed)` yields the same tasks in the same order for the same seed, for ever;
- `rollout` keeps nothing between calls: any number run at once, and all samples of a group get the same task;
- a reward says how good the model was. Whatever prevents a judgement (model away, a broken task) is an exception.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypedDict, TypeVar

Metrics = Mapping[str, float]


class Message(TypedDict):
    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn of the model. `truncated`: it was cut at `max_tokens` and did not end by itself."""

    text: str
    truncated: bool = False
    completion_tokens: int = 0


class Chat(Protocol):
    """The model, as an environment sees it: one session, to which it sends the whole conversation at every turn."""

    async def reply(self, messages: list[Message], *, max_tokens: int) -> Reply:
        """The model's next turn. Raises what the runner attributes to the model; environments let it through."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one rollout. `metrics` are numbers for the eye and for the gateway's record, never for training."""

    reward: float
    status: Literal["completed", "truncated"] = "completed"
    metrics: Metrics = field(default_factory=dict)


class Task(Protocol):
    """One problem. What else it holds is its environment's business."""

    @property
    def task_id(self) -> str:
        """Names the task within its environment: equal ids are equal tasks."""
        ...


TaskT = TypeVar("TaskT", bound=Task)


class Environment(Protocol[TaskT]):
    """Two methods and a name; `environments/` has two examples to copy."""

    @property
    def name(self) -> str: ...

    def tasks(self, seed: int) -> Iterator[TaskT]:
        """Tasks without end."""
        ...

    async def rollout(self, task: TaskT, client: Chat) -> Outcome:
        """Plays one task to its end and scores it."""
        ...
