"""Single-turn problems with a verifier, from the `reasoning-gym` library: one question, one reply.

Each conversation begins with worked examples, other problems of the same dataset with their answers: they show the
form of answers that the dataset's verifier expects.

Scoring: the dataset's own `score_answer`, in [0, 1], with the whole reply as the answer. The library gives partial
credit for a reply that holds the answer among other words: the more words, the less.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agents_env.environment import Chat, Message, Outcome

SYSTEM = "Write only the answer."

DEFAULT_DATASET = "letter_counting"
DEFAULT_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "letter_counting": {"min_words": 2, "max_words": 4},
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}
"""Default configurations, in which a model of 135 M parameters learns. Other datasets have the library's own."""

_STREAM_SIZE = 2**31
"""Number of tasks of a dataset. Tasks are generated on demand, so a large number costs nothing."""


_EXAMPLES_SEED = 4_000_000_000
"""Far from the seeds of tasks, so that no task is among the examples."""


class UnknownDataset(ValueError):
    """No such dataset, or it refuses its configuration."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A task; `entry` is the library's record of it, which `score_answer` takes."""

    task_id: str
    entry: Mapping[str, Any]


class Reasoning:
    """The environment of one dataset of reasoning-gym; `config` holds the dataset's keyword arguments."""

    name = "reasoning"

    def __init__(
        self,
        dataset: str = DEFAULT_DATASET,
        config: Mapping[str, Any] | None = None,
        *,
        num_examples: int = 1,
        max_tokens: int = 16,
    ) -> None:
        self._dataset = dataset
        self._config = dict(DEFAULT_CONFIGS.get(dataset, {}) if config is None else config)
        self._max_tokens = max_tokens
        self._scorer = _create(dataset, self._config, seed=_EXAMPLES_SEED)
        self._opening: list[Message] = [{"role": "system", "content": SYSTEM}]
        for index in range(num_examples):
            example = self._scorer[index]
            self._opening.append({"role": "user", "content": str(example["question"])})
            self._opening.append({"role": "assistant", "content": str(example["answer"])})

    def tasks(self, seed: int) -> Iterator[Problem]:
        # The library adds the index of a task to this seed: neighbouring seeds of ours must lie far apart.
        entries = _create(self._dataset, self._config, seed=(seed * 1_000_003) % _STREAM_SIZE)
        for index in range(_STREAM_SIZE):
            yield Problem(f"{self._dataset}-{seed}-{index}", entries[index])

    def task_of(self, task_id: str, data: Mapping[str, Any]) -> Problem:
        """`data`: an entry of this dataset, as the library makes them."""
        if missing := [name for name in ("question", "answer", "metadata") if name not in data]:
            raise ValueError(f"an entry of {self._dataset} has no {', '.join(missing)}")
        return Problem(task_id, data)

    def data_of(self, task: Problem) -> Mapping[str, Any]:
        return task.entry

    async def rollout(self, task: Problem, client: Chat) -> Outcome:
        question: Message = {"role": "user", "content": str(task.entry["question"])}
        reply = await client.reply([*self._opening, question], max_tokens=self._max_tokens)
        reward = float(self._scorer.score_answer(answer=reply.text.strip(), entry=dict(task.entry)))
        metrics = {"exact": float(reward == 1.0), "completion_tokens": reply.completion_tokens}
        return Outcome(reward, "truncated" if reply.truncated else "completed", metrics)


def datasets() -> list[str]:
    """Names of all datasets of the library."""
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


def _create(dataset: str, config: Mapping[str, Any], *, seed: int) -> Any:
    import reasoning_gym  # takes a second to import, which the others need not pay

    if dataset not in datasets():
        raise UnknownDataset(f"reasoning-gym has no dataset {dataset!r}; `agents-env list --datasets` names them")
    try:
        return reasoning_gym.create_dataset(dataset, seed=seed, size=_STREAM_SIZE, **config)
    except (TypeError, AssertionError, ValueError) as error:
        raise UnknownDataset(f"dataset {dataset} refuses {json.dumps(config)}: {error}") from error
