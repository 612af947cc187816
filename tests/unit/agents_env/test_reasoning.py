"""Reasoning problems: the library's tasks and scores, reached through one turn."""

from __future__ import annotations

from itertools import islice

import pytest

from agents_env.environments.reasoning import Problem, Reasoning, UnknownDataset, datasets
from tests.unit.agents_env.scripted_chat import ScriptedChat

pytestmark = pytest.mark.slow


def problem(environment: Reasoning, seed: int = 5) -> Problem:
    return next(environment.tasks(seed))


@pytest.mark.parametrize("dataset", ["letter_counting", "chain_sum", "gcd"])
async def test_the_right_answer_is_worth_one_whatever_the_dataset(dataset: str) -> None:
    environment = Reasoning(dataset)
    task = problem(environment)
    outcome = await environment.rollout(task, ScriptedChat(lambda _: f" {task.entry['answer']}\n"))
    assert (outcome.reward, outcome.status) == (1.0, "completed")
    assert outcome.metrics["exact"] == 1.0


async def test_a_wrong_answer_is_worth_nothing_and_talk_less_than_the_answer_alone() -> None:
    environment = Reasoning("chain_sum")
    task = problem(environment)
    wrong = await environment.rollout(task, ScriptedChat(lambda _: "no idea"))
    talk = await environment.rollout(task, ScriptedChat(lambda _: f"It is {task.entry['answer']} I think"))
    assert wrong.reward <= 0.01
    assert wrong.reward <= talk.reward < 0.5


async def test_a_reply_without_an_end_counts_as_truncated() -> None:
    environment = Reasoning(max_tokens=4)
    outcome = await environment.rollout(problem(environment), ScriptedChat(lambda _: "a b c d e f"))
    assert outcome.status == "truncated"


async def test_the_conversation_is_examples_with_answers_and_then_the_question() -> None:
    environment = Reasoning("gcd", num_examples=2)
    task, chat = problem(environment), ScriptedChat(lambda _: "1")
    await environment.rollout(task, chat)
    (conversation,) = chat.conversations
    assert [message["role"] for message in conversation] == ["system", *["user", "assistant"] * 2, "user"]
    assert conversation[-1]["content"] == task.entry["question"]
    assert task.entry["question"] not in [message["content"] for message in conversation[:-1]]


def test_tasks_are_those_of_their_seed() -> None:
    environment = Reasoning()
    first, again, other = (
        [task.entry["question"] for task in islice(environment.tasks(seed), 20)] for seed in (1, 1, 2)
    )
    assert first == again != other
    assert len(set(first)) > 15


def test_a_dataset_that_does_not_exist_or_refuses_its_settings_is_named() -> None:
    with pytest.raises(UnknownDataset, match="no dataset 'sums'"):
        Reasoning("sums")
    with pytest.raises(UnknownDataset, match="gcd refuses"):
        Reasoning("gcd", {"no_such_setting": 1})
    with pytest.raises(UnknownDataset, match="chain_sum refuses"):
        Reasoning("chain_sum", {"min_terms": 5, "max_terms": 2})
    assert "letter_counting" in datasets()
