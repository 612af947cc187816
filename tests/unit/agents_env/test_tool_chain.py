"""Tool chains: what the model is shown, what counts as right, and how long chains are."""

from __future__ import annotations

from fractions import Fraction
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents_env.environment import Message
from agents_env.environments.tool_chain import (
    LENGTHS_OF_TEN,
    VALUE_MAX,
    WORKED_EXAMPLE,
    Chain,
    Step,
    ToolChain,
    answer_value,
    call_value,
)
from tests.unit.agents_env.scripted_chat import ScriptedChat
from tests.unit.agents_env.scripted_server import perfect

CHAIN = Chain(12, (Step("Add", 7), Step("Multiply by", 3)))  # 12 + 7 = 19, 19 * 3 = 57


def said(conversation: list[Message]) -> list[str]:
    return [message["content"] for message in conversation[len(WORKED_EXAMPLE) :]]


def flawless(messages: list[Message]) -> str:
    return perfect([dict(message) for message in messages])  # type: ignore[arg-type]


async def play(*replies: str) -> tuple[float, list[str]]:
    """The reward of these replies to CHAIN, and all that was said."""
    rest = iter(replies)
    chat = ScriptedChat(lambda _: next(rest))
    outcome = await ToolChain().rollout(CHAIN, chat)
    return outcome.reward, said(chat.conversations[-1])


async def test_a_chain_without_a_mistake_is_worth_one_and_shows_each_result() -> None:
    reward, words = await play("calc(12 + 7)", "calc(19 * 3)", "57")
    assert reward == 1.0
    assert words == ["Start with 12. Add 7.", "calc(12 + 7)", "19. Multiply by 3.", "calc(19 * 3)", "57. Result?"]


async def test_an_answer_without_an_end_counts_as_truncated() -> None:
    for answer, status in (("57", "completed"), ("57 " * 99, "truncated")):
        rest = iter(("calc(12 + 7)", "calc(19 * 3)", answer))
        assert (await ToolChain().rollout(CHAIN, ScriptedChat(lambda _, rest=rest: next(rest)))).status == status  # type: ignore[misc]


@pytest.mark.parametrize(
    ("replies", "right"),
    [
        (("no", "no", "no"), 0),
        (("calc(12 + 7)", "no", "19"), 1),  # the last number shown, but not the chain's
        (("calc(12 + 7)", "no", "57"), 2),
        (("calc(12 + 8)", "calc(20 * 3)", "60"), 1),  # a wrong call, then right about the number shown
        (("calc(12 + 7)", "calc(19 * 3)", "It is 57"), 2),
        (("I call calc(12 + 7)", "calc(12 * 3)", "57"), 2),  # nothing was shown after the talk: 12 still stands
        (("calc(12 + 7) calc(12 + 7)", "calc(36)", "36"), 1),
        (("calc(19)", "calc(57)", "57."), 3),
    ],
)
async def test_the_reward_is_the_share_of_turns_that_were_right(replies: tuple[str, ...], right: int) -> None:
    reward, _ = await play(*replies)
    assert reward == pytest.approx(right / 3)


async def test_what_is_no_call_is_told_so_and_the_chain_goes_on() -> None:
    _, words = await play("19", "calc(1/0)", "?")
    assert words[2] == "Error: not one call. Multiply by 3."
    assert words[4] == "Error: not one call. Result?"


@pytest.mark.parametrize("reply", ["", "calc()", "calc(1) ", "Calc(1)", "calc(1)\ncalc(1)", "calc(a)", "calc(1", "1"])
def test_only_one_whole_call_is_a_call(reply: str) -> None:
    assert call_value(reply) == (Fraction(1) if reply == "calc(1) " else None)


@given(st.text(max_size=40))
def test_any_reply_can_be_read(text: str) -> None:
    for value in (call_value(text), call_value(f"calc({text})"), answer_value(text)):
        assert value is None or isinstance(value, Fraction)


def test_the_worked_example_follows_the_rules_it_shows() -> None:
    calls = [message["content"] for message in WORKED_EXAMPLE if message["role"] == "assistant"]
    assert [call_value(call) for call in calls] == [7, 14, None]
    assert answer_value(calls[-1]) == 14


def test_tasks_are_those_of_their_seed() -> None:
    first, again, other = ([c.task_id for c in islice(ToolChain().tasks(seed), 50)] for seed in (3, 3, 4))
    assert first == again != other


def test_most_chains_are_short_and_few_are_long_in_any_ten_of_a_stream() -> None:
    chains = list(islice(ToolChain().tasks(0), 500))
    assert {len(chain.steps) for chain in chains} == set(range(1, 9))
    for start in range(0, len(chains), len(LENGTHS_OF_TEN)):
        lengths = sorted(len(chain.steps) for chain in chains[start : start + len(LENGTHS_OF_TEN)])
        assert lengths[:8] == [1, 1, 1, 1, 2, 2, 2, 3]
        assert lengths[8] in (4, 5)
        assert lengths[9] in (6, 7, 8)


def test_values_stay_small_through_every_chain() -> None:
    for chain in islice(ToolChain().tasks(1), 500):
        value = Fraction(chain.start)
        for step in chain.steps:
            value = step.apply(value)
            assert 0 <= value <= VALUE_MAX
        assert value == chain.answer


async def test_a_model_that_makes_no_mistake_earns_one_on_every_task() -> None:
    environment = ToolChain()
    for chain in islice(environment.tasks(2), 60):
        chat = ScriptedChat(flawless)
        outcome = await environment.rollout(chain, chat)
        assert outcome.reward == 1.0
        assert len(chat.conversations) == len(chain.steps) + 1
        assert outcome.metrics["calls"] == len(chain.steps)
